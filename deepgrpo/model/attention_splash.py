"""Splash attention, a Pallas kernel for TPUs that skips what lies behind the causal mask."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LANES = 128  # the kernel wants lengths and head size in multiples of it
LONGEST_BLOCK = 512  # of queries or keys at once; the kernel's default of 128 reads keys and values four times as often
NOTHING, ABSENT = -1, -2  # segments of filled-up tokens, and of context that nothing may see


def fill(x: jax.Array, axis: int, value: float = 0, multiple: int = LANES) -> jax.Array:
    """x with `axis` filled up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value)


def block(length: int) -> int:
    """The longest block, a multiple of LANES, that divides a length that is one."""
    return max(size for size in range(LANES, LONGEST_BLOCK + 1, LANES) if length % size == 0)


def attention(q, k, v, segments, context_segments=None, placed: NamedSharding | None = None) -> jax.Array:
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
        queries, keys = block(mask.shape[0]), block(mask.shape[1])
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
