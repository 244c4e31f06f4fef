"""The rollouts of a training step: drawn prompts, branches, dynamic sampling, and rollouts made while the last step updates.

Dynamic sampling (DAPO, Yu et al. 2025): a group whose rollouts all earned the same has no gradient. Up to
`rollout.dynamic_sampling` further rounds of dataset prompts are rolled out until as many dataset groups have one as the step has
dataset prompts. Groups of hard states are not counted. If the last round still leaves too few, the step trains on what there is.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.data.dataset import Dataset
from deepgrpo.loops.base import Loop, RolloutContext
from deepgrpo.types import Group, Problem, Prompt, marks, plain

CONTRAST = 1e-8  # rewards closer than this are the same


@dataclasses.dataclass(frozen=True, eq=False)
class StepGroups:
    """The groups of a step.

    groups: all that were rolled out; the curriculum observes every one, and all their tokens were sampled.
    trained: those that may train, at most the wanted number of dataset groups among them; empty when the step is skipped.
    metrics: `dynamic_sampling/*`.
    """

    groups: list[Group]
    trained: list[Group]
    metrics: dict[str, float]

    @property
    def sampled(self) -> int:
        """Response tokens that were sampled for the step."""
        return sum(rollout.sampled for group in self.groups for rollout in group.rollouts)


class Rollouts:
    """Gives each training step its groups and knows which weights made them.

    With `rollout.max_staleness`, `start` has the next step's groups made in another thread while the present step updates.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        loop: Loop,
        context: RolloutContext,
        background_context: RolloutContext,
        dataset: Dataset,
        curriculum: Curriculum,
        diagnostics: Any,
    ):
        """Args:
        config: the whole configuration. background_context: `context` with a tokenizer that the other thread owns.
        diagnostics: adds paired prompts to a step's prompts and takes their groups out again.
        """
        self._config, self._loop, self._dataset, self._curriculum = config, loop, dataset, curriculum
        self._context, self._background_context, self._diagnostics = context, background_context, diagnostics
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rollouts")
        self._next: concurrent.futures.Future[StepGroups] | None = None
        self._versions = [context.engine.version]  # of the weights, the newest two

    @property
    def pending(self) -> bool:
        """Whether the next step's groups are being made."""
        return self._next is not None

    def take(self, step: int, timer: Any) -> StepGroups:
        """The step's groups, which `start` has begun or which are rolled out now."""
        with timer("gen"):
            groups = self._next.result() if self._next else self._roll_out(self._context, self._draw(step), step)
        self._next = None
        self._context.grading.end_step()
        return groups

    def start(self, step: int) -> None:
        """Draws a step's prompts and rolls them out in the background."""
        self._next = self._thread.submit(self._roll_out, self._background_context, self._draw(step), step)

    def wait(self, timer: Any) -> None:
        """Waits for the groups in the making: the rollouts of one step are of one policy."""
        if self._next:
            with timer("gen"):
                concurrent.futures.wait([self._next])

    def published(self, step: int) -> None:
        """Notes that the engine has the weights that `step` made."""
        self._versions = [self._versions[-1], step]

    @property
    def version(self) -> int:
        """The step that made the engine's weights; not every step changes them."""
        return self._versions[-1]

    def staleness(self, groups: Sequence[Group]) -> int:
        """Versions of the weights since the oldest rollout."""
        oldest = min((r.completion.version for group in groups for r in group.rollouts), default=self.version)
        return sum(version > oldest for version in self._versions)

    def close(self) -> None:
        self._thread.shutdown()

    def _draw(self, step: int) -> list[Prompt]:
        """The prompts of a step: the data set's and, if there are any, hard states."""
        keys, size, n = self._config.curriculum, self._config.data.batch_size, self._config.rollout.n
        states = self._curriculum.sample(self._curriculum.num_to_inject(size), step)
        replaced = len(states) if keys.injection_mode == "replace" else 0
        prompts = dataset_prompts(self._dataset.next(size - replaced), n, step)
        for i, s in enumerate(states):
            size_of_group = s.n if s.n is not None else keys.rollout_n or n
            observed = marks(s.ids[len(s.problem.prompt_ids) :])
            prompts.append(Prompt(plain(s.ids), s.problem, size_of_group, f"{step}:state:{i}", s.node, s.stream, observed))
        return self._diagnostics.with_pairs(prompts, step)

    def _roll_out(self, context: RolloutContext, prompts: list[Prompt], step: int) -> StepGroups:
        keys = self._config.rollout

        def roll(asked: Sequence[Prompt], number: int) -> list[Group]:
            groups = with_branches(self._loop, context, asked, self._curriculum, step, number)
            return self._diagnostics.without_pairs(groups, step)

        def further(number: int, offset: int) -> list[Prompt]:
            return dataset_prompts(self._dataset.next(number), keys.n, step, offset)

        return sample_dynamically(roll, prompts, further, keys.dynamic_sampling)


