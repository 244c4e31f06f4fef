"""A step's rollouts: rounds of branches, and dynamic sampling on scripted groups."""

import dataclasses

import numpy as np

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.loops.ahead import merged, sample_dynamically, with_branches
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.curriculum.made import config

PROBLEM = Problem(0, "toy", as_ids([1]), "", "")
MIXED, RIGHT, WRONG, LOST = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [None, None]


def prompt(name, n=2, node=None) -> Prompt:
    return Prompt(PROBLEM.prompt_ids, PROBLEM, n, name, node)


def group(prompt, rewards, token=2) -> Group:
    completion = Completion(as_ids([token]), np.zeros(1, np.float32), "stop", 0)
    return Group(prompt, tuple(Rollout(completion, Grade(reward, True, "toy")) for reward in rewards))


class Further(Curriculum):
    """Wants a branch of the first group, then more of the same branch, then nothing."""

    def expand(self, groups, step):
        sizes = {group.prompt.group_id: group.prompt.n for group in groups}
        return [] if sizes.get("a:branch") == 5 else [prompt("a:branch", 3 if "a:branch" in sizes else 2)]


def test_rounds_of_branches_have_random_streams_of_their_own_and_end():
    calls = []

    def loop(context, prompts, step, purpose):
        calls.append((context, [p.group_id for p in prompts], step, purpose))
        return [group(p, [0.0] * p.n, len(calls)) for p in prompts]

    groups = with_branches(loop, "context", [prompt("a", 1), prompt("b", 1)], Further(config()), 4)
    assert [call[3] for call in calls] == ["train", "branches:0", "branches:1"] and calls[0][0] == "context"
    assert [(g.prompt.group_id, g.prompt.n, len(g.rollouts)) for g in groups] == [("a", 1, 1), ("b", 1, 1), ("a:branch", 5, 5)]
    assert [int(r.completion.ids[0]) for r in groups[2].rollouts] == [2, 2, 3, 3, 3]
    assert with_branches(loop, "context", [prompt("a")], Curriculum(config()), 4)[0].prompt.group_id == "a" and len(calls) == 4
    apart = [group(prompt(name), MIXED) for name in "abc"]
    assert merged(apart) == apart and merged([]) == []


class Scripted:
    """Dataset prompts whose outcomes are given in the order in which they are drawn; afterwards the last one repeats."""

    def __init__(self, outcomes):
        self.outcomes, self.calls = list(outcomes), []

    def roll(self, prompts, number):
        self.calls.append((number, len(prompts)))
        return [group(p, WRONG if p.injected else self.next()) for p in prompts]

    def next(self):
        return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]

    def draw(self, number, offset):
        return [prompt(f"1:{offset + i}") for i in range(number)]

    def run(self, max_rounds, states=1, **options):
        first = [prompt(f"1:{i}") for i in range(4)] + [prompt(f"1:state:{i}", node=i) for i in range(states)]
        return sample_dynamically(self.roll, first, self.draw, max_rounds, **options)


def test_off_leaves_the_step_as_it_is():
    loop = Scripted([MIXED, RIGHT, WRONG, LOST])
    batch = loop.run(0)
    assert batch.trained == batch.groups and len(batch.groups) == 5 and loop.calls == [(0, 5)] and batch.sampled == 10
    assert batch.metrics["dynamic_sampling/effective_batch"] == 1 and batch.metrics["dynamic_sampling/capped"] == 0


def test_further_rounds_until_the_batch_is_full():
    loop = Scripted([MIXED, RIGHT, WRONG, MIXED, RIGHT, MIXED, MIXED, MIXED])
    batch = loop.run(5)
    assert loop.calls == [(0, 5), (1, 4)]  # two are missing, every second one taught: four more
    names = [g.prompt.group_id for g in batch.groups]
    assert len(set(names)) == len(names) == 9
    assert [g.prompt.group_id for g in batch.trained] == ["1:0", "1:3", "1:state:0", "1:5", "1:6"]
    expected = dict(rounds=1, dataset_groups=8, informative_groups=5, effective_batch=4, surplus_groups=1, capped=0)
    assert batch.metrics == {f"dynamic_sampling/{name}": value for name, value in expected.items()}


def test_branches_come_with_their_prompt():
    """Groups that the curriculum adds to a round are neither counted as dataset groups nor left out."""
    loop = Scripted([MIXED, WRONG, MIXED])
    added = dataclasses.replace(prompt("1:0:branch"), stream="branch")
    roll = lambda prompts, number: [*loop.roll(prompts, number), group(added, MIXED)]  # noqa: E731
    batch = sample_dynamically(roll, [prompt("1:0"), prompt("1:1")], loop.draw, 2)
    assert [g.prompt.group_id for g in batch.trained] == ["1:0", "1:0:branch", "1:2", "1:0:branch"]
    assert batch.metrics["dynamic_sampling/dataset_groups"] == 4


def test_at_the_cap_the_run_goes_on():
    """One group of twenty teaches, and then none: the step is small; nothing raises."""
    loop = Scripted([MIXED] + [WRONG] * 19)
    batch = loop.run(3)
    assert [number for number, _ in loop.calls] == [0, 1, 2, 3]
    assert len(batch.trained) == 2 and batch.metrics["dynamic_sampling/capped"] == 1
    assert batch.metrics["dynamic_sampling/effective_batch"] == 1
    assert len(batch.groups) == 1 + batch.metrics["dynamic_sampling/dataset_groups"] == 17


def test_a_batch_without_any_contrast_is_empty_but_for_the_states():
    batch = Scripted([LOST]).run(1, states=0)
    assert batch.trained == [] and len(batch.groups) == 8
