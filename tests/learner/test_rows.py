"""From scored groups to rows."""

import dataclasses

import numpy as np
import pytest

from configs import common
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.objective import BRANCH, MAIN
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.learner import tiny


def group(rewards, name="g", locked=(), index=3) -> Group:
    """A group with one rollout a reward; the prompt is [1, 2] and a locked prefix."""
    problem = Problem(index, "toy", as_ids([1, 2]), "", "")
    prompt = Prompt(as_ids([1, 2, *locked]), problem, len(rewards), name, node=object() if locked else None)
    completions = [Completion(as_ids([5, 6 + i]), np.full(2, -0.5, np.float32), "stop", 0) for i in range(len(rewards))]
    grades = [Grade(reward, True, "toy") for reward in rewards]
    return Group(prompt, tuple(Rollout(c, g) for c, g in zip(completions, grades, strict=True)))


def test_advantages_are_relative_to_the_verdicts_of_the_group():
    rows = rows_lib.rows_from_groups(
        [group([1.0, None, 0.0, 0.0]), group([None, None]), group([1.0, 0.0], "h", (7,))], "group_mean"
    )
    assert [row.advantage for row in rows] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5])
    assert [row.response_ids[1] for row in rows] == [6, 8, 9, 6, 7]
    assert [(row.group_id, row.dataset_index, row.injected) for row in rows[2:4]] == [("g", 3, False), ("h", -1, True)]
    assert rows[3].prompt_ids.tolist() == [1, 2, 7] and all(row.source == MAIN for row in rows)


def test_groups_without_a_contrast_leave_and_teacher_rows_stay():
    student = rows_lib.rows_from_groups([group([0.0, 0.0]), group([0.4, 0.4, 0.4]), group([1.0, 0.0], "h")], "group_mean")
    teacher = tiny.teacher_rows(2, coef=0.5)
    kept = rows_lib.keep_rows(student + teacher)
    assert [row.group_id for row in kept] == ["h", "h"] + [row.group_id for row in teacher]
    counts = rows_lib.filter_metrics(student + teacher, kept)
    assert counts["data/main_chain_count"] == 2 and counts["data/main_chain/filtered_count"] == 5
    assert counts["data/teacher_chain_count"] == 2 and counts["data/teacher_chain/filtered_count"] == 0


def test_data_metrics():
    rows = rows_lib.rows_from_groups([group([1.0, 0.0]), group([1.0, 1.0], "h", (7, 8, 9))], "group_mean")
    metrics = rows_lib.data_metrics(rows, max_model_len=7)
    assert metrics["critic/main_chain/rewards/mean"] == 0.75 and metrics["critic/main_chain_original/rewards/mean"] == 0.5
    assert metrics["prompt_length/main_chain_synthetic/max"] == 5 and metrics["response_length/main_chain/min"] == 2
    assert metrics["sequence_length/main_chain/clip_ratio"] == 0.5
    assert not any("teacher" in name for name in metrics)


def cut(rollout: Rollout, length: int) -> Rollout:
    """The same rollout, cut by the length limit after `length` tokens."""
    ids = as_ids(range(10, 10 + length))
    return dataclasses.replace(rollout, completion=Completion(ids, np.zeros(length, np.float32), "length", 0))


def truncated(rewards, which, length=6, **changes) -> Group:
    """A group in which the rollouts `which` were cut."""
    whole = group(rewards, **changes)
    rollouts = tuple(cut(r, length) if i in which else r for i, r in enumerate(whole.rollouts))
    return dataclasses.replace(whole, rollouts=rollouts)


def section(**changes):
    objective = common.get_config().objective
    for key, value in changes.items():
        objective[key] = value
    return objective


@pytest.mark.parametrize("which", [(), (1, 3), (0, 1, 2, 3)], ids=["none", "half", "all"])
def test_masked_answers_leave_rows_and_mean(which):
    """What is left is what a group without them gives; with all of them cut there are no rows."""
    rewards = [1.0, 0.0, 0.0, 0.0]
    mask = rows_lib.Overlong.from_config(section(overlong="mask"), 8)
    groups = [truncated(rewards, which)]
    rows = rows_lib.rows_from_groups(groups, "group_mean", mask)
    left = [r for i, r in enumerate(rewards) if i not in which]
    assert [row.advantage for row in rows] == [row.advantage for row in rows_lib.rows_from_groups([group(left)], "group_mean")]
    assert rows_lib.overlong_metrics(groups, mask)["data/overlong_masked"] == len(which)
    released = rows_lib.rows_from_groups(groups, "group_mean", rows_lib.Overlong.from_config(section(), 8))
    assert [row.advantage for row in released] == [0.75, -0.25, -0.25, -0.25]  # cut answers are failures like others


def test_an_empty_step_has_a_reason():
    mask = rows_lib.Overlong("mask", 8)
    cases = {
        "nothing was rolled out": [],
        "none of 2 rollouts has a verdict": [group([None, None])],
        "all 2 answers were cut": [truncated([0.0, 0.0], (0, 1))],
        "none of 2 groups has a contrast": [group([1.0, 1.0]), truncated([0.0, 0.0], (1,))],
    }
    for text, groups in cases.items():
        assert rows_lib.keep_rows(rows_lib.rows_from_groups(groups, "group_mean", mask)) == []
        assert rows_lib.skip_reason(groups, mask).startswith(text)


def test_long_answers_lose_reward_before_the_advantages():
    """The prompt has 2 tokens: 6 more reach the limit of 8, where the penalty of a buffer of 4 is whole; 2 more are free."""
    soft = rows_lib.Overlong("soft", limit=8, buffer=4, factor=0.5)
    groups = [truncated([1.0, 0.0, 1.0], (1,)), truncated([1.0, 1.0], (0,), length=4)]
    rows = rows_lib.rows_from_groups(groups, "group_mean", soft)
    assert [row.advantage for row in rows] == pytest.approx([0.5, -1.0, 0.5, -0.125, 0.125])
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert rows_lib.overlong_metrics(groups, soft)["data/overlong_penalty"] == pytest.approx(-(0.5 + 0.25) / 5)


def test_rows_without_a_gradient_may_stay():
    rows = rows_lib.rows_from_groups([group([0.0, 0.0]), group([1.0, 0.0], "h")], "group_mean")
    assert [len(rows_lib.keep_rows(rows, switch)) for switch in ("drop", "keep")] == [2, 4]


def test_whitening_is_over_the_tokens_of_a_stream():
    rows = tiny.make_rows(5) + tiny.make_rows(4, seed=1, source=BRANCH) + tiny.teacher_rows(2, coef=0.5)
    out = rows_lib.whiten_rows(rows)
    for source in (MAIN, BRANCH):
        tokens = np.repeat(*zip(*[(r.advantage, len(r.response_ids)) for r in out if r.source == source], strict=True))
        assert tokens.mean() == pytest.approx(0, abs=1e-12) and tokens.std(ddof=1) == pytest.approx(1)
    assert out[-2:] == rows[-2:]
    assert rows_lib.whiten_rows([]) == []
