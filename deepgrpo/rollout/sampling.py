"""Sampling on the device: the restricted distribution, one draw a row, and the log-prob of what was drawn.

Neither sorts the vocabulary. Top-k and top-p are a threshold on the logit, found exactly by bisection over the bits of a float
(32 passes of compare and sum); the draw inverts the distribution function in two levels with two uniforms a row, instead of
one Gumbel variable an entry. Logits that tie with the last one kept are kept too, so the result does not depend on id order.
"""

import dataclasses

import jax
import jax.numpy as jnp

from deepgrpo.rollout.engine import Sampling


@dataclasses.dataclass(frozen=True)
class Restriction:
    """The parts of a distribution that decide what is compiled; the values of temperature, k and p do not.

    num_real_ids: ids at and above are phantom (embedding rows without a token) and have probability 0.
    """

    num_real_ids: int
    greedy: bool
    top_k: bool
    top_p: bool

    @classmethod
    def of(cls, sampling: Sampling, num_real_ids: int) -> "Restriction":
        greedy = sampling.temperature == 0
        top_k = not greedy and 0 < sampling.top_k < num_real_ids
        return cls(num_real_ids, greedy, top_k, not greedy and sampling.top_p < 1)


def sample(logits: jax.Array, keys: jax.Array, temperature, top_k, top_p, restriction: Restriction):
    """Draws one id a row from softmax(logits / temperature), restricted to real ids, top-k, then top-p, renormalised.

    Args:
      logits: float32[B, V]. keys: key[B], one a row; a row's draw depends on its own key and logits alone.
      temperature, top_p: float32 scalars. top_k: int32 scalar. Each may be traced and is read only where `restriction` says so.

    Returns:
      ids int32[B], and logps float32[B] of exactly the distribution drawn from (greedy: of temperature 1).
    """
    V = logits.shape[-1]
    logits = jnp.where(jnp.arange(V) < restriction.num_real_ids, logits, -jnp.inf)
    blocks = fold(logits if restriction.greedy else logits / temperature)  # [B, R, C]
    top = blocks.max(axis=1).max(axis=-1)
    if restriction.greedy:
        ids = jnp.arange(blocks[0].size, dtype=jnp.int32).reshape(blocks.shape[1:])
        first = jnp.where(blocks == top[:, None, None], ids, V).min(axis=1).min(axis=-1)  # an argmax does not vectorise
        return first, -jnp.log(total(jnp.exp(blocks - top[:, None, None])))
    if restriction.top_k:
        kept = blocks >= threshold(blocks, jnp.ones_like(blocks), jnp.full(top.shape, top_k, jnp.float32))[:, None, None]
        blocks = jnp.where(kept, blocks, -jnp.inf)
    if restriction.top_p:
        mass = jnp.exp(blocks - top[:, None, None])
        kept = blocks >= threshold(blocks, mass, top_p * total(mass))[:, None, None]
        blocks = jnp.where(kept, blocks, -jnp.inf)
    return draw(blocks, top, keys, V)


def fold(x: jax.Array) -> jax.Array:
    """Lays [B, V] out as [B, R, C], id = row * C + column, C a power of two near sqrt(V); filled up with -inf.

    Sums over rows vectorise, sums over the minor axis of a CPU do not; and the two levels of the draw are these two axes.
    """
    B, V = x.shape
    C = 1 << max(0, (V.bit_length() - 1) // 2)
    R = -(-V // C)
    return jnp.pad(x, ((0, 0), (0, R * C - V)), constant_values=-jnp.inf).reshape(B, R, C)


def total(x: jax.Array) -> jax.Array:
    """[B, R, C] -> [B], rows first."""
    return x.sum(axis=1).sum(axis=-1)


def threshold(values: jax.Array, weights: jax.Array, enough: jax.Array) -> jax.Array:
    """The largest t whose kept set {values >= t} weighs at least `enough`, a row.

    Args:
      values: float32[B, R, C], no NaN. weights: float32[B, R, C], >= 0. enough: float32[B], at most the row's whole weight.

    Returns:
      float32[B], one of the row's values.
    """
    bits = ordered(values)
    t = jnp.zeros(enough.shape, jnp.uint32)

    def set_bit(i, t):  # keep bit 31 - i if what is at or above still weighs enough
        candidate = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(total(jnp.where(bits >= candidate[:, None, None], weights, 0.0)) >= enough, candidate, t)

    t = jax.lax.fori_loop(0, 32, set_bit, t)
    # `t` is the bits of a value unless rounding made even the whole row weigh too little; then everything is kept.
    return jnp.where(t < ordered(jnp.float32(-jnp.inf)), -jnp.inf, unordered(t))


def ordered(x: jax.Array) -> jax.Array:
    """float32 -> uint32 with the same order (sign bit flipped, negative numbers complemented)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def unordered(bits: jax.Array) -> jax.Array:
    """Inverse of `ordered`."""
    return jax.lax.bitcast_convert_type(jnp.where(bits >> 31 == 1, bits ^ jnp.uint32(1 << 31), ~bits), jnp.float32)


def draw(blocks: jax.Array, top: jax.Array, keys: jax.Array, V: int) -> tuple[jax.Array, jax.Array]:
    """One id a row from softmax over [R, C]: first the column, then the row within it.

    Args:
      blocks: float32[B, R, C], -inf for ids that cannot be drawn. top: float32[B], the maximum of each row.

    Returns:
      ids int32[B] < V and their log-probs float32[B].
    """
    R, C = blocks.shape[1:]
    columns = jnp.exp(blocks - top[:, None, None]).sum(axis=1)  # float32[B, C]
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    column = invert(columns, uniforms[:, 0])
    entries = jnp.take_along_axis(blocks, column[:, None, None], axis=2)[:, :, 0]  # float32[B, R]
    row = invert(jnp.exp(entries - top[:, None]), uniforms[:, 1])
    logit = jnp.take_along_axis(entries, row[:, None], axis=1)[:, 0]
    return row * C + column, logit - top - jnp.log(columns.sum(axis=-1))


def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index whose cumulative weight exceeds uniform * total: int32[B] from float32[B, n] and float32[B].

    An index of weight 0 is never returned, however the cumulative sum was rounded.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    hit = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    first = jnp.argmax(hit, axis=-1)
    return jnp.where(hit.any(axis=-1), first, jnp.argmax(weights, axis=-1)).astype(jnp.int32)
