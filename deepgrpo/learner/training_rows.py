"""A step's scored groups in, the rows that train out: students' rows, teacher rows, rows without a gradient left out.

A teacher row is the teacher's continuation of a state, trained beside the students' own attempts. `add_teacher_rows` does it for
injected hard states (the forest), `add_teacher_to_groups` for states that are branched from once (the pool of suffixes).
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum import pool_class
from deepgrpo.learner.objective import MAIN, TEACHER
from deepgrpo.learner.rows import (
    NEGLIGIBLE,
    Overlong,
    Row,
    data_metrics,
    filter_metrics,
    group_advantages,
    keep_rows,
    overlong_metrics,
    rows_from_groups,
    skip_reason,
    snis_weight,
    tree_metrics,
    whiten_rows,
)
from deepgrpo.types import Group, Ids, marks, plain

# What can become of an injected group. `no_teacher_loss`: the null arm, where a row would carry no gradient.
SKIPS = ("missing_suffix_skipped", "no_student_rows_skipped", "missing_reward_skipped", "low_reward_teacher_skipped")
SKIPS += ("suffix_too_long_skipped",)
UNBUILT = ("equal_reward_groups_skipped", "zero_teacher_advantage_skipped", "teacher_not_better_skipped", "no_teacher_loss")
BUILT = "teacher_rows_built"

Continuation = tuple[Ids, float | None]  # the teacher's suffix of a state, and the reward of the answer that it completes


@dataclasses.dataclass(frozen=True, eq=False)
class Attachment:
    """What a teacher's continuation does to one injected group.

    outcome: `BUILT`, one of `SKIPS` (the group is left untouched) or one of `UNBUILT`.
    advantages: float64[n], the students' advantages among themselves; None when the group is left untouched.
    coef, response_ids: of the teacher row, None without one. advantage: A* of the teacher among all, NaN when left untouched.
    """

    outcome: str
    advantages: np.ndarray | None = None
    coef: float | None = None
    response_ids: Ids | None = None
    advantage: float = float("nan")


def attach_teacher(
    student_rewards: Sequence[float],
    teacher_reward: float | None,
    suffix_ids: Ids | None,
    *,
    teacher_loss: str,
    threshold: float,
    snis_beta: float,
    stop_ids: Sequence[int],
    room: float = math.inf,
) -> Attachment:
    """Decides whether an injected group gets a teacher row, and with which coefficient.

    Students keep the baseline of their own mean, so that all-fail and all-pass groups stay at exactly 0. With the mixed mean
    b = mean(students, R*): luffy c = A* = R* - b; snis c = `snis_weight`.

    Args:
      stop_ids: the first one closes a suffix that ends in none of them. room: tokens that the row's response may have.
    """
    if suffix_ids is None or not len(suffix_ids):
        return Attachment("missing_suffix_skipped")
    if not len(student_rewards):
        return Attachment("no_student_rows_skipped")
    if teacher_reward is None:
        return Attachment("missing_reward_skipped")
    if teacher_reward <= threshold:
        return Attachment("low_reward_teacher_skipped")
    response = closed(suffix_ids, stop_ids)
    if len(response) > room:
        return Attachment("suffix_too_long_skipped")
    advantages = group_advantages(student_rewards, [0] * len(student_rewards), "group_mean")
    rewards = np.asarray([*student_rewards, teacher_reward], np.float64)
    advantage = float(teacher_reward - rewards.mean())
    if np.ptp(rewards) <= NEGLIGIBLE:
        return Attachment("equal_reward_groups_skipped", advantages, advantage=advantage)
    if abs(advantage) <= NEGLIGIBLE:
        return Attachment("zero_teacher_advantage_skipped", advantages, advantage=advantage)
    if teacher_reward <= max(student_rewards):
        return Attachment("teacher_not_better_skipped", advantages, advantage=advantage)
    if teacher_loss == "null":
        return Attachment("no_teacher_loss", advantages, advantage=advantage)
    coef = snis_weight(student_rewards, teacher_reward, snis_beta) if teacher_loss == "snis" else advantage
    return Attachment(BUILT, advantages, coef, response, advantage)


def find_continuations(groups: Sequence[Group], continuation: Callable[[Any], Continuation | None]) -> dict[str, Continuation]:
    """Continuations of the injected groups by group_id. To be called before the curriculum observes the groups: a state that they
    master may leave it then.

    continuation: of a `prompt.node`, None when it has none (`Curriculum.continuation`).
    """
    found = {group.prompt.group_id: continuation(group.prompt.node) for group in groups if group.prompt.injected}
    return {group_id: one for group_id, one in found.items() if one is not None}


def add_teacher_rows(
    rows: Sequence[Row],
    groups: Sequence[Group],
    continuations: Mapping[str, Continuation],
    *,
    teacher_loss: str,
    threshold: float,
    snis_beta: float,
    stop_ids: Sequence[int],
    max_model_len: int,
) -> tuple[list[Row], dict[str, float]]:
    """Adds a teacher row to every injected group that none of its students solved as well as the teacher.

    Students' advantages are not touched: `rows_from_groups` took their mean among themselves already. Their rewards are the
    graders' verdicts, without a penalty for length.

    Args:
      rows: of all groups, before rows without gradient leave. groups: of the step; only injected ones are looked at.
      continuations: from `find_continuations`.
      stop_ids: of the student; the first one closes a suffix that ends in none of them.

    Returns:
      (rows and teacher rows, metrics `prefix_luffy/*`).

    Raises:
      ValueError: the weight of a snis row is not above 0.
    """
    students: dict[str, list[Row]] = {}
    for row in rows:
        if row.source == MAIN and row.injected:
            students.setdefault(row.group_id, []).append(row)
    made: list[Row] = []
    seen: list[tuple[list[Row], float | None, Attachment]] = []
    for group in groups:
        if not group.prompt.injected or group.prompt.stream != "main":
            continue
        members = students.get(group.prompt.group_id, [])
        suffix, reward = continuations.get(group.prompt.group_id, (None, None))
        attached = attach_teacher(
            [row.reward for row in members],
            reward,
            suffix,
            teacher_loss=teacher_loss,
            threshold=threshold,
            snis_beta=snis_beta,
            stop_ids=stop_ids,
            room=max_model_len - len(group.prompt.ids),
        )
        seen.append((members, reward, attached))
        if attached.outcome == BUILT:
            made.append(teacher_row(group, attached, reward, teacher_loss))
    return [*rows, *made], attachment_metrics(rows, made, seen, teacher_loss)


def joint_advantages(
    student_rewards: Sequence[float], teacher_reward: float, teacher_loss: str, mode: str
) -> tuple[np.ndarray, float]:
    """Advantages of a state's student continuations, float64[n], and of the teacher's suffix of it, in the pool of suffixes.

    Luffy and null: all are one group. sft: the students are a group of their own; the teacher's is relative to their mean and
    enters no loss. Without students the teacher's is 1.
    """
    if not len(student_rewards):
        return np.zeros(0), 1.0
    if teacher_loss == "sft":
        students = group_advantages(student_rewards, [0] * len(student_rewards), mode)
        return students, teacher_reward - float(np.mean(student_rewards))
    together = group_advantages([*student_rewards, teacher_reward], [0] * (len(student_rewards) + 1), mode)
    return together[:-1], float(together[-1])


def add_teacher_to_groups(
    rows: Sequence[Row],
    groups: Sequence[Group],
    continuations: Mapping[str, Continuation],
    *,
    teacher_loss: str,
    advantage: str,
    stop_ids: Sequence[int],
    max_model_len: int,
    overlong: Overlong = Overlong(),  # noqa: B008
) -> tuple[list[Row], dict[str, float]]:
    """Adds the teacher's suffix as a row to every group that has one, and takes it into the group (`joint_advantages`).

    Left out are a suffix without room and, where the loss needs an advantage, one whose continuations all lack a verdict.

    Args:
      rows: of all groups from `rows_from_groups(groups, advantage, overlong)`. continuations, stop_ids: as in `add_teacher_rows`.
      advantage: objective.advantage.

    Returns:
      (rows, in which the students of these groups have new advantages, and teacher rows; metrics `teacher/*`).
    """
    out, made, too_long, unknown = list(rows), [], 0, 0
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row.group_id, []).append(i)
    for group in groups:
        name = group.prompt.group_id
        if name not in continuations:
            continue
        suffix, reward = continuations[name]
        if len(group.prompt.ids) + len(closed(suffix, stop_ids)) > max_model_len:
            too_long += 1
            continue
        rewards = [overlong.reward(group, rollout) for rollout in overlong.trained(group)]
        if group.prompt.n and not rewards and teacher_loss != "sft":
            unknown += 1
            continue
        students, teacher = joint_advantages(rewards, reward, teacher_loss, advantage)
        for i, value in zip(places.get(name, ()), students, strict=True):
            out[i] = dataclasses.replace(rows[i], advantage=float(value))
        made.append(_row(group.prompt.ids, closed(suffix, stop_ids), teacher, name, reward))
    counts = {"rows_built": len(made), "suffix_too_long": too_long, "no_student_verdict": unknown}
    return out + made, {f"teacher/{name}": float(count) for name, count in counts.items()}


def closed(suffix_ids: Ids, stop_ids: Sequence[int]) -> Ids:
    """The suffix, ended by a stop id: the first one if it ends in none of them."""
    ids = np.asarray(suffix_ids, np.int32)
    return ids if ids[-1] in stop_ids else np.append(ids, np.int32(stop_ids[0]))


def teacher_row(group: Group, attached: Attachment, reward: float, teacher_loss: str) -> Row:
    """The row of a built attachment. Raises ValueError: a snis weight is not above 0."""
    name = group.prompt.group_id
    if teacher_loss == "snis" and not attached.coef > 0.0:
        raise ValueError(f"group {name}: snis weight {attached.coef}, expected > 0; is objective.snis_beta too small?")
    return _row(group.prompt.ids, attached.response_ids, attached.coef, name, reward)


def suffix_row(state_ids: Ids, suffix_ids: Ids, reward: float | None, stop_ids: Sequence[int], name: str) -> Row:
    """A state and the teacher's suffix of it as a row for `Learner.update_teacher`; every suffix token weighs the same."""
    return _row(state_ids, closed(suffix_ids, stop_ids), 1.0, name, float("nan") if reward is None else reward)


