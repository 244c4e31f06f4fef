"""The teacher beside the student, for reading: what it kept of a failed answer, what it wrote instead, what the student made of
what it kept."""

from collections.abc import Sequence
from typing import Any

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.telemetry.dumps import Decode, locked_ids
from deepgrpo.types import Group


def records(
    groups: Sequence[Group], curriculum: Curriculum, step: int, decode: Decode, threshold: float, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` records of a step's groups that start from a prefix which a teacher has continued, in their order.

    To be called before the curriculum observes the groups, after which it may have forgotten what they started from.
    """
    made = []
    for group in groups:
        if len(made) == limit:
            break
        about = curriculum.look_up(group.prompt.node) if group.prompt.injected else {}
        if about.get("suffix_ids") is None:
            continue
        k_succ, k_total = group.successes(threshold)
        problem = group.prompt.problem
        made.append(
            {
                "step": step,
                "data_source": problem.data_source,
                "task_id": problem.index,
                "question": problem.question,
                "ground_truth": problem.ground_truth,
                "shared_prefix": decode(locked_ids(group).tolist()),
                "student_suffix": decode(about["failed_suffix_ids"].tolist()),
                "teacher_suffix": decode(about["suffix_ids"].tolist()),
                "teacher_reward": about["reward"],
                "student_suffix_length": len(about["failed_suffix_ids"]),
                "teacher_suffix_length": len(about["suffix_ids"]),
                "created_step": about["created_step"],
                "k_succ": k_succ,
                "k_total": k_total,
                "continuations": [
                    {"score": rollout.reward, "text": decode(rollout.completion.ids.tolist())} for rollout in group.rollouts
                ],
            }
        )
    return made
