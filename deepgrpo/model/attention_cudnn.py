"""Flash attention of cuDNN on NVIDIA GPUs, with an additive mask."""

from typing import Any

import jax
import jax.numpy as jnp

from deepgrpo.model.attention_splash import fill

# What JAX itself adds to a masked score before cuDNN sees it. The kernel subtracts two such values and takes exp2 of them in
# another scale: near the dtype's end, where a mask usually lies, that overflows and gives NaN.
MASKED = -float(2 << 40)
TILE = 64  # lengths are filled up to it; JAX's own rule asks for even ones
HEAD = 8  # and so is the head size


def bias(mask: jax.Array, dtype: Any) -> jax.Array:
    """Additive form of mask bool[B, T, S] in `dtype`: 0 where a query sees a key. [B, 1, T', S'], both lengths filled up."""
    additive = jnp.where(mask[:, None], 0.0, MASKED).astype(dtype)
    return fill(fill(additive, 2, MASKED, TILE), 3, MASKED, TILE)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Grouped-query attention. q: [B, T, N, H]; k, v: [B, S, K, H]; bias: from `bias`. Returns [B, T, N, H].

    Raises:
      NotImplementedError, RuntimeError: JAX's own rule says that this cuDNN has no kernel for it (a head size above 128, or 256
        from compute capability 9; another dtype than bfloat16 and float16; no cuDNN).
    """
    T, H = q.shape[1], q.shape[3]
    q, k, v = (fill(fill(x, 1, 0, TILE), 3, 0, HEAD) for x in (q, k, v))
    scale = H**-0.5  # of the head size before it was filled up
    out = jax.nn.dot_product_attention(q, k, v, bias=jax.lax.stop_gradient(bias), scale=scale, implementation="cudnn")
    return out[:, :T, :, :H]
