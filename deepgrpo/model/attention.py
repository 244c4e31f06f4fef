"""Attention of packed rows behind one function, and of single tokens over a cache; backends differ in speed, never in the result.

Who sees whom is said once, by `Sight`, and each backend derives what it needs from that.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepgrpo.model import attention_cudnn, attention_splash

BACKENDS = ("xla", "cudnn", "splash")
QUERY_CHUNK = 256  # queries whose scores exist at once with `xla`


class Context(NamedTuple):
    """Keys and values that packed rows see besides their own.

    index: int32[cells, R * C], B = cells * R packed rows; the context of rows [c * R, (c + 1) * R) are these of their own tokens,
      as r * T + t. A cell never looks at another, so that cells may live on different devices.
    segments: int32[B, C], number of the prefix that a context token belongs to, 0: nothing, seen by none.
    prefixes: int32[B, T], number of the prefix that a token sees, 0: none. For `splash` it must be the token's segment or 0.
    """

    index: jax.Array
    segments: jax.Array
    prefixes: jax.Array


class Sight(NamedTuple):
    """Who sees whom in packed rows: a token sees the tokens of its own segment up to itself, and all of its prefix.

    segments: int32[B, T]; those of segment 0 are padding, see earlier padding and are seen by nothing else.
    """

    segments: jax.Array
    context: Context | None

    def mask(self, start: int = 0, stop: int | None = None) -> jax.Array:
        """bool[B, stop - start, C + stop]: what queries [start, stop) see of the context's and the row's first `stop` keys."""
        stop = self.segments.shape[1] if stop is None else stop
        queries, keys = self.segments[:, start:stop], self.segments[:, :stop]
        causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        own = (queries[:, :, None] == keys[:, None, :]) & causal
        if self.context is None:
            return own
        prefixes = self.context.prefixes[:, start:stop, None]
        shared = (prefixes == self.context.segments[:, None, :]) & (prefixes > 0)
        return jnp.concatenate([shared, own], axis=-1)


def choose_backend(name: str, device: jax.Device, dtype: Any) -> str:
    """`model.attention` with `auto` resolved: cudnn on NVIDIA GPUs of compute capability 8 and up in bfloat16, splash on TPUs,
    xla elsewhere."""
    if name != "auto":
        return name
    if device.platform == "tpu":
        return "splash"
    nvidia = device.platform in ("gpu", "cuda") and "cuda" in device.client.platform_version
    modern = nvidia and float(device.compute_capability) >= 8.0
    return "cudnn" if modern and jnp.dtype(dtype) == jnp.bfloat16 else "xla"


def prepare(sight: Sight, backend: str, dtype: Any) -> Any:
    """What a backend needs to know of `sight`, computed once for all layers: pytree for `packed_attention`."""
    return attention_cudnn.bias(sight.mask(), dtype) if backend == "cudnn" else None


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, prepared: Any, backend: str, placed=None
) -> jax.Array:
    """Grouped-query attention of packed rows over their contexts and themselves.

    Args:
      q: [B, T, N, H]. k, v: [B, T, K, H], N a multiple of K, rotated to their positions.
      prepared: from `prepare`. placed: NamedSharding of q, for a backend that XLA cannot partition by itself.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    if sight.context is not None:
        k, v = (jnp.concatenate([gather(x, sight.context.index), x], axis=1) for x in (k, v))
    if backend != "xla":
        k, v = (split_heads(x, placed) for x in (k, v))
    if backend == "cudnn":
        return attention_cudnn.attention(q, k, v, prepared)
    if backend == "splash":
        segments = None if sight.context is None else sight.context.segments
        return attention_splash.attention(q, k, v, sight.segments, segments, placed)
    return chunked_attention(q, k, v, sight)


def split_heads(x: jax.Array, placed: Any) -> jax.Array:
    """Keys or values [B, S, K, H] for queries whose heads are spread as `placed` says: where the devices do not divide K, each
    head is repeated until they do, since a fused kernel runs on a device's own heads."""
    axis = None if placed is None or len(placed.spec) < 3 else placed.spec[2]
    if axis is None:
        return x
    repeats = math.lcm(x.shape[2], placed.mesh.shape[axis]) // x.shape[2]
    return x if repeats == 1 else jax.lax.with_sharding_constraint(jnp.repeat(x, repeats, axis=2), placed)


def gather(x: jax.Array, index: jax.Array) -> jax.Array:
    """Context tokens of x [B, T, K, H] at index int32[cells, R * C]: [B, C, K, H]. The gradient of a token that is seen often is
    summed in float32."""
    B, T, K, H = x.shape
    cells = index.shape[0]
    tokens = x.reshape(cells, B // cells * T, K, H).astype(jnp.float32)
    # A batched gather, so that cells on different devices need nothing of each other.
    seen = jnp.take_along_axis(tokens, index[:, :, None, None], axis=1, mode="promise_in_bounds")
    return seen.astype(x.dtype).reshape(B, -1, K, H)


def chunked_attention(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> jax.Array:
    """`attention` by chunks of queries, each over the keys up to its end. Of several chunks, the backward pass computes the
    scores again, so that those of one chunk exist at once."""
    T, S = q.shape[1], k.shape[1]
    if T <= QUERY_CHUNK:
        return attention(q, k, v, sight.mask())
    parts = []
    for start in range(0, T, QUERY_CHUNK):
        stop = min(T, start + QUERY_CHUNK)
        seen = slice(0, S - T + stop)
        one = jax.checkpoint(lambda q, k, v, sight, span=(start, stop): attention(q, k, v, sight.mask(*span)), prevent_cse=False)
        parts.append(one(q[:, start:stop], k[:, seen], v[:, seen], sight))
    return jnp.concatenate(parts, axis=1)


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
