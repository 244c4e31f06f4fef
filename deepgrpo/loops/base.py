"""What every loop is given, and its contract: prompts in, scored groups out, in the order of the prompts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.rewards.service import GradingService
from deepgrpo.rollout.engine import Engine, Sampling
from deepgrpo.types import Group, Prompt


@dataclasses.dataclass(frozen=True)
class Setting:
    """The parties of a loop.

    tokenizer: private to the thread that runs the loop. seed: the run's.
    grading_deadline: seconds that a whole call may wait for verdicts.
    """

    engine: Engine
    grading: GradingService
    tokenizer: Any
    sampling: Sampling
    seed: int
    grading_deadline: float


def with_sampling(setting: Setting, **changes) -> Setting:
    """The same parties under another sampled distribution (validation)."""
    return dataclasses.replace(setting, sampling=dataclasses.replace(setting.sampling, **changes))


def with_branches(
    loop: Callable[[Setting, Sequence[Prompt], int, str], list[Group]],
    setting: Setting,
    prompts: Sequence[Prompt],
    curriculum: Curriculum,
    step: int,
    number: int = 0,
) -> list[Group]:
    """Rolls out prompts of a step, and what the curriculum wants on top of their groups until it wants no more.

    Rollouts of one group_id form one group, in whichever round they were made.

    Args:
      number: of the call within the step; its random streams are its own.
    """
    again = f"/{number}" if number else ""
    groups, rounds = loop(setting, prompts, step, f"train{again}"), 0
    while more := curriculum.expand(groups, step):
        groups = merged([*groups, *loop(setting, more, step, f"branches:{rounds}{again}")])
        rounds += 1
    return groups


def merged(groups: Sequence[Group]) -> list[Group]:
    """The groups in order of first appearance, those of one group_id as one."""
    found: dict[str, Group] = {}
    for group in groups:
        name = group.prompt.group_id
        if name in found:
            prompt = dataclasses.replace(found[name].prompt, n=found[name].prompt.n + group.prompt.n)
            group = Group(prompt, found[name].rollouts + group.rollouts)
        found[name] = group
    return list(found.values())
