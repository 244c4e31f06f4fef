"""What the training loop does around a loop."""

import numpy as np

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.loops.ahead import merged, with_branches
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.curriculum.made import config

PROBLEM = Problem(0, "toy", as_ids([1]), "", "")


def prompt(name, n=1) -> Prompt:
    return Prompt(PROBLEM.prompt_ids, PROBLEM, n, name)


def answered(prompt, token) -> Group:
    completion = Completion(as_ids([token]), np.zeros(1, np.float32), "stop", 0)
    return Group(prompt, (Rollout(completion, Grade(0.0, True, "toy")),) * prompt.n)


class Further(Curriculum):
    """Wants a branch of the first group, then more of the same branch, then nothing."""

    def expand(self, groups, step):
        sizes = {group.prompt.group_id: group.prompt.n for group in groups}
        return [] if sizes.get("a:branch") == 5 else [prompt("a:branch", 3 if "a:branch" in sizes else 2)]


def test_rounds_have_random_streams_of_their_own_and_end():
    calls = []

    def loop(setting, prompts, step, purpose):
        calls.append((setting, [p.group_id for p in prompts], step, purpose))
        return [answered(p, len(calls)) for p in prompts]

    groups = with_branches(loop, "parties", [prompt("a"), prompt("b")], Further(config()), 4)
    assert [call[3] for call in calls] == ["train", "branches:0", "branches:1"] and calls[0][0] == "parties"
    assert [(g.prompt.group_id, g.prompt.n, len(g.rollouts)) for g in groups] == [("a", 1, 1), ("b", 1, 1), ("a:branch", 5, 5)]
    assert [int(r.completion.ids[0]) for r in groups[2].rollouts] == [2, 2, 3, 3, 3]
    assert with_branches(loop, "parties", [prompt("a")], Curriculum(config()), 4)[0].prompt.group_id == "a" and len(calls) == 4


def test_groups_of_one_step_stay_apart():
    groups = [answered(prompt(name), 1) for name in "abc"]
    assert merged(groups) == groups and merged([]) == []
