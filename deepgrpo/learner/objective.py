"""The objective, as pure functions of arrays: no model, tokenizer or config inside, any float dtype.

Every token belongs to one stream: the student's main chains, the student's branches, or the teacher. Token losses are summed
with one weight a stream, and the weights hold the *global* denominators of the mini-batch. So a micro-batch returns its share of
the loss, shares add up, and neither micro-batching, packing, mesh nor row order can change the result beyond rounding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAIN, BRANCH, TEACHER = 0, 1, 2  # a token's `source`; NO_LOSS marks slots of a batch that hold no scored token
STREAMS = (MAIN, BRANCH, TEACHER)
NO_LOSS = -1
EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class Objective:
    """Hyper-parameters of the loss.

    The first six and tis_cap are keys of the config's `objective` section. teacher_reduction: whether teacher tokens share the
    students' denominator. teacher_coef: factor of the teacher's mean in separate_stream_mean. branch_lambda: weight of branch
    tokens. luffy_gamma: see `luffy_token`. tis_cap: see `tis_weight`; 0 for no correction.
    """

    clip_low: float
    clip_high: float
    clip_c: float
    kl_coef: float
    kl_type: str  # low_var_kl | kl | abs | mse
    teacher_loss: str  # null | sft | luffy | snis
    teacher_reduction: str  # mixed_token_mean | separate_stream_mean
    teacher_coef: float
    branch_lambda: float
    luffy_gamma: float
    tis_cap: float = 0.0

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "Objective":
        """From the config's `objective` section; what has no key there is as in the released scripts."""
        keys = ("clip_low", "clip_high", "clip_c", "kl_coef", "kl_type", "teacher_loss", "tis_cap")
        released = {"teacher_reduction": "mixed_token_mean", "teacher_coef": 1.0, "branch_lambda": 1.0, "luffy_gamma": 0.1}
        return cls(**{key: section[key] for key in keys}, **released)

    def __post_init__(self):
        for name, known in (
            ("kl_type", ("low_var_kl", "kl", "abs", "mse")),
            ("teacher_loss", ("null", "sft", "luffy", "snis")),
            ("teacher_reduction", ("mixed_token_mean", "separate_stream_mean")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"objective.{name} is {getattr(self, name)!r}, expected one of {known}")
        if self.tis_cap < 0.0:
            raise ValueError(f"objective.tis_cap is {self.tis_cap}, expected > 0, or 0 for no correction")
        if self.clip_c <= 1.0:
            raise ValueError(f"objective.clip_c is {self.clip_c}, expected > 1: it bounds the loss of negative advantages")


######################################################################################################################
#  Advantages (host, float64)
######################################################################################################################


def group_advantages(rewards: Sequence[float], group_ids: Sequence, mode: str) -> np.ndarray:
    """Advantage of each reward within its group: float64[n].

    group_mean: A = r - mean(group). grpo_std: A = (r - mean) / (std + 1e-6), std unbiased; a group of one has mean 0 and std 1.
    grpo_nostd: the same without the division. Equal rewards give exactly 0.

    Raises:
      ValueError: unknown mode.
    """
    if mode not in ("group_mean", "grpo_std", "grpo_nostd"):
        raise ValueError(f"advantage mode {mode!r}, expected group_mean, grpo_std or grpo_nostd")
    rewards = np.asarray(rewards, np.float64)
    _, first, group = np.unique(np.asarray(group_ids), return_index=True, return_inverse=True)
    size = np.bincount(group)
    shifted = rewards - rewards[first][group]  # a group's own reward as origin: the mean of equal rewards is then exact
    advantages = shifted - (np.bincount(group, shifted) / size)[group]
    if mode == "group_mean":
        return advantages
    advantages = np.where((size == 1)[group], rewards, advantages)
    if mode == "grpo_nostd":
        return advantages
    variance = np.bincount(group, advantages**2) / np.maximum(size - 1, 1)
    std = np.where(size == 1, 1.0, np.sqrt(variance))
    return advantages / (std[group] + 1e-6)


def whiten(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(A - mean) / (std + 1e-8) * mask over the valid tokens, std unbiased; advantages, mask: float64[n, T]."""
    valid = advantages[mask > 0]
    return (advantages - valid.mean()) / (valid.std(ddof=1) + EPS) * mask


def snis_weight(student_rewards: Sequence[float], teacher_reward: float, beta: float) -> float:
    """Self-normalised importance weight of a teacher row.

    c = exp(A*/beta) / mean_j exp(A_j/beta), j over students and teacher, A = r - mean; invariant to a shift of all rewards.
    """
    scaled = np.asarray([*student_rewards, teacher_reward], np.float64) / beta
    weights = np.exp(scaled - scaled.max())  # the maximum cancels in the quotient and keeps exp in range
    return float(weights[-1] / weights.mean())


######################################################################################################################
#  Token losses
######################################################################################################################


def ppo_clip_token(logp, old_logp, advantages, clip_low: float, clip_high: float, clip_c: float):
    """Dual-clip PPO loss of each token (Schulman et al. 2017; dual clip: Ye et al. 2020).

        d = clip(logp - old, -20, 20),  rho = exp(d)
        l = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));   for A < 0: l = min(l, -A clip_c)

    Args: arrays of one shape.

    Returns:
      loss; clipped (1 where the clip decides); approx_kl = -d; clipped_lower (1 where the dual clip decides). Same shape each.
    """
    d = jnp.clip(logp - old_logp, -20.0, 20.0)
    ratio = jnp.exp(d)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(unclipped, clipped)
    ceiling = -advantages * clip_c
    lower = (advantages < 0) & (loss > ceiling)
    indicators = ((clipped > unclipped).astype(loss.dtype), -d, lower.astype(loss.dtype))
    return jnp.where(lower, ceiling, loss), *jax.lax.stop_gradient(indicators)


def tis_weight(old_logp, rollout_logp, cap: float):
    """Truncated importance weight of each token for having been sampled by the rollout engine, not by the old policy.

    w = stopgrad(min(exp(old - rollout), cap)); 1 where the engine's log-prob is not known (NaN). Arrays of one shape.
    """
    weight = jnp.exp(jnp.minimum(old_logp - rollout_logp, np.log(cap)))
    return jax.lax.stop_gradient(jnp.where(jnp.isnan(rollout_logp), 1.0, weight))


def kl_token(logp, ref_logp, kl_type: str):
    """Penalty of each token for leaving the reference; arrays of one shape.

    low_var_kl (k3, Schulman 2020): x = clip(ref - logp, -20, 20), k = clip(exp(x) - x - 1, -10, 10). kl: logp - ref.
    abs: |logp - ref|. mse: (logp - ref)^2 / 2.
    """
    if kl_type == "kl":
        return logp - ref_logp
    if kl_type == "abs":
        return jnp.abs(logp - ref_logp)
    if kl_type == "mse":
        return 0.5 * jnp.square(logp - ref_logp)
    x = jnp.clip(ref_logp - logp, -20.0, 20.0)
    return jnp.clip(jnp.exp(x) - x - 1.0, -10.0, 10.0)


def luffy_token(logp, advantages, gamma: float):
    """Shaped loss of teacher tokens (Yan et al. 2025): p = exp(clip(logp, -20, 0)), f = p / (p + gamma), l = -f A.

    Returns:
      (loss, f), in the arguments' shape; the gradient flows through f.
    """
    p = jnp.exp(jnp.clip(logp, -20.0, 0.0))
    weight = p / (p + gamma)
    return -weight * advantages, weight


def teacher_token(logp, coef, kind: str, gamma: float):
    """Loss and shaping weight of teacher tokens: sft -logp; luffy; snis -stopgrad(c) logp; null 0."""
    if kind == "luffy":
        return luffy_token(logp, coef, gamma)
    if kind == "sft":
        return -logp, jnp.ones_like(logp)
    if kind == "snis":
        return -jax.lax.stop_gradient(coef) * logp, jnp.ones_like(logp)
    return jnp.zeros_like(logp), jnp.zeros_like(logp)


######################################################################################################################
#  Aggregation
######################################################################################################################


def aggregate(loss, mask, mode: str):
    """Sum and weight of a [B, T] token loss; the aggregated value is sum / weight, over whatever they were summed over.

    token-mean: sum over tokens, their number. seq-mean-token-sum: the same sum, number of rows. seq-mean-token-mean: sum of row
    means, number of rows. seq-mean-token-sum-norm: sum over tokens, T.
    """
    total = jnp.sum(loss * mask)
    if mode == "token-mean":
        return total, jnp.sum(mask)
    if mode == "seq-mean-token-sum":
        return total, jnp.asarray(loss.shape[0], loss.dtype)
    if mode == "seq-mean-token-mean":
        return jnp.sum(jnp.sum(loss * mask, 1) / (jnp.sum(mask, 1) + EPS)), jnp.asarray(loss.shape[0], loss.dtype)
    if mode == "seq-mean-token-sum-norm":
        return total, jnp.asarray(loss.shape[1], loss.dtype)
    raise ValueError(f"unknown aggregation {mode!r}")


def count_tokens(source):
    """Scored tokens of each stream: int32[3] from source int32[...]."""
    return jnp.stack([jnp.sum(source == s) for s in STREAMS])


def stream_weights(tokens, o: Objective, auto_coef=1.0):
    """Weights that turn sums of token losses into the mini-batch's loss.

        mixed_token_mean:     (S_m + lam S_b + S_t) / (T_m + lam T_b + T_t) + kl_coef (K_m + lam K_b) / (T_m + lam T_b)
        separate_stream_mean:  S_m / T_m + lam S_b / T_b + coef S_t / T_t   + kl_coef (K_m / T_m + lam K_b / T_b)

    lam is branch_lambda; T_t is 0 when no teacher loss is active; every denominator has EPS added.

    Args:
      tokens: float[3], the *whole mini-batch's* scored tokens a stream, over all devices.
      auto_coef: the automatic teacher coefficient (`auto_teacher_coef`), 1 when off.

    Returns:
      (loss weights float[3], KL weights float[3] without kl_coef).
    """
    t_main, t_branch, t_teacher = tokens[MAIN], tokens[BRANCH], tokens[TEACHER]
    zero, lam = jnp.zeros_like(t_main), o.branch_lambda
    if o.teacher_reduction == "mixed_token_mean":
        active = 0.0 if o.teacher_loss == "null" else 1.0
        loss = 1.0 / (t_main + lam * t_branch + active * t_teacher + EPS)
        kl = 1.0 / (t_main + lam * t_branch + EPS)
        return jnp.stack([loss, lam * loss, loss]), jnp.stack([kl, lam * kl, zero])
    main, branch = 1.0 / (t_main + EPS), lam / (t_branch + EPS)
    return jnp.stack([main, branch, o.teacher_coef * auto_coef / (t_teacher + EPS)]), jnp.stack([main, branch, zero])


def by_stream(x, source):
    """Sum of x over each stream's tokens: float[3]; x, source: [...]."""
    return jnp.stack([jnp.sum(jnp.where(source == s, x, 0.0)) for s in STREAMS])


