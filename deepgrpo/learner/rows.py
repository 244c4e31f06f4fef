"""Training rows of a step: advantages within their groups, the rows that stay, and what is logged of them. On the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER
from deepgrpo.types import Group, Ids, Rollout

MODES = ("group_mean", "grpo_std", "grpo_nostd", "rloo")
EPS = 1e-8


def group_advantages(rewards: Sequence[float], group_ids: Sequence, mode: str) -> np.ndarray:
    """Advantage of each reward within its group of n: float64[len(rewards)].

    group_mean: A = r - mean(group); also the advantage of Dr. GRPO (Liu et al. 2025).
    grpo_std: A = (r - mean) / (std + 1e-6), std unbiased; a group of one has mean 0 and std 1 (Shao et al. 2024).
    grpo_nostd: the same without the division.
    rloo: A = r - mean of the others = n / (n - 1) * (r - mean); a group of one has none, A = 0 (Ahmadian et al. 2024).

    Equal rewards give exactly 0.

    Raises:
      ValueError: unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"advantage mode {mode!r}, expected one of {', '.join(MODES)}")
    rewards = np.asarray(rewards, np.float64)
    _, first, group = np.unique(np.asarray(group_ids), return_index=True, return_inverse=True)
    size = np.bincount(group)
    shifted = rewards - rewards[first][group]  # a group's own reward as origin: the mean of equal rewards is then exact
    advantages = shifted - (np.bincount(group, shifted) / size)[group]
    if mode == "group_mean":
        return advantages
    if mode == "rloo":
        return advantages * (size / np.maximum(size - 1, 1))[group]
    advantages = np.where((size == 1)[group], rewards, advantages)
    if mode == "grpo_nostd":
        return advantages
    variance = np.bincount(group, advantages**2) / np.maximum(size - 1, 1)
    std = np.where(size == 1, 1.0, np.sqrt(variance))
    return advantages / (std[group] + 1e-6)


def whiten(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(A - mean) / (std + 1e-8) * mask over the valid tokens, std unbiased, 0 for fewer than two of them; float64[n, T]."""
    valid = advantages[mask > 0]
    if valid.size < 2:
        return np.zeros_like(advantages)
    return (advantages - valid.mean()) / (valid.std(ddof=1) + EPS) * mask


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft punishment of long answers (Yu et al. 2025, equation 13), to be added to the reward: in [-factor, 0].

    0 up to limit - buffer tokens, then linear, -factor at the limit. The paper counts response tokens against a response limit;
    here both include the prompt, since only their sum is limited (rollout.max_model_len).
    """
    return -factor * min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def snis_weight(student_rewards: Sequence[float], teacher_reward: float, beta: float) -> float:
    """Self-normalised importance weight of a teacher row, > 0.

    c = exp(A*/beta) / mean_j exp(A_j/beta), j over students and teacher, A = r - mean; invariant to a shift of all rewards.
    """
    scaled = np.asarray([*student_rewards, teacher_reward], np.float64) / beta
    weights = np.exp(scaled - scaled.max())  # the maximum cancels in the quotient and keeps exp in range
    return float(weights[-1] / weights.mean())


######################################################################################################################
#  From scored groups to training rows: advantages, long answers, the zero-gradient filter, and the data metrics.
######################################################################################################################

STREAM_NAMES = {MAIN: "main", BRANCH: "branch", TEACHER: "teacher"}
NEGLIGIBLE = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One training sample: a prompt (locked prefix included) and a response.

    prompt_ids: int32[P], P >= 1. response_ids: int32[R], the stop id included when one was sampled.
    scored: bool[R], the response tokens that are trained, those that its author wrote; None: all. The network reads the others,
      which an environment wrote, and they stand in no loss, denominator or statistic.
    advantage: scalar, of every response token, or float64[R], of each; unused for teacher rows.
    source: MAIN, BRANCH or TEACHER. teacher_coef: A* (luffy) or the weight c (snis) of a teacher row, else 0.
    rollout_logps: float32[R] from the engine that sampled the response, or None (teacher rows).
    group_id: rows of one prompt in one step share it. dataset_index: of the problem; -1 for injected and teacher rows.
    injected: the prompt was a hard state. reward: the verdict it got.
    """

    prompt_ids: Ids
    response_ids: Ids
    advantage: float | np.ndarray
    source: int
    teacher_coef: float
    rollout_logps: np.ndarray | None
    group_id: str
    dataset_index: int
    injected: bool
    reward: float
    scored: np.ndarray | None = None

    @property
    def num_scored(self) -> int:
        return len(self.response_ids) if self.scored is None else int(self.scored.sum())

    def of_scored(self, values: Any) -> Any:
        """The entries for scored tokens of an array [R]; a scalar as it is."""
        return values if self.scored is None or not np.ndim(values) else values[self.scored]

    @property
    def token_advantages(self) -> np.ndarray:
        """Of the scored tokens, float64[num_scored]."""
        return np.broadcast_to(np.asarray(self.of_scored(self.advantage), np.float64), self.num_scored)

    @property
    def mean_advantage(self) -> float:
        """Over the scored tokens; 0 if there are none of them and no advantage of its own."""
        return float(np.mean(self.of_scored(self.advantage))) if np.size(self.advantage) else 0.0


def check_row(row: Row, vocab_size: int, num_real_ids: int) -> None:
    """The learner's door: raises ValueError for a row without a prompt, with an id that no engine can have sampled, or with a
    number that is not finite in float32, which would make every row's gradient NaN."""
    name = f"row of group {row.group_id}"
    if not len(row.prompt_ids):
        raise ValueError(f"{name}: the prompt is empty; the first response token needs a position before it")
    if int(row.response_ids.max()) >= num_real_ids or int(row.prompt_ids.max()) >= vocab_size:
        raise ValueError(
            f"{name}: largest ids are {row.prompt_ids.max()} (prompt) and {row.response_ids.max()} (response), expected below"
            f" {vocab_size} (vocabulary) and {num_real_ids} (tokenizer); is it the right tokenizer?"
        )
    logps = () if row.rollout_logps is None else row.of_scored(row.rollout_logps)
    for part, values in (("advantage", row.advantage), ("teacher's weight", row.teacher_coef), ("engine's log-prob", logps)):
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.asarray(values, np.float32))
        if not finite.all():
            wrong = np.atleast_1d(values)[~np.atleast_1d(finite)][0]
            raise ValueError(
                f"{name}: the {part} is {wrong}, expected a finite number of float32 (the row's reward is {row.reward}); look at"
                f" the grader of its problem, or at the engine that sampled it"
            )


