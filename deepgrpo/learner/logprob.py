"""Log-probabilities of scored tokens in blocks: no [tokens, vocabulary] array ever exists."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from deepgrpo.model.transformer import MASKED


def target_logps(logits, targets, temperature: float, num_real_ids: int, with_entropy: bool, entropy_gradient: bool = False):
    """Log-probability of each target under softmax(logits / temperature) without phantom ids, and the entropy.

    This is the distribution that the rollout engine samples from, before top-k and top-p. Computed in the logits' own dtype.

    Args:
      logits: float[..., V]. targets: int32[...], below num_real_ids.
      num_real_ids: ids from here on have no token and probability 0.

    Returns:
      (logp [...], entropy [...]; entropy is 0 without `with_entropy`, and carries a gradient only with `entropy_gradient`).
    """
    logits = logits / temperature
    vocabulary = jnp.arange(logits.shape[-1])
    if num_real_ids < logits.shape[-1]:
        logits = jnp.where(vocabulary < num_real_ids, logits, MASKED)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - normaliser
    if not with_entropy:
        return logp, jnp.zeros_like(logp)
    if not entropy_gradient:  # without it, the backward pass never sees a second array of the vocabulary's size
        logits, normaliser = jax.lax.stop_gradient((logits, normaliser))
    entropy = normaliser - jnp.sum(jnp.exp(logits - normaliser[..., None]) * logits, axis=-1)
    return logp, entropy


def blocked_logps(
    logps_of: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    hidden: jax.Array,
    targets: jax.Array,
    scored: jax.Array,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of hidden states, `block` columns at a time; the backward pass recomputes each block's logits.

    Blocks without any scored slot are skipped at run time. Batches put scored slots first, so R can be a static, generous width
    while the work follows the longest response of the micro-batch.

    Args:
      logps_of: (hidden [B, b, D], targets [B, b]) -> (logp, entropy), float32[B, b] each, e.g. by `target_logps`.
      hidden: [B, R, D]. targets: int32[B, R]. scored: bool[B, R].

    Returns:
      (logp, entropy), float32[B, R] each; 0 in skipped blocks, arbitrary but finite in other slots that are not scored.
    """
    B, R = targets.shape
    block = min(block, R)
    padding = -R % block

    def blocks(x: jax.Array) -> jax.Array:  # [B, R, ...] -> [R / block, B, block, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)

    def skip(hidden_block, target_block):
        return (jnp.zeros((B, block), jnp.float32),) * 2

    # The checkpoint must hold the cond: inside it, the cond would hand the unembedding to the backward pass once a block.
    @functools.partial(jax.checkpoint, prevent_cse=False)  # a scan's body has nothing to be merged with
    def one(_, xs):
        hidden_block, target_block, scored_block = xs
        return None, jax.lax.cond(jnp.any(scored_block), logps_of, skip, hidden_block, target_block)

    _, (logp, entropy) = jax.lax.scan(one, None, (blocks(hidden), blocks(targets), blocks(scored)))
    joined = [jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :R] for x in (logp, entropy)]
    return joined[0], joined[1]