def loss_share(logp, entropy, old_logp, ref_logp, advantages, teacher_coef, source, weights, o: Objective, rollout_logp=None):
    """A micro-batch's share of the mini-batch loss.

    Args:
      logp, entropy, old_logp, ref_logp, advantages, teacher_coef: float[B, R], a slot a scored token. `advantages` is used for
        student tokens, `teacher_coef` for teacher tokens; ref_logp is not used when kl_coef is 0; entropy is only reported.
      rollout_logp: float[B, R], needed when tis_cap is not 0.
      source: int32[B, R], stream of each slot, NO_LOSS where there is none.
      weights: from `stream_weights`.

    Returns:
      (scalar share, sums: dict of float[3] sums over each stream, for `loss_metrics`). Shares and sums add up over micro-batches.
    """
    ppo, clipped, approx_kl, lower = ppo_clip_token(logp, old_logp, advantages, o.clip_low, o.clip_high, o.clip_c)
    tis = tis_weight(old_logp, rollout_logp, o.tis_cap) if o.tis_cap else jnp.ones_like(ppo)
    ppo = ppo * tis
    teacher, shaping = teacher_token(logp, teacher_coef, o.teacher_loss, o.luffy_gamma)
    token_loss = by_stream(jnp.where(source == TEACHER, teacher, ppo), source)
    token_kl = by_stream(kl_token(logp, ref_logp, o.kl_type), source) if o.kl_coef else jnp.zeros_like(token_loss)
    share = jnp.sum(weights[0] * token_loss) + o.kl_coef * jnp.sum(weights[1] * token_kl)
    sums = {
        "loss": token_loss,
        "kl": token_kl,
        "clipped": by_stream(clipped, source),
        "approx_kl": by_stream(approx_kl, source),
        "lower": by_stream(lower, source),
        "tis": by_stream(tis, source),
        "shaping": by_stream(shaping, source),
        "logp": by_stream(logp, source),
        "entropy": by_stream(entropy, source),
        "coef": by_stream(teacher_coef, source),
    }
    return share, jax.lax.stop_gradient(sums)