def dataset_prompts(problems: Sequence[Problem], n: int, step: int, offset: int = 0) -> list[Prompt]:
    """Prompts with `n` rollouts each. offset: dataset prompts that the step had before."""
    return [Prompt(p.prompt_ids, p, n, f"{step}:{offset + i}") for i, p in enumerate(problems)]


#### Branches


def with_branches(
    loop: Loop, context: RolloutContext, prompts: Sequence[Prompt], curriculum: Curriculum, step: int, number: int = 0
) -> list[Group]:
    """Rolls out prompts of a step, and what the curriculum wants on top of their groups until it wants no more.

    Rollouts of one group_id form one group, in whichever round they were made.

    Args:
      number: of the call within the step; its random streams are its own.
    """
    again = f"/{number}" if number else ""
    groups, rounds = loop(context, prompts, step, f"train{again}"), 0
    while more := curriculum.expand(groups, step):
        groups = merged([*groups, *loop(context, more, step, f"branches:{rounds}{again}")])
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


#### Dynamic sampling


def sample_dynamically(
    roll: Callable[[Sequence[Prompt], int], list[Group]],
    first: Sequence[Prompt],
    draw: Callable[[int, int], list[Prompt]],
    max_rounds: int,
) -> StepGroups:
    """Rolls out a step's prompts and, with `max_rounds` > 0, further ones until as many dataset groups teach as it has prompts.

    A further round draws as many prompts as the share of teaching groups so far says are needed, at most as many as the first
    had. The result is a function of the rollouts alone. Without `max_rounds` all groups train, teaching or not.

    Args:
      roll: rolls out prompts, and what the curriculum adds to them (stream "branch"); its second argument, the round (0 for
        `first`), must go into their random seeds.
      first: the step's prompts, hard states included.
      draw: (number, offset) -> so many further dataset prompts; offset counts those drawn before in this step.
    """
    groups = list(roll(first, 0))
    rounds, wanted = 0, sum(map(of_dataset, first))
    offset = wanted
    while rounds < max_rounds and (missing := wanted - teaching(groups)) > 0:
        rounds += 1
        taught = wanted - missing  # of `offset` dataset groups
        prompts = draw(min(wanted, -(-missing * offset // taught)) if taught else wanted, offset)
        offset += len(prompts)
        groups += roll(prompts, rounds)
    found = teaching(groups)
    capped = max_rounds > 0 and found < wanted
    trained = groups if max_rounds == 0 else first_teaching(groups, wanted)
    metrics = {
        "rounds": rounds,
        "dataset_groups": offset,
        "informative_groups": found,
        "effective_batch": sum(map(informative, trained)),
        "surplus_groups": max(0, found - wanted) if max_rounds else 0,
        "capped": capped,
    }
    return StepGroups(groups, trained, {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()})


def informative(group: Group) -> bool:
    """Whether the group's verdicts differ, so that some advantage is not 0."""
    rewards = [rollout.reward for rollout in group.verdicts()]
    return bool(rewards) and max(rewards) - min(rewards) > CONTRAST


def teaching(groups: Sequence[Group]) -> int:
    """Dataset groups that have a gradient."""
    return sum(of_dataset(group.prompt) and informative(group) for group in groups)


def of_dataset(prompt: Prompt) -> bool:
    return not prompt.injected and prompt.stream == "main"


def first_teaching(groups: Sequence[Group], wanted: int) -> list[Group]:
    """The first `wanted` dataset groups that teach, and all groups of hard states and branches, in their order."""
    kept, left = [], wanted
    for group in groups:
        if not of_dataset(group.prompt):
            kept.append(group)
        elif left and informative(group):
            kept.append(group)
            left -= 1
    return kept
