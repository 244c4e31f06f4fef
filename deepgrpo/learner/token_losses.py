"""Losses of single tokens, as pure functions of arrays of one shape, any float dtype."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.learner import TEACHER_LOSSES

KL_TYPES = ("low_var_kl", "kl", "abs", "mse")
FAR = 20.0  # log-ratios, and log-probs of shaped teacher tokens, are clamped there, so that exp is finite in float32
HIGHEST_K3 = 10.0


def ppo_clip_token(log_ratio, advantages, clip_low: float, clip_high: float, clip_c: float):
    """Dual-clip PPO loss of each token (Schulman et al. 2017; dual clip: Ye et al. 2020).

        d = clip(log_ratio, -20, 20),  rho = exp(d)
        l = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));   for A < 0: l = min(l, -A clip_c)

    Args:
      log_ratio: logp - old_logp, or a sequence's (`sequence_log_ratio`).

    Returns:
      loss; clipped (1 where the clip decides); approx_kl = -d; clipped_lower (1 where the dual clip decides). Same shape each.
    """
    d = jnp.clip(log_ratio, -FAR, FAR)
    ratio = jnp.exp(d)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(unclipped, clipped)
    ceiling = -advantages * clip_c
    lower = (advantages < 0) & (loss > ceiling)
    indicators = ((clipped > unclipped).astype(loss.dtype), -d, lower.astype(loss.dtype))
    return jnp.where(lower, ceiling, loss), *jax.lax.stop_gradient(indicators)


def sequence_log_ratio(log_ratio, sample, row_share, per_token_gradient: bool):
    """Log of the geometric-mean ratio of each token's whole response (GSPO, Zheng et al. 2025): float[B, T].

        log s = 1/|y| sum_t log_ratio_t

    With `per_token_gradient` (their GSPO-token) the value is the same, and its gradient goes to the token's own log-prob alone:
    log s_t = stopgrad(log s) + log_ratio_t - stopgrad(log_ratio_t). Where a response's tokens share one advantage, both
    have the same gradient; with advantages of single tokens (TreeRL) they differ.

    Args:
      log_ratio: float[B, T], logp - old_logp. sample: int32[B, T], number of the response within its packed row, 0 for none.
      row_share: float[B, T], 1 / |y| of the token's response, 0 for none.
    """
    sums = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=x.shape[0] + 1))(log_ratio * row_share, sample)
    whole = jnp.take_along_axis(sums, sample, axis=1)
    if not per_token_gradient:
        return whole
    return jax.lax.stop_gradient(whole - log_ratio) + log_ratio


def tis_weight(old_logp, rollout_logp, cap: float):
    """Truncated importance weight of each token for having been sampled by the rollout engine, not by the old policy.

    w = stopgrad(min(exp(old - rollout), cap)); 1 where the engine's log-prob is not known (NaN).
    """
    weight = jnp.exp(jnp.minimum(old_logp - rollout_logp, np.log(cap)))
    return jax.lax.stop_gradient(jnp.where(jnp.isnan(rollout_logp), 1.0, weight))


def kl_token(logp, ref_logp, kl_type: str):
    """Penalty of each token for leaving the reference.

    low_var_kl (k3, Schulman 2020): x = clip(ref - logp, -20, 20), k = clip(exp(x) - x - 1, -10, 10). kl (k1): logp - ref.
    abs: |logp - ref|. mse (k2): (logp - ref)^2 / 2.

    Raises:
      ValueError: unknown kl_type.
    """
    if kl_type not in KL_TYPES:
        raise ValueError(f"kl_type {kl_type!r}, expected one of {', '.join(KL_TYPES)}")
    if kl_type == "kl":
        return logp - ref_logp
    if kl_type == "abs":
        return jnp.abs(logp - ref_logp)
    if kl_type == "mse":
        return 0.5 * jnp.square(logp - ref_logp)
    x = jnp.clip(ref_logp - logp, -FAR, FAR)
    return jnp.clip(jnp.exp(x) - x - 1.0, -HIGHEST_K3, HIGHEST_K3)


def k3_clipped(logp, ref_logp):
    """Tokens that low_var_kl's clips leave without a gradient: x = ref - logp above 2.61, or below -11."""
    x = ref_logp - logp
    return (jnp.abs(x) > FAR) | (jnp.exp(jnp.minimum(x, FAR)) - x - 1.0 > HIGHEST_K3)


def moved_token(log_ratio):
    """How far a token has moved from the policy that it was sampled with: exp(d) - 1 - d >= 0, d = clip(log_ratio, -20, 20).

    Its mean over sampled tokens estimates KL(old || policy) (k3, Schulman 2020). No gradient.
    """
    d = jax.lax.stop_gradient(jnp.clip(log_ratio, -FAR, FAR))
    return jnp.expm1(d) - d


def null_token(logp, coef, gamma: float):
    """No loss: 0, 0."""
    return jnp.zeros_like(logp), jnp.zeros_like(logp)


def sft_token(logp, coef, gamma: float):
    """Negative log-likelihood: -logp, 1."""
    return -logp, jnp.ones_like(logp)


def snis_token(logp, coef, gamma: float):
    """Weighted log-likelihood: -stopgrad(coef) logp, 1."""
    return -jax.lax.stop_gradient(coef) * logp, jnp.ones_like(logp)


def luffy_token(logp, coef, gamma: float):
    """Shaped loss of teacher tokens (Yan et al. 2025): p = exp(clip(logp, -20, 0)), f = p / (p + gamma), l = -f coef.

    Returns:
      (loss, f), in the arguments' shape; the gradient flows through f.
    """
    p = jnp.exp(jnp.clip(logp, -FAR, 0.0))
    weight = p / (p + gamma)
    return -weight * coef, weight


def teacher_token(logp, coef, kind: str, gamma: float):
    """Loss and shaping weight of teacher tokens by the function that `TEACHER_LOSSES` names for `kind`.

    coef: the teacher's advantage A* in its group, or the weight c of snis. gamma: objective.luffy_gamma.
    """
    module, _, name = TEACHER_LOSSES[kind].partition(":")
    return getattr(importlib.import_module(module), name)(logp, coef, gamma)
