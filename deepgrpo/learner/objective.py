"""The objective of a mini-batch, as pure functions of arrays: no model, tokenizer or config inside, any float dtype.

Every token belongs to one stream: the student's main chains, the student's branches, or the teacher. Token losses are summed
with one weight a stream, and the weights hold the *global* denominators of the mini-batch. So a micro-batch returns its share of
the loss, shares add up, and neither micro-batching, packing, mesh nor row order can change the result beyond rounding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.learner import TEACHER_LOSSES
from deepgrpo.learner.token_losses import (
    FAR,
    KL_TYPES,
    k3_clipped,
    kl_token,
    moved_token,
    ppo_clip_token,
    sequence_log_ratio,
    teacher_token,
    tis_weight,
)

MAIN, BRANCH, TEACHER = 0, 1, 2  # a token's `source`; NO_LOSS marks slots of a batch that hold no scored token
STREAMS = (MAIN, BRANCH, TEACHER)
NO_LOSS = -1
EPS = 1e-8

KL_NAMES = {name: name for name in KL_TYPES} | {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "off": "low_var_kl"}
CHOICES = {
    "kl_type": KL_TYPES,
    "ratio": ("token", "sequence", "sequence_token"),
    "aggregation": ("token_mean", "sequence_mean", "dr_grpo"),
    "teacher_loss": TEACHER_LOSSES,
    "teacher_update": ("joint", "post_ppo"),
    "teacher_reduction": ("mixed_token_mean", "separate_stream_mean"),
}


@dataclasses.dataclass(frozen=True)
class Objective:
    """Hyper-parameters of the loss; each is described at its key in configs/common.py, section `objective`.

    The defaults are those of the released scripts.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_c: float = 3.0
    kl_coef: float = 1e-4
    kl_type: str = "low_var_kl"
    ratio: str = "token"
    sequence_clip_low: float = 3e-4  # the four without a key are those of the papers and of the released scripts
    sequence_clip_high: float = 4e-4
    aggregation: str = "token_mean"
    length_constant: int = 0
    entropy_coef: float = 0.0
    kl_stop: float = 0.0
    tis_cap: float = 0.0
    branch_lambda: float = 1.0
    teacher_loss: str = "null"
    teacher_update: str = "joint"
    teacher_reduction: str = "mixed_token_mean"
    teacher_coef: float = 1.0
    auto_teacher_coef: bool = False
    auto_coef_init: float = 0.1
    auto_coef_decay: float = 0.9
    luffy_gamma: float = 0.1

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "Objective":
        """From the config's `objective` section, where kl_type has further names; "off" is a kl_coef of 0."""
        fields = {field.name: section[field.name] for field in dataclasses.fields(cls) if field.name in section}
        if fields["kl_type"] == "off":
            fields["kl_coef"] = 0.0
        return cls(**fields | {"kl_type": KL_NAMES.get(fields["kl_type"], fields["kl_type"])})

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"objective.{name} is {getattr(self, name)!r}, expected one of {tuple(known)}")
        if self.tis_cap < 0.0:
            raise ValueError(f"objective.tis_cap is {self.tis_cap}, expected > 0, or 0 for no correction")
        if self.clip_c <= 1.0:
            raise ValueError(f"objective.clip_c is {self.clip_c}, expected > 1: it bounds the loss of negative advantages")
        if self.aggregation == "dr_grpo" and self.length_constant < 1:
            raise ValueError(f"objective.length_constant is {self.length_constant}, expected >= 1: dr_grpo divides by it")

    @property
    def joint_loss(self) -> str:
        """The teacher loss of PPO steps: null when the teacher's tokens have optimizer steps of their own."""
        return self.teacher_loss if self.teacher_update == "joint" else "null"

    @property
    def clip(self) -> tuple[float, float, float]:
        """clip_low, clip_high, clip_c of `ppo_clip_token`."""
        if self.ratio == "token":
            return self.clip_low, self.clip_high, self.clip_c
        return self.sequence_clip_low, self.sequence_clip_high, self.clip_c


# The loss of teacher tokens in optimizer steps of their own: the mean of -logp.
SUFFIX_SFT = Objective(kl_coef=0.0, teacher_loss="sft", teacher_reduction="separate_stream_mean")


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


def by_stream(x, source):
    """Sum of x over each stream's tokens: float[3]; x, source: [...]."""
    return jnp.stack([jnp.sum(jnp.where(source == s, x, 0.0)) for s in STREAMS])


def count_tokens(source):
    """Scored tokens of each stream: int32[3] from source int32[...]."""
    return jnp.stack([jnp.sum(source == s) for s in STREAMS])


def denominators(source, row_share, o: Objective):
    """What each stream's sum is divided by: float[3], of the *whole mini-batch* over all devices.

    token_mean: its tokens. sequence_mean: its rows; each token then weighs 1 / (tokens of its row). dr_grpo (Liu et al. 2025):
    its rows times `length_constant`, so that a token weighs the same however long its answer is.

    Args:
      source: int32[...], stream of each slot. row_share: float[...], 1 / (tokens of the slot's row).
    """
    if o.aggregation == "token_mean":
        return count_tokens(source).astype(row_share.dtype)
    rows = jnp.round(by_stream(row_share, source))  # whole numbers: shares of a row add up to 1 but for rounding
    return rows if o.aggregation == "sequence_mean" else rows * o.length_constant


