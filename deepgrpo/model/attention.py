"""Attention of packed rows behind one function, and of single tokens over a cache; backends differ in speed, never in the result.

Who sees whom is said once, by `Sight`, and each backend derives what it needs from that.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
    return cudnn_bias(sight.mask(), dtype) if backend == "cudnn" else None


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
        return cudnn_attention(q, k, v, prepared)
    if backend == "splash":
        segments = None if sight.context is None else sight.context.segments
        return splash_attention(q, k, v, sight.segments, segments, placed)
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


######################################################################################################################
#  Flash attention of cuDNN on NVIDIA GPUs, with an additive mask.
######################################################################################################################

# What JAX itself adds to a masked score before cuDNN sees it. The kernel subtracts two such values and takes exp2 of them in
# another scale: near the dtype's end, where a mask usually lies, that overflows and gives NaN.
MASKED = -float(2 << 40)
TILE = 64  # lengths are filled up to it; JAX's own rule asks for even ones
HEAD = 8  # and so is the head size


def cudnn_bias(mask: jax.Array, dtype: Any) -> jax.Array:
    """Additive form of mask bool[B, T, S] in `dtype`: 0 where a query sees a key. [B, 1, T', S'], both lengths filled up."""
    additive = jnp.where(mask[:, None], 0.0, MASKED).astype(dtype)
    return fill(fill(additive, 2, MASKED, TILE), 3, MASKED, TILE)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Grouped-query attention. q: [B, T, N, H]; k, v: [B, S, K, H]; bias: from `cudnn_bias`. Returns [B, T, N, H].

    Raises:
      NotImplementedError, RuntimeError: JAX's own rule says that this cuDNN has no kernel for it (a head size above 128, or 256
        from compute capability 9; another dtype than bfloat16 and float16; no cuDNN).
    """
    T, H = q.shape[1], q.shape[3]
    q, k, v = (fill(fill(x, 1, 0, TILE), 3, 0, HEAD) for x in (q, k, v))
    scale = H**-0.5  # of the head size before it was filled up
    out = jax.nn.dot_product_attention(q, k, v, bias=jax.lax.stop_gradient(bias), scale=scale, implementation="cudnn")
    return out[:, :T, :, :H]


######################################################################################################################
#  Splash attention, a Pallas kernel for TPUs that skips what lies behind the causal mask.
######################################################################################################################

LANES = 128  # the kernel wants lengths and head size in multiples of it
LONGEST_BLOCK = 512  # of queries or keys at once; the kernel's default of 128 reads keys and values four times as often
NOTHING, ABSENT = -1, -2  # segments of filled-up tokens, and of context that nothing may see


def fill(x: jax.Array, axis: int, value: float = 0, multiple: int = LANES) -> jax.Array:
    """x with `axis` filled up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)


def splash_block(length: int) -> int:
    """The longest block, a multiple of LANES, that divides a length that is one."""
    return max(size for size in range(LANES, LONGEST_BLOCK + 1, LANES) if length % size == 0)


def splash_attention(q, k, v, segments, context_segments=None, placed: NamedSharding | None = None) -> jax.Array:
    """Grouped-query attention of packed rows.

    The kernel compares one segment a query with one a key, so a prefix that a token sees must carry the token's own segment: two
    responses to one prompt may not share a packed row (`placement`, siblings_apart).

    Args:
      q: [B, T, N, H]. k, v: [B, C + T, K, H], the context first. segments: int32[B, T]. context_segments: int32[B, C] or None.
      placed: of q, when it is spread over devices.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    interpret = (jax.default_backend() if placed is None else placed.mesh.devices.flat[0].platform) != "tpu"
    C = k.shape[1] - q.shape[1]
    if context_segments is None:
        context_segments = jnp.zeros((q.shape[0], 0), jnp.int32)

    def local(q, k, v, segments, context_segments):
        from jax.experimental.pallas.ops.tpu import splash_attention as splash  # on first use: the import takes a while

        T, H = q.shape[1], q.shape[3]
        q = fill(fill(q * H**-0.5, 1), 3).transpose(0, 2, 1, 3)  # [B, N, T, H]
        k, v = (
            jnp.concatenate([fill(x[:, :C], 1), fill(x[:, C:], 1)], axis=1).transpose(0, 2, 1, 3)
            for x in (fill(k, 3), fill(v, 3))
        )
        own = fill(segments, 1, NOTHING)
        seen = fill(jnp.where(context_segments > 0, context_segments, ABSENT), 1, ABSENT)
        mask = splash.CausalMask((own.shape[1], seen.shape[1] + own.shape[1]), offset=seen.shape[1])  # context is all in the past
        queries, keys = splash_block(mask.shape[0]), splash_block(mask.shape[1])
        forward = dict(block_q=queries, block_kv=keys, block_kv_compute=keys)
        backward = dict(block_q_dkv=queries, block_kv_dkv=keys, block_kv_dkv_compute=keys, block_q_dq=queries, block_kv_dq=keys)
        run = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q.shape[1]), block_sizes=splash.BlockSizes(**forward, **backward), interpret=interpret
        )
        ids = splash.SegmentIds(q=own, kv=jnp.concatenate([seen, own], axis=1))
        out = jax.vmap(lambda q, k, v, ids: run(q, k, v, segment_ids=ids))(q, k, v, ids)
        return out.transpose(0, 2, 1, 3)[:, :T, :, :H]

    if placed is not None and placed.mesh.size > 1:
        rows, heads = P(placed.spec[0]), placed.spec
        specs = (heads, heads, heads, rows, rows)
        local = jax.shard_map(local, mesh=placed.mesh, in_specs=specs, out_specs=heads, check_vma=False)
    return local(q, k, v, segments, context_segments)
