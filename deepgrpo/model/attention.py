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


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`attention` over a cache laid out for decoding.

    Keys are stored transposed: with few queries a row, the product runs along S, contiguous, which is several times faster on
    a CPU than a dot product a key.

    Args:
      q: [B, T, N, H]. k: [B, K, H, S]. v: [B, K, S, H]. mask: bool[B, T, S].

    Returns:
      [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    K = k.shape[1]
    q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * (N // K), H)
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32) * H**-0.5  # [B, K, T * N / K, S]
    mask = jnp.repeat(mask, N // K, axis=1)[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(v.dtype)
    out = jnp.matmul(weights, v).reshape(B, K, T, N // K, H).transpose(0, 2, 1, 3, 4)
    return out.reshape(B, T, N, H).astype(q.dtype)


def write_cache(cache: tuple[jax.Array, jax.Array], k: jax.Array, v: jax.Array, positions: jax.Array):
    """Writes k, v [B, T, K, H] into (k [B, K, H, S], v [B, K, S, H]) at positions int32[B, T]; those >= S are dropped."""

    def row(keys, values, k, v, at):  # keys: [K, H, S]; values: [K, S, H]; k, v: [T, K, H]; at: int32[T]
        keys = keys.at[:, :, at].set(k.transpose(1, 2, 0).astype(keys.dtype), mode="drop")
        return keys, values.at[:, at].set(v.transpose(1, 0, 2).astype(values.dtype), mode="drop")

    return jax.vmap(row)(*cache, k, v, positions)


def segment_mask(segments: jax.Array) -> jax.Array:
    """Causal mask inside segments: bool[B, T, T] from int32[B, T]; segment 0 is padding and attends only to itself."""
    T = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    causal = jnp.tril(jnp.ones((T, T), bool))
    padding = (segments[:, :, None] == 0) & ~jnp.eye(T, dtype=bool)
    return same & causal & ~padding
