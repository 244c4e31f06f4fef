"""Flash attention of cuDNN on NVIDIA GPUs, with an additive mask."""

from typing import Any

import jax
import jax.numpy as jnp


def bias(mask: jax.Array, dtype: Any) -> jax.Array:
    """Additive form of mask bool[B, T, S]: [B, 1, T, S] in `dtype`, 0 where a query sees a key."""
    return jnp.where(mask[:, None], 0.0, 0.7 * float(jnp.finfo(dtype).min)).astype(dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Grouped-query attention. q: [B, T, N, H]; k, v: [B, S, K, H]; bias: from `bias`. Returns [B, T, N, H].

    cuDNN wants an even T and S, bfloat16 or float16, and H a multiple of 8 up to 128 (256 from compute capability 9).

    Raises:
      ValueError: a length is odd.
    """
    T, S = q.shape[1], k.shape[1]
    if T % 2 or S % 2:
        raise ValueError(f"model.attention cudnn: rows of {T} tokens that see {S} are odd; make learner.buckets multiples of 16")
    return jax.nn.dot_product_attention(q, k, v, bias=jax.lax.stop_gradient(bias), implementation="cudnn")