def _row(prompt_ids: Ids, response_ids: Ids, coef: float, name: str, reward: float) -> Row:
    return Row(
        prompt_ids=plain(prompt_ids),
        response_ids=plain(response_ids),
        scored=None if marks(response_ids) is None else response_ids >= 0,
        advantage=0.0,
        source=TEACHER,
        teacher_coef=coef,
        rollout_logps=None,
        group_id=name,
        dataset_index=-1,
        injected=True,
        reward=reward,
    )


def attachment_metrics(
    rows: Sequence[Row], made: Sequence[Row], seen: Sequence[tuple[list[Row], float | None, Attachment]], teacher_loss: str
) -> dict[str, float]:
    """`prefix_luffy/*`: counters by outcome, tokens before rows leave, and means over the groups that met a teacher."""
    counts = dict.fromkeys((BUILT, *SKIPS, *UNBUILT), 0)
    for _, _, attached in seen:
        counts[attached.outcome] += 1
    compared = [(members, reward, attached) for members, reward, attached in seen if attached.advantages is not None]
    students = [row.num_scored for row in rows if row.source == MAIN]
    teachers = [row.num_scored for row in made]
    weights = [row.teacher_coef for row in made] if teacher_loss == "snis" else []
    student_rewards = [np.mean([row.reward for row in members]) for members, _, _ in compared]
    teacher_rewards = [reward for _, reward, _ in compared]
    advantages = [attached.advantage for _, _, attached in compared]
    metrics = {
        "enabled": 1.0,
        "candidate_groups": len(seen),
        **{name: count for name, count in counts.items() if name != "no_teacher_loss"},
        "student_rows_reweighted": sum(len(members) for members, _, _ in compared),
        "mixed_token_count": sum(students) + sum(teachers),
        "teacher_token_fraction": sum(teachers) / max(1, sum(students) + sum(teachers)),
        "teacher_tail_filtered": 0.0,  # the reference trims rows to a multiple of its workers; here no row is lost
        "snis_weight_mean": mean(weights),
        "snis_weight_max": max(weights, default=0.0),
        "len_ratio": mean(teachers) / mean(students) if teachers and students else 0.0,
        "teacher_reward_mean": mean(teacher_rewards),
        "student_reward_mean": mean(student_rewards),
        "baseline_mean": mean([reward - advantage for reward, advantage in zip(teacher_rewards, advantages, strict=True)]),
        "teacher_advantage_mean": mean(advantages),
        "teacher_positive_advantage_rate": mean([advantage > 0 for advantage in advantages]),
    }
    return {f"prefix_luffy/{name}": float(value) for name, value in metrics.items()}


