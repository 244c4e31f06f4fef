"""One attention function; backends differ in speed, never in the result."""

import jax
import jax.numpy as jnp


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention with an explicit mask; softmax in float32.

    Args:
      q: [B, T, N, H]. k, v: [B, S, K, H], N a multiple of K.
      mask: bool[B, T, S], True where query t may look at key s. A query that may look at nothing returns the mean of `v`.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return out.reshape(B, T, N, H).astype(q.dtype)


def segment_mask(segments: jax.Array) -> jax.Array:
    """Causal mask inside segments: bool[B, T, T] from int32[B, T]; segment 0 is padding and attends only to itself."""
    T = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    causal = jnp.tril(jnp.ones((T, T), bool))
    padding = (segments[:, :, None] == 0) & ~jnp.eye(T, dtype=bool)
    return same & causal & ~padding
