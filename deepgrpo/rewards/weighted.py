"""The total reward: the task's own, and further rewards beside it, each with its weight.

    total = rewards.weight * task + sum over rewards.extra of weight * part

To add one: write a function of an Answer that returns a number (or None: no verdict) and enter it in REWARDS, or name it in the
configuration: rewards.extra=("my_package.my_module:brevity=0.2",). It runs in the grading workers, under their deadline. A part
without a verdict leaves the whole without one: a total that lacks a part would be a wrong label.

Success, for curriculum, teacher and metrics, is the task's own part above rewards.threshold (`types.Grade.succeeds`): bonuses
shape the reward that is learned from, and make no success of a failure.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from deepgrpo.rewards import latex, verdict
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.rewards.rubric import Rubric, resolve
from deepgrpo.types import TASK, Grade, Group


def format_reward(answer: Answer) -> float:
    """1 if the response ended by itself and states exactly one final answer: one box, one `####` line or one answer pair."""
    text = own_words(answer.response)
    boxes = [content for content in latex.boxes(text) if content.strip()]
    marks = re.findall(r"^#{4}[^\S\n]*\S", text, re.MULTILINE)
    tags = re.findall(r"<answer>\s*\S.*?</answer>", text, re.DOTALL | re.IGNORECASE)
    stated = len(tags) if tags else len(boxes) + len(marks)  # a box within answer tags is the same answer
    return float(answer.finish_reason == "stop" and stated == 1)


def length_reward(answer: Answer) -> float:
    """-1 for every 1,000 characters of the response: give it a small weight."""
    return -len(own_words(answer.response)) / 1000


def repetition_reward(answer: Answer) -> float:
    """Minus the share of the response's runs of four words that occurred before: from 0 down to almost -1."""
    words = own_words(answer.response).split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return (len(set(runs)) - len(runs)) / len(runs) if runs else 0.0


REWARDS: dict[str, Callable[[Answer], float | None]] = {
    "format": format_reward,
    "length": length_reward,
    "repetition": repetition_reward,
}


def extra_rewards(rubric: Rubric) -> dict[str, tuple[float, Callable]]:
    """(weight, function) of each extra reward by its short name, which is the function's where a path is given.

    Raises:
      ValueError: a malformed entry, an unknown name, a function that can't be imported, or two of the same short name.
    """
    found: dict[str, tuple[float, Callable]] = {}
    for name, weight in rubric.extra_weights().items():
        short = name.rpartition(":")[2]
        if ":" not in name and name not in REWARDS:
            known = ", ".join(REWARDS)
            raise ValueError(f"rewards.extra: no reward is named {name!r}; known: {known}, or package.module:function")
        if short in found or short == TASK:
            raise ValueError(f"rewards.extra: two rewards would be reported as reward/{short}; rename one function")
        found[short] = weight, resolve(name) if ":" in name else REWARDS[name]
    return found


def total(task: Grade, answer: Answer, weight: float, extras: Mapping[str, tuple[float, Callable]]) -> Grade:
    """The task's grade with the weighted total as its reward, and its parts if there are extra ones.

    Raises:
      verdict.GraderFault: an extra reward raised, or returned something other than a finite number or None.
    """
    if task.reward is None or (not extras and weight == 1.0):
        return task
    parts, reward = list(task.parts or ((TASK, task.reward),)), weight * task.reward
    for name, (part_weight, function) in extras.items():
        value = verdict.number(verdict.called(name, function, answer), name)
        if value is None:
            return _with(task, None, ())
        parts.append((name, value))
        reward += part_weight * value
    return _with(task, reward, tuple(parts))


def _with(task: Grade, reward: float | None, parts: tuple[tuple[str, float], ...]) -> Grade:
    reason = "no_part_verdict" if reward is None else task.reason
    return dataclasses.replace(task, reward=reward, reason=reason, parts=parts)


def part_means(groups: Sequence[Group]) -> dict[str, float]:
    """`reward/<part>/mean` of a step's rollouts with a verdict, unweighted; empty if only the task counts, with weight 1."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.verdicts():
            for name, value in rollout.grade.parts:
                values.setdefault(name, []).append(value)
    return {f"reward/{name}/mean": math.fsum(of) / len(of) for name, of in values.items()}
