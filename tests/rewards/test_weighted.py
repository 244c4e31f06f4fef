"""Weighted totals, rewards and graders of the user's own, and what is refused before anything starts."""

import dataclasses
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import reward
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.reward import GraderFault, Rubric
from deepgrpo.rewards.service import GradingService
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids

MODULE = """
def brevity(answer):
    return 1 / (1 + len(answer.response))

def silent(answer):
    return None

def broken(answer):
    return "a lot"

async def shouts(answer):
    return answer.response.isupper()

number = 5
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """An importable module of the user's."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)
    reward.resolve.cache_clear()
    graders._extras.cache_clear()


def number(response, finish="stop"):
    return Answer("GSM8K", "How many?", "", response, finish, "18")


def test_total_is_the_weighted_sum_of_its_parts(mine):
    rubric = Rubric(weight=2.0, extra=("format=0.5", f"{mine}:brevity=-3"))
    answer = number("#### 18")
    grade = graders.grade(answer, rubric)
    brevity = 1 / (1 + len(answer.response))
    np.testing.assert_allclose(grade.reward, 2.0 * 1.0 + 0.5 * 1.0 - 3 * brevity)
    assert dict(grade.parts) == {"task": 1.0, "format": 1.0, "brevity": brevity} and grade.reason == "right"
    cut = graders.grade(number("#### 18", "length"), rubric)
    assert dict(cut.parts)["task"] == dict(cut.parts)["format"] == 0 and cut.reason == "truncated"


def test_nothing_changes_without_extra_rewards():
    assert graders.grade(number("#### 18"), Rubric()) == Grade(1.0, True, "right", "18")
    assert graders.grade(number("#### 18"), Rubric(weight=0.5)).reward == 0.5


def test_a_part_without_a_verdict_leaves_the_whole_without_one(mine):
    grade = graders.grade(number("#### 18"), Rubric(extra=(f"{mine}:silent=1",)))
    assert grade.reward is None and grade.reason == "no_part_verdict"
    with pytest.raises(GraderFault, match="broken: returned str"):
        graders.grade(number("#### 18"), Rubric(extra=(f"{mine}:broken=1",)))


def test_rewards_that_come_with_the_package():
    one, two = number("so\n#### 18"), number("#### 18\n#### 19")
    assert reward.format_reward(one) == 1 and reward.format_reward(two) == reward.format_reward(number("18")) == 0
    assert reward.format_reward(dataclasses.replace(one, response=r"<answer>\boxed{18}</answer>")) == 1
    assert reward.length_reward(number("x" * 500)) == -0.5
    assert reward.repetition_reward(number("a b c d e f")) == 0
    assert math.isclose(reward.repetition_reward(number("a b c d " * 2)), -1 / 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": ("no_such_package.module:f=1",)}, "importing no_such_package.module failed: ModuleNotFoundError.*PYTHONPATH"),
        ({"extra": ("my_rewards:absent=1",)}, "my_rewards has no function absent; it has .*brevity"),
        ({"extra": ("my_rewards:number=1",)}, "has no function number"),
        ({"extra": ("kindness=1",)}, "no reward is named 'kindness'; known: format"),
        ({"extra": ("format=much",)}, "weight of format is 'much'"),
        ({"extra": ("format=nan",)}, "weight of format is 'nan'"),
        ({"extra": ("format",)}, "'format' is not NAME=WEIGHT"),
        ({"extra": ("format=1", "format=2")}, "format is named twice"),
        ({"graders": ("MINE=my_rewards",)}, "MINE: 'my_rewards' is no function"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(mine, changes, message):
    rewards = SimpleNamespace(**{**dataclasses.asdict(Rubric()), **changes})
    with pytest.raises(SystemExit, match=message):
        graders.rubric_of(rewards)


def test_a_grader_of_ones_own_runs_in_the_workers(mine):
    rubric = Rubric(graders=(f"LOUD={mine}:shouts",), extra=(f"{mine}:brevity=1",))
    with GradingService(1, 20.0, ["LOUD", "GSM8K"], rubric) as service:
        loud = dataclasses.replace(number("YES"), data_source="LOUD")
        assert service.submit(loud).result(60) == Grade(1.25, True, "right", "", None, (("task", 1.0), ("brevity", 0.25)))
        assert service.submit(number("#### 18")).result(60).reward > 1
    with pytest.raises(ValueError, match="no grader for data_source 'QUIET'; known: .*LOUD"):
        graders.check_sources(["QUIET"], rubric)
    assert graders.leaks_answer("LOUD", "so \\boxed{5}") and not graders.leaks_answer("LOUD", "so far")


def test_part_means_are_over_rollouts_with_a_verdict():
    problem = Problem(0, "GSM8K", as_ids([1]), "18", "?")
    done = Completion(as_ids([2]), np.zeros(1, np.float32), "stop", 0)
    grades = [Grade(1.1, True, "right", "", None, (("task", 1.0), ("format", 0.5))), Grade(None, False, "error")]
    grades.append(Grade(0.2, True, "wrong", "", None, (("task", 0.0), ("format", 1.0))))
    group = Group(Prompt(problem.prompt_ids, problem, 3, "1:0"), tuple(Rollout(done, grade) for grade in grades))
    assert reward.part_means([group]) == {"reward/task/mean": 0.5, "reward/format/mean": 0.75}
    assert reward.part_means([]) == {}