def stream_weights(denominators, o: Objective, auto_coef=1.0):
    """Weights that turn sums of token losses into the mini-batch's loss.

        mixed_token_mean:     (S_m + lam S_b + S_t) / (T_m + lam T_b + T_t) + kl_coef (K_m + lam K_b) / (T_m + lam T_b)
        separate_stream_mean:  S_m / T_m + lam S_b / T_b + coef S_t / T_t   + kl_coef (K_m / T_m + lam K_b / T_b)

    lam is branch_lambda; T_t is 0 when no teacher loss is active; every denominator has EPS added.

    Args:
      denominators: float[3], T_m, T_b, T_t of the whole mini-batch (`denominators`).
      auto_coef: the automatic teacher coefficient (`auto_teacher_coef`), 1 when off.

    Returns:
      (loss weights float[3], weights float[3] of what only students have: KL, without kl_coef, and entropy).
    """
    t_main, t_branch, t_teacher = denominators[MAIN], denominators[BRANCH], denominators[TEACHER]
    zero, lam = jnp.zeros_like(t_main), o.branch_lambda
    if o.teacher_reduction == "mixed_token_mean":
        active = 0.0 if o.joint_loss == "null" else 1.0
        loss = 1.0 / (t_main + lam * t_branch + active * t_teacher + EPS)
        kl = 1.0 / (t_main + lam * t_branch + EPS)
        return jnp.stack([loss, lam * loss, loss]), jnp.stack([kl, lam * kl, zero])
    main, branch = 1.0 / (t_main + EPS), lam / (t_branch + EPS)
    return jnp.stack([main, branch, o.teacher_coef * auto_coef / (t_teacher + EPS)]), jnp.stack([main, branch, zero])


######################################################################################################################
#  Loss
######################################################################################################################


def loss_share(logp, entropy, old_logp, slots: Mapping[str, jax.Array], weights, o: Objective):
    """A micro-batch's share of the mini-batch loss.

        sum_streams w (sum_t l_t) + w' (kl_coef sum_t k_t - entropy_coef sum_t H_t),   each token times its row's share
                                                                                      when the aggregation is sequence_mean

    Args:
      logp, entropy, old_logp: float[B, R], a slot a scored token. entropy is only reported unless entropy_coef is set.
      slots, [B, R] each: source int32, stream of each slot, NO_LOSS where there is none; advantages, float, of student tokens;
        teacher_coef, float, of teacher tokens; ref_logp, float, when kl_coef is not 0; rollout_logp, float, when tis_cap is
        not 0; row_share, float, and sample, int32, where `aggregation` or `ratio` look at whole rows.
      weights: from `stream_weights`.

    Returns:
      (scalar share, sums: dict of float[3] sums over each stream, for `loss_metrics`). Shares and sums add up over micro-batches.
    """
    source, coef = slots["source"], slots["teacher_coef"]
    token_ratio = ratio = logp - old_logp
    if o.ratio != "token":
        per_token = o.ratio == "sequence_token"
        ratio = sequence_log_ratio(token_ratio, slots["sample"], slots["row_share"], per_token)
    ppo, clipped, approx_kl, lower = ppo_clip_token(ratio, slots["advantages"], *o.clip)
    tis = tis_weight(old_logp, slots["rollout_logp"], o.tis_cap) if o.tis_cap else jnp.ones_like(ppo)
    teacher, shaping = teacher_token(logp, coef, o.joint_loss, o.luffy_gamma)

    def total(x):
        return by_stream(x * slots["row_share"] if o.aggregation == "sequence_mean" else x, source)

    token_loss = total(jnp.where(source == TEACHER, teacher, ppo * tis))
    token_kl = total(kl_token(logp, slots["ref_logp"], o.kl_type)) if o.kl_coef else jnp.zeros_like(token_loss)
    share = jnp.sum(weights[0] * token_loss) + o.kl_coef * jnp.sum(weights[1] * token_kl)
    sums = {"loss": token_loss, "kl": token_kl}
    if o.entropy_coef:
        sums["entropy_loss"] = total(entropy)
        share -= o.entropy_coef * jnp.sum(weights[1] * sums["entropy_loss"])
    counted = {"clipped": clipped, "approx_kl": approx_kl, "lower": lower, "tis": tis, "shaping": shaping}
    counted |= {"logp": logp, "entropy": entropy, "coef": coef}
    if o.kl_stop:
        counted["moved"] = moved_token(token_ratio)
    counted |= {name: x.astype(logp.dtype) for name, x in clamped(logp, ratio, old_logp, slots, o).items()}
    sums |= {name: by_stream(x, source) for name, x in counted.items()}
    return share, jax.lax.stop_gradient(sums)


