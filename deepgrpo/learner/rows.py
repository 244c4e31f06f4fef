"""From scored groups to training rows: advantages, the zero-gradient filter, teacher rows, and the data metrics."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER, group_advantages, snis_weight
from deepgrpo.types import Group, Ids

STREAM_NAMES = {MAIN: "main", BRANCH: "branch", TEACHER: "teacher"}
NEGLIGIBLE = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One training sample: a prompt (locked prefix included) and a response, every token of which is trained.

    prompt_ids: int32[P], P >= 1. response_ids: int32[R], the stop id included when one was sampled.
    advantage: scalar, of every response token; unused for teacher rows.
    source: MAIN, BRANCH or TEACHER. teacher_coef: A* (luffy) or the weight c (snis) of a teacher row, else 0.
    rollout_logps: float32[R] from the engine that sampled the response, or None (teacher rows).
    group_id: rows of one prompt in one step share it. dataset_index: of the problem; -1 for injected and teacher rows.
    injected: the prompt was a hard state. reward: the verdict it got.
    """

    prompt_ids: Ids
    response_ids: Ids
    advantage: float
    source: int
    teacher_coef: float
    rollout_logps: np.ndarray | None
    group_id: str
    dataset_index: int
    injected: bool
    reward: float


def rows_from_groups(groups: Sequence[Group], advantage_mode: str) -> list[Row]:
    """Student rows of a step, in group order, with advantages relative to their own group.

    A rollout without a verdict is neither a row nor part of its group's mean. Two groups of the same problem in one step keep
    separate baselines, as in the reference.

    Args:
      advantage_mode: `objective.advantage`: group_mean | grpo_std.
    """
    rows = []
    for group in groups:
        rollouts = group.verdicts()
        if not rollouts:
            continue
        advantages = group_advantages([r.reward for r in rollouts], [0] * len(rollouts), advantage_mode)
        prompt = group.prompt
        rows += [
            Row(
                prompt_ids=prompt.ids,
                response_ids=rollout.completion.ids,
                advantage=float(advantage),
                source=BRANCH if prompt.stream == "branch" else MAIN,
                teacher_coef=0.0,
                rollout_logps=rollout.completion.logps,
                group_id=prompt.group_id,
                dataset_index=-1 if prompt.injected else prompt.problem.index,
                injected=prompt.injected,
                reward=rollout.reward,
            )
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
    return rows


def keep_rows(rows: Sequence[Row]) -> list[Row]:
    """Leaves out student rows without a policy gradient: sum over tokens of |A| <= 1e-8. Teacher rows always stay.

    What leaves here is not pulled towards the reference policy either: solved and hopeless groups get no KL gradient.
    """
    return [row for row in rows if row.source == TEACHER or abs(row.advantage) * len(row.response_ids) > NEGLIGIBLE]


@dataclasses.dataclass(frozen=True, eq=False)
class Attachment:
    """What a teacher's continuation does to one injected group.

    outcome: `teacher_rows_built`, `no_teacher_loss`, or the skip counter it belongs to.
    advantages: float64[n], the students' advantages among themselves; None when the group is left untouched.
    coef, response_ids: of the teacher row, None without one.
    """

    outcome: str
    advantages: np.ndarray | None = None
    coef: float | None = None
    response_ids: Ids | None = None


def attach_teacher(
    student_rewards: Sequence[float],
    teacher_reward: float | None,
    suffix_ids: Ids,
    *,
    teacher_loss: str,
    threshold: float,
    snis_beta: float,
    eos_id: int,
) -> Attachment:
    """Decides whether an injected group gets a teacher row, and with which coefficient.

    Students keep the baseline of their own mean, so that all-fail and all-pass groups stay at exactly 0. With the mixed mean
    b = mean(students, R*): luffy c = A* = R* - b; snis c = `snis_weight`. The suffix is closed by `eos_id` if it is not yet.
    """
    if not len(suffix_ids):
        return Attachment("missing_suffix_skipped")
    if not len(student_rewards):
        return Attachment("no_student_rows_skipped")
    if teacher_reward is None:
        return Attachment("missing_reward_skipped")
    if teacher_reward <= threshold:
        return Attachment("low_reward_teacher_skipped")
    advantages = group_advantages(student_rewards, [0] * len(student_rewards), "group_mean")
    rewards = np.asarray([*student_rewards, teacher_reward], np.float64)
    teacher_advantage = teacher_reward - rewards.mean()
    if np.ptp(rewards) <= NEGLIGIBLE:
        return Attachment("equal_reward_groups_skipped", advantages)
    if abs(teacher_advantage) <= NEGLIGIBLE:
        return Attachment("zero_teacher_advantage_skipped", advantages)
    if teacher_reward <= max(student_rewards):
        return Attachment("teacher_not_better_skipped", advantages)
    if teacher_loss == "null":
        return Attachment("no_teacher_loss", advantages)
    coef = float(teacher_advantage) if teacher_loss == "luffy" else snis_weight(student_rewards, teacher_reward, snis_beta)
    ids = np.asarray(suffix_ids, np.int32)
    response = ids if ids[-1] == eos_id else np.append(ids, np.int32(eos_id))
    return Attachment("teacher_rows_built", advantages, coef, response)


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
            (f"critic/{name}/advantages", np.array([r.advantage for r in members])),
            (f"prompt_length/{name}", prompt),
            (f"response_length/{name}", response),
            (f"sequence_length/{name}", prompt + response),
        ):
            metrics |= {f"{key}/mean": float(values.mean()), f"{key}/max": float(values.max()), f"{key}/min": float(values.min())}
        metrics[f"sequence_length/{name}/clip_ratio"] = float(np.mean(prompt + response >= max_model_len))
    return metrics


def filter_metrics(before: Sequence[Row], after: Sequence[Row]) -> dict[str, float]:
    """`data/{main,branch,teacher}_chain_count` of the rows that train, `data/*_chain/filtered_count` of those that left."""
    metrics = {}
    for source, name in STREAM_NAMES.items():
        kept = sum(r.source == source for r in after)
        metrics[f"data/{name}_chain_count"] = float(kept)
        metrics[f"data/{name}_chain/filtered_count"] = float(sum(r.source == source for r in before) - kept)
    return metrics