@dataclasses.dataclass(frozen=True)
class Overlong:
    """What becomes of answers that the length limit cut, or that come near it.

    mode: none: they are graded like any other. mask: a cut answer is treated as one without a verdict: no row, no part in its
    group's mean. soft: `overlong_penalty` is added to each reward before the advantages.
    limit: tokens of prompt plus response. buffer, factor: see `overlong_penalty`.
    """

    mode: str = "none"
    limit: int = 0
    buffer: int = 0
    factor: float = 1.0  # no key: as in the paper

    @classmethod
    def from_config(cls, section: Mapping[str, Any], max_model_len: int) -> "Overlong":
        """From the config's `objective` section and rollout.max_model_len."""
        return cls(section["overlong"], max_model_len, section["overlong_buffer"])

    def trained(self, group: Group) -> list[Rollout]:
        """The rollouts of a group that may become rows."""
        return [r for r in group.verdicts() if self.mode != "mask" or r.completion.finish_reason != "length"]

    def reward(self, group: Group, rollout: Rollout) -> float:
        """The reward that counts for a rollout's advantage."""
        if self.mode != "soft":
            return rollout.reward
        length = len(group.prompt.ids) + len(rollout.completion.ids)
        return rollout.reward + overlong_penalty(length, self.limit, self.buffer, self.factor)