def clamped(logp, ratio, old_logp, slots: Mapping[str, jax.Array], o: Objective) -> dict[str, jax.Array]:
    """Where a clamp decides and leaves a token without its gradient, by the name of its metric: bool[B, R] each. PPO's clips are
    counted by `ppo_clip_token`."""
    found = {"ratio_clampfrac": jnp.abs(ratio) > FAR}
    if o.kl_coef and o.kl_type == "low_var_kl":
        found["kl_clipfrac"] = k3_clipped(logp, slots["ref_logp"])
    if o.tis_cap:
        found["tis_capfrac"] = old_logp - slots["rollout_logp"] > np.log(o.tis_cap)
    if o.joint_loss == "luffy":
        found["shaping_clampfrac"] = logp < -FAR
    return found


def student_mean(x, tokens):
    """Mean over student tokens: scalar, from sums and tokens of each stream, float[3]."""
    return (x[MAIN] + x[BRANCH]) / (tokens[MAIN] + tokens[BRANCH] + EPS)


def loss_metrics(sums, tokens, totals, o: Objective, auto_coef=1.0) -> dict:
    """A mini-batch's metrics, named as under `actor/`.

    Args:
      sums: of its micro-batches. tokens: float[3], its tokens. totals: float[3], its `denominators`.
    """
    weights, student_weights = stream_weights(totals, o, auto_coef)
    whole = ("loss", "kl", "entropy_loss")  # summed as `aggregation` says; the others are means over tokens
    count = {name: totals if name in whole else tokens for name in sums}
    mean = {name: x / (count[name] + EPS) for name, x in sums.items()}
    student = {name: student_mean(x, count[name]) for name, x in sums.items()}
    pg, kl = jnp.sum(weights * sums["loss"]), jnp.sum(student_weights * sums["kl"])
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
    if o.entropy_coef:
        out["entropy_loss"] = jnp.sum(student_weights * sums["entropy_loss"])
        out["total_loss"] -= o.entropy_coef * out["entropy_loss"]
    if o.tis_cap:
        out["tis_weight"] = student["tis"]
    if o.kl_stop:
        out["ppo_kl_k3"] = student["moved"]
    out |= {name: student[name] for name in ("ratio_clampfrac", "kl_clipfrac", "tis_capfrac") if name in student}
    for stream, name in ((MAIN, "main_chain"), (BRANCH, "branch_chain")):
        out[f"{name}/pg_loss"] = mean["loss"][stream]
        out[f"{name}/pg_clipfrac"] = mean["clipped"][stream]
        out[f"{name}/ppo_kl"] = mean["approx_kl"][stream]
        out[f"{name}/pg_clipfrac_lower"] = mean["lower"][stream]
        out[f"{name}/entropy"] = mean["entropy"][stream]
    return out | teacher_metrics(mean, o, auto_coef)


def teacher_metrics(mean, o: Objective, auto_coef) -> dict:
    """The part of `loss_metrics` that is about teacher tokens; mean: dict of float[3] means of each stream."""
    if o.joint_loss == "null":
        return {}
    out = {
        "teacher_chain/entropy": mean["entropy"][TEACHER],
        f"teacher_chain/{o.joint_loss}_loss": mean["loss"][TEACHER],
        "teacher_chain/mean_logp": mean["logp"][TEACHER],
    }
    if o.joint_loss == "luffy":
        out["teacher_chain/mean_shaping_weight"] = mean["shaping"][TEACHER]
        out["teacher_chain/shaping_clampfrac"] = mean["shaping_clampfrac"][TEACHER]
    if o.joint_loss == "snis":
        out["teacher_chain/snis_weight_mean"] = mean["coef"][TEACHER]
    if o.auto_teacher_coef:
        out["teacher_chain/auto_coef"] = auto_coef
    return out


def coef_parts(loss_sums, totals, o: Objective):
    """The two parts of the loss that `auto_teacher_coef` compares: the students', and the teacher's mean without coefficients.

    Args:
      loss_sums: float[3], `sums["loss"]` of a mini-batch (or of a micro-batch of it). totals: float[3], the mini-batch's.
    """
    weighted = stream_weights(totals, o)[0] * loss_sums
    return weighted[MAIN] + weighted[BRANCH], loss_sums[TEACHER] / (totals[TEACHER] + EPS)


def auto_teacher_coef(ema, student_parts, teacher_parts, decay: float):
    """The automatic teacher coefficient after a mini-batch: ema <- decay ema + (1 - decay) sum |student| / sum |teacher|.

    Args:
      student_parts, teacher_parts: float[A], from `coef_parts`. One entry, the mini-batch's sums, makes the result independent of
        micro-batching; the reference passes one a micro-batch.

    Returns:
      The new ema; the old one while the teacher's sum is at most EPS.
    """
    student, teacher = jnp.sum(jnp.abs(student_parts)), jnp.sum(jnp.abs(teacher_parts))
    moved = decay * ema + (1.0 - decay) * student / jnp.maximum(teacher, EPS)
    return jnp.where(teacher > EPS, moved, ema)
