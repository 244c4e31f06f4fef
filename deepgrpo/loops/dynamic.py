"""Dynamic sampling (DAPO, Yu et al. 2025): further prompts until a step has enough groups with a contrast.

A group whose rollouts all earned the same has no gradient. Up to `rollout.dynamic_sampling` further rounds of dataset prompts are
rolled out until as many dataset groups have one as the step has dataset prompts. Groups of hard states come on top, as ever. When
the last round still leaves too few, the step trains on what there is, or is skipped (`rollout.dynamic_on_cap`); the run goes on
either way.
"""

import dataclasses
from collections.abc import Callable, Sequence

from deepgrpo.types import Group, Prompt

CONTRAST = 1e-8  # rewards closer than this are the same


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The groups of a step.

    groups: all that were rolled out; the curriculum observes every one, and all their tokens were sampled.
    trained: those that may train, at most the wanted number of dataset groups among them; empty when the step is skipped.
    metrics: `dynamic_sampling/*`.
    """

    groups: list[Group]
    trained: list[Group]
    metrics: dict[str, float]


def informative(group: Group) -> bool:
    """Whether the group's verdicts differ, so that some advantage is not 0."""
    rewards = [rollout.reward for rollout in group.verdicts()]
    return bool(rewards) and max(rewards) - min(rewards) > CONTRAST


def run(
    roll: Callable[[Sequence[Prompt], int], list[Group]],
    first: Sequence[Prompt],
    draw: Callable[[int, int, int], list[Prompt]],
    *,
    max_rounds: int,
    on_cap: str = "train",
    teaches: Callable[[Group], bool] = informative,
) -> Batch:
    """Rolls out a step's prompts and, with `max_rounds` > 0, further ones until as many dataset groups teach as it has prompts.

    A further round draws as many prompts as the share of teaching groups so far says are needed, at most as many as the first
    had. The result is a function of the rollouts alone. Without `max_rounds` all groups train, teaching or not.

    Args:
      roll: rolls out prompts, and what the curriculum adds to them (stream "branch"); its second argument, the round (0 for
        `first`), must go into their random seeds.
      first: the step's prompts, hard states included.
      draw: (number, round, offset) -> so many further dataset prompts; their group ids must not repeat: offset counts those
        drawn before in this step.
      on_cap: train | skip. teaches: whether a group has a gradient.

    Raises:
      ValueError: unknown on_cap.
    """
    if on_cap not in ("train", "skip"):
        raise ValueError(f"rollout.dynamic_on_cap is {on_cap!r}, expected train or skip")
    groups = list(roll(first, 0))
    rounds, wanted = 0, sum(map(of_dataset, first))
    offset = wanted
    while rounds < max_rounds and (missing := wanted - count(groups, teaches)) > 0:
        rounds += 1
        taught = wanted - missing  # of `offset` dataset groups
        number = min(wanted, -(-missing * offset // taught)) if taught else wanted
        prompts = draw(number, rounds, offset)
        offset += len(prompts)
        groups += roll(prompts, rounds)
    teaching = count(groups, teaches)
    capped = max_rounds > 0 and teaching < wanted
    trained = groups if max_rounds == 0 else first_teaching(groups, wanted, teaches)
    if capped and on_cap == "skip":
        trained = []
    metrics = {
        "rounds": rounds,
        "dataset_groups": offset,
        "informative_groups": teaching,
        "effective_batch": sum(teaches(group) for group in trained),
        "surplus_groups": max(0, teaching - wanted) if max_rounds else 0,
        "capped": capped,
    }
    return Batch(groups, trained, {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()})


def count(groups: Sequence[Group], teaches: Callable[[Group], bool]) -> int:
    """Dataset groups that teach."""
    return sum(of_dataset(group.prompt) and teaches(group) for group in groups)


def of_dataset(prompt: Prompt) -> bool:
    return not prompt.injected and prompt.stream == "main"


def first_teaching(groups: Sequence[Group], wanted: int, teaches: Callable[[Group], bool]) -> list[Group]:
    """The first `wanted` dataset groups that teach, and all groups of hard states and branches, in their order."""
    kept, left = [], wanted
    for group in groups:
        if not of_dataset(group.prompt):
            kept.append(group)
        elif left and teaches(group):
            kept.append(group)
            left -= 1
    return kept