def mean(values: Sequence[float]) -> float:
    """0 without values: counters of a step in which nothing was sampled are 0."""
    return float(np.mean(values)) if len(values) else 0.0


######################################################################################################################
#  A step's scored groups in, the rows that train out: advantages, teacher rows, rows without a gradient left out.
######################################################################################################################

IDLE_STEPS = 20  # in a row whose groups are all alike, before it is said: of a few, plain GRPO has plenty

log = logging.getLogger(__name__)


class Idle:
    """Says, once for each stretch of steps without an update, why there is none."""

    def __init__(self):
        self._steps, self._said = 0, False

    def look(self, reason: str, patience: int) -> None:
        """reason: why a step's groups gave no rows to train on, "" if they did. patience: how often in a row that is ordinary."""
        if not reason:
            if self._said:
                log.warning("there are rows to train on again, after %d steps without", self._steps)
            self._steps, self._said = 0, False
            return
        self._steps += 1
        if self._steps >= patience and not self._said:
            self._said = True
            steps = "this step" if self._steps == 1 else f"the last {self._steps} steps"
            log.warning("no update in %s: %s (said again only after an update)", steps, reason)


def training_rows(
    groups: Sequence[Group],
    continuations: Mapping[str, Continuation],
    config: ml_collections.ConfigDict,
    stop_ids: Sequence[int],
    idle: Idle,
) -> tuple[list[Row], dict[str, float]]:
    """The rows of a training step by the rules of the whole configuration.

    Args:
      groups: those that may train. continuations: the teacher's, of the injected ones (`find_continuations`).
      stop_ids: of the student; the first one closes a teacher's suffix. idle: of the run.

    Returns:
      (rows, metrics of all rows before and after some leave: `critic/*`, `data/*`, lengths, `prefix_luffy/*`, `treerl/*`).
    """
    o, limit = config.objective, config.rollout.max_model_len
    overlong, pool = Overlong.from_config(o, limit), pool_class(config.curriculum.pool)
    every, metrics = rows_from_groups(groups, o.advantage, overlong), {}
    if pool.keeps_suffixes and pool.by_ratio and config.curriculum.teacher_rows:
        every, metrics = add_teacher_rows(
            every,
            groups,
            continuations,
            teacher_loss=o.teacher_loss,
            threshold=config.rewards.threshold,
            snis_beta=o.snis_beta,
            stop_ids=stop_ids,
            max_model_len=limit,
        )
    elif pool.keeps_suffixes and pool.branches:
        every, metrics = add_teacher_to_groups(
            every,
            groups,
            continuations,
            teacher_loss=o.teacher_loss,
            advantage=o.advantage,
            stop_ids=stop_ids,
            max_model_len=limit,
            overlong=overlong,
        )
    rows = keep_rows(every, o.zero_gradient_rows)
    idle.look("" if rows else skip_reason(groups, overlong), IDLE_STEPS if every else 1)
    metrics |= overlong_metrics(groups, overlong) | data_metrics(every, limit) | tree_metrics(groups)
    metrics |= filter_metrics(every, rows)
    return whiten_rows(rows) if o.whiten else rows, metrics