def rows_from_groups(groups: Sequence[Group], advantage_mode: str, overlong: Overlong = Overlong()) -> list[Row]:  # noqa: B008
    """Student rows of a step, in group order, with advantages relative to their own group where the loop gave none.

    A rollout without a verdict is neither a row nor part of its group's mean. Two groups of the same problem in one step keep
    separate baselines, as in the reference. `Row.reward` is the grader's verdict, whatever `overlong` makes of it.

    Args:
      advantage_mode: `objective.advantage`: group_mean | grpo_std | rloo.
    """
    rows = []
    for group in groups:
        rollouts = overlong.trained(group)
        if not rollouts:
            continue
        rewards = [overlong.reward(group, rollout) for rollout in rollouts]
        advantages = group_advantages(rewards, [0] * len(rollouts), advantage_mode)
        prompt = group.prompt
        rows += [
            Row(
                prompt_ids=prompt.ids,
                response_ids=rollout.completion.ids,
                advantage=float(advantage) if rollout.advantages is None else rollout.advantages,
                source=BRANCH if prompt.stream == "branch" else MAIN,
                teacher_coef=0.0,
                rollout_logps=rollout.completion.logps,
                group_id=prompt.group_id,
                dataset_index=-1 if prompt.injected else prompt.problem.index,
                injected=prompt.injected,
                reward=rollout.reward,
                scored=None if rollout.completion.observed is None else ~rollout.completion.observed,
            )
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
    return rows


def keep_rows(rows: Sequence[Row], zero_gradient_rows: str = "drop") -> list[Row]:
    """Leaves out student rows without a policy gradient: sum over tokens of |A| <= 1e-8. Teacher rows always stay.

    Args:
      zero_gradient_rows: "drop" (released): what leaves is not pulled towards the reference policy either, and does not count in
        any denominator. "keep": all rows stay; solved and hopeless groups are pulled to the reference by the KL penalty, and
        their tokens or rows count in the denominators, as in GRPO and Dr. GRPO as published.
    """
    if zero_gradient_rows == "keep":
        return list(rows)
    return [row for row in rows if row.source == TEACHER or np.abs(row.token_advantages).sum() > NEGLIGIBLE]


def whiten_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows with advantages whitened over the tokens of their stream (main, branch); teacher rows as they are."""
    out = list(rows)
    for source in (MAIN, BRANCH):
        members = [i for i, row in enumerate(rows) if row.source == source and row.num_scored]
        tokens = np.concatenate([np.zeros(0), *(rows[i].token_advantages for i in members)])
        white, end = whiten(tokens, np.ones(len(tokens))), 0
        for i in members:
            begin, end = end, end + rows[i].num_scored
            advantage = float(white[begin])
            if np.ndim(rows[i].advantage):
                advantage = np.array(rows[i].advantage)
                advantage[slice(None) if rows[i].scored is None else rows[i].scored] = white[begin:end]
            out[i] = dataclasses.replace(rows[i], advantage=advantage)
    return out


def overlong_metrics(groups: Sequence[Group], overlong: Overlong) -> dict[str, float]:
    """`data/overlong_masked`: rollouts that left because they were cut; `data/overlong_penalty`: mean penalty of the others."""
    if overlong.mode == "none":
        return {}
    judged = [(group, rollout) for group in groups for rollout in group.verdicts()]
    kept = sum(len(overlong.trained(group)) for group in groups)
    penalties = [overlong.reward(group, rollout) - rollout.reward for group, rollout in judged]
    masked = float(len(judged) - kept)
    return {"data/overlong_masked": masked, "data/overlong_penalty": float(np.mean(penalties)) if penalties else 0.0}


def skip_reason(groups: Sequence[Group], overlong: Overlong) -> str:
    """Why a step's groups gave no rows to train on, for the log."""
    sampled = sum(len(group.rollouts) for group in groups)
    judged = sum(len(group.verdicts()) for group in groups)
    kept = sum(len(overlong.trained(group)) for group in groups)
    if not sampled:
        return "nothing was rolled out"
    if not judged:
        return f"none of {sampled} rollouts has a verdict"
    if not kept:
        return f"all {judged} answers were cut at rollout.max_model_len, and objective.overlong=mask leaves those out"
    return f"none of {len(groups)} groups has a contrast: the rewards of each are equal"


def data_metrics(rows: Sequence[Row], max_model_len: int) -> dict[str, float]:
    """`critic/*`, `response_length/*`, `prompt_length/*`, `sequence_length/*` of the unfiltered rows, by stream.

    main_chain is also split into main_chain_original (dataset prompts) and main_chain_synthetic (injected states).
    """
    streams = {f"{name}_chain": [r for r in rows if r.source == source] for source, name in STREAM_NAMES.items()}
    streams["main_chain_original"] = [r for r in streams["main_chain"] if not r.injected]
    streams["main_chain_synthetic"] = [r for r in streams["main_chain"] if r.injected]
    metrics: dict[str, float] = {}
    for name, members in streams.items():
        if not members:
            continue
        prompt = np.array([len(r.prompt_ids) for r in members])
        response = np.array([len(r.response_ids) for r in members])
        for key, values in (
            (f"critic/{name}/rewards", np.array([r.reward for r in members])),
            (f"critic/{name}/advantages", np.array([r.mean_advantage for r in members])),
            (f"prompt_length/{name}", prompt),
            (f"response_length/{name}", response),
            (f"sequence_length/{name}", prompt + response),
        ):
            metrics |= {f"{key}/mean": float(values.mean()), f"{key}/max": float(values.max()), f"{key}/min": float(values.min())}
        metrics[f"sequence_length/{name}/clip_ratio"] = float(np.mean(prompt + response >= max_model_len))
    return metrics


def tree_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`treerl/*` of groups whose rollouts were forked from one another; nothing of others."""
    leaves = [rollout for group in groups for rollout in group.rollouts if rollout.advantages is not None]
    if not leaves:
        return {}
    advantages = np.concatenate([leaf.advantages for leaf in leaves])
    tokens, sampled = sum(len(leaf.completion.ids) for leaf in leaves), sum(leaf.sampled for leaf in leaves)
    return {
        "treerl/leaves": len(leaves) / sum(bool(group.verdicts()) for group in groups),
        "treerl/forked_share": sum(leaf.shared > 0 for leaf in leaves) / len(leaves),
        "treerl/sampled_tokens": float(sampled),
        "treerl/shared_token_share": 1.0 - sampled / max(tokens, 1),
        "treerl/token_advantage_abs": float(np.abs(advantages).mean()) if tokens else 0.0,
    }


def filter_metrics(before: Sequence[Row], after: Sequence[Row]) -> dict[str, float]:
    """`data/{main,branch,teacher}_chain_count` of the rows that train, `data/*_chain/filtered_count` of those that left."""
    metrics = {}
    for source, name in STREAM_NAMES.items():
        kept = sum(r.source == source for r in after)
        metrics[f"data/{name}_chain_count"] = float(kept)
        metrics[f"data/{name}_chain/filtered_count"] = float(sum(r.source == source for r in before) - kept)
    return metrics