def loss_metrics(sums, tokens, o: Objective, auto_coef=1.0) -> dict:
    """A mini-batch's metrics, named as under `actor/`, from the sums of its micro-batches and its tokens float[3]."""
    weights, kl_weights = stream_weights(tokens, o, auto_coef)
    mean = {name: total / (tokens + EPS) for name, total in sums.items()}
    student = {name: (s[MAIN] + s[BRANCH]) / (tokens[MAIN] + tokens[BRANCH] + EPS) for name, s in sums.items()}
    pg, kl = jnp.sum(weights * sums["loss"]), jnp.sum(kl_weights * sums["kl"])
    mixed = o.teacher_reduction == "mixed_token_mean"
    out = {
        "total_loss": pg + o.kl_coef * kl,
        "mixed_token_loss": pg if mixed else jnp.zeros_like(pg),
        "pg_loss": student["loss"],
        "pg_clipfrac": student["clipped"],
        "ppo_kl": student["approx_kl"],
        "pg_clipfrac_lower": student["lower"],
        "kl_loss": kl,
    }
    if o.tis_cap:
        out["tis_weight"] = student["tis"]
    for stream, name in ((MAIN, "main_chain"), (BRANCH, "branch_chain")):
        out[f"{name}/pg_loss"] = mean["loss"][stream]
        out[f"{name}/pg_clipfrac"] = mean["clipped"][stream]
        out[f"{name}/ppo_kl"] = mean["approx_kl"][stream]
        out[f"{name}/pg_clipfrac_lower"] = mean["lower"][stream]
        out[f"{name}/entropy"] = mean["entropy"][stream]
    if o.teacher_loss != "null":
        out["teacher_chain/entropy"] = mean["entropy"][TEACHER]
        out[f"teacher_chain/{o.teacher_loss}_loss"] = mean["loss"][TEACHER]
        out["teacher_chain/mean_logp"] = mean["logp"][TEACHER]
    if o.teacher_loss == "luffy":
        out["teacher_chain/mean_shaping_weight"] = mean["shaping"][TEACHER]
    if o.teacher_loss == "snis":
        out["teacher_chain/snis_weight_mean"] = mean["coef"][TEACHER]
    return out


def auto_teacher_coef(ema, student_parts, teacher_parts, decay: float):
    """The automatic teacher coefficient after a mini-batch: ema <- decay ema + (1 - decay) sum |student| / sum |teacher|.

    Args:
      student_parts, teacher_parts: float[A], the policy part and the mean teacher part of the loss. One entry, the mini-batch's
        sums, makes the result independent of micro-batching; the reference passes one a micro-batch.

    Returns:
      The new ema; the old one while the teacher's sum is at most EPS.
    """
    student, teacher = jnp.sum(jnp.abs(student_parts)), jnp.sum(jnp.abs(teacher_parts))
    moved = decay * ema + (1.0 - decay) * student / jnp.maximum(teacher, EPS)
    return jnp.where(teacher > EPS, moved, ema)
