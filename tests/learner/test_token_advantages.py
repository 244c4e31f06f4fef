"""Rows whose tokens have advantages of their own."""

import dataclasses

import numpy as np
import pytest

from configs import common
from deepgrpo.learner import packing
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.minibatch import step_rows
from deepgrpo.learner.objective import BRANCH
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.learner import tiny


def by_token(rows, values=None):
    """The same rows with an advantage for each token: the row's own, or random ones."""
    rng = np.random.default_rng(3)
    new = lambda row: np.full(len(row.response_ids), row.advantage) if values is None else rng.normal(size=len(row.response_ids))  # noqa: E731
    return [dataclasses.replace(row, advantage=new(row)) for row in rows]


@pytest.mark.parametrize("share", [False, True])
def test_packing_gives_each_token_its_own(share):
    rows = by_token(tiny.sibling_rows(), "random")
    (batch,) = packing.layout([rows], packing.shapes((24, 48), 144, 1, len(rows), share), 1)
    for row, (a, b, start) in zip(rows, batch.slots, strict=True):
        found = batch.arrays["advantages"][a, b, start : start + len(row.response_ids)]
        np.testing.assert_array_equal(found, row.advantage.astype(np.float32))


def test_equal_advantages_of_all_tokens_are_an_advantage_of_the_row():
    """In every array of the batch, in what is kept, in whitening, and in the metrics."""
    rows = tiny.make_rows(6) + tiny.make_rows(3, seed=1, source=BRANCH) + tiny.make_rows(2, seed=2, advantage=0.0)
    same = by_token(rows)
    for one, other in zip(*(packing.layout([r], packing.shapes((24,), 96, 1, 11, True), 1) for r in (rows, same)), strict=True):
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(other.arrays[name], array, err_msg=name)
    kept = rows_lib.keep_rows(same)
    assert [id(row) for row in kept] == [id(row) for row in same[:9]]
    for white, expected in zip(rows_lib.whiten_rows(same), rows_lib.whiten_rows(rows), strict=True):
        assert white.advantage.shape == (len(white.response_ids),)
        np.testing.assert_array_equal(white.advantage, expected.advantage)
    metrics, expected = (rows_lib.data_metrics(r, 20) for r in (same, rows))
    assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_whitening_is_over_single_tokens():
    rows = rows_lib.whiten_rows(by_token(tiny.make_rows(5), "random"))
    tokens = np.concatenate([row.advantage for row in rows])
    assert tokens.mean() == pytest.approx(0, abs=1e-12) and tokens.std(ddof=1) == pytest.approx(1)


def test_a_row_whose_tokens_cancel_is_kept():
    row = dataclasses.replace(tiny.make_rows(1, length=4)[0], advantage=np.array([1.0, -1.0, 2.0, -2.0]))
    assert rows_lib.keep_rows([row]) == [row] and row.mean_advantage == 0
    assert rows_lib.keep_rows([dataclasses.replace(row, advantage=np.full(4, 1e-9))]) == []


def test_what_a_loop_found_goes_before_the_objectives():
    problem = Problem(0, "toy", as_ids([1]), "", "")
    completion = Completion(as_ids([5, 6, 7]), np.zeros(3, np.float32), "stop", 0)
    own = Rollout(completion, Grade(1.0, True, "right"), np.array([0.5, 0.0, -1.0]), shared=2)
    group = Group(Prompt(problem.prompt_ids, problem, 2, "g"), (own, Rollout(completion, Grade(0.0, True, "wrong"))))
    mine, relative = rows_lib.rows_from_groups([group], "group_mean")
    assert mine.advantage.tolist() == [0.5, 0.0, -1.0] and relative.advantage == -0.5 and (own.sampled, own.shared) == (1, 2)
    metrics = rows_lib.tree_metrics([group])
    assert metrics["treerl/sampled_tokens"] == 1 and metrics["treerl/shared_token_share"] == pytest.approx(2 / 3)
    assert rows_lib.tree_metrics([Group(group.prompt, group.rollouts[1:])]) == {}


def test_rows_of_a_step_of_trees():
    config = common.get_config()
    config.loop, config.curriculum.pool = "treerl", "none"
    assert step_rows(config) == (128 * 30, 0)
    config.treerl = (6, 2, 2, 2)
    assert step_rows(config) == (128 * 54, 0)
