"""What became of states: groups and steps to mastery, root transfer, depths, waiting failures; all of it survives a snapshot."""

import json

import numpy as np
import pytest

from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Annotation
from deepgrpo.types import Problem, as_ids
from tests.telemetry.test_documented import documented

PROMPT = [1, 2]


def problem(number: int = 0) -> Problem:
    return Problem(number, "task", as_ids([*PROMPT, number]), "7", "?")


def grow(pool: Forest, parent_failed: list[int], step: int, number: int = 0) -> int:
    """Has the failure that the teacher is given next corrected: the child shares its first tokens with it."""
    (failure,) = pool.dispatch_teacher(1, step)
    ids = as_ids([*failure.state_ids, *parent_failed])
    return pool.teacher_result(failure.event, Annotation(ids, as_ids([9]), 1.0), step)[1]


@pytest.fixture
def lived() -> Forest:
    """One tree: its root fails (step 1), is observed twice more, gets a state (step 3), which is mastered with its second group
    (step 5); the root is observed again, better."""
    pool = Forest()
    pool.observe_root(problem(), 0, 4, 1, [as_ids([5, 6])] * 4)  # makes the tree
    pool.observe_root(problem(), 1, 4, 2, [as_ids([5, 7])])
    pool.observe_root(problem(), 2, 4, 3, None)
    state = grow(pool, [5], 3)
    pool.observe_node(state, 3, 4, 4, [as_ids([6, 6])])
    pool.observe_node(state, 4, 4, 5, None)
    pool.observe_root(problem(), 3, 4, 6, None)
    return pool


def test_root_transfer_leaves_out_the_group_that_made_the_tree(lived):
    metrics = lived.metrics()
    assert metrics["transfer/trees"] == 1
    before, after = 3 / 8, 3 / 4
    assert metrics["transfer/root_success_before"] == pytest.approx(before, abs=1e-9)
    assert metrics["transfer/root_success_after"] == pytest.approx(after, abs=1e-9)
    assert metrics["transfer/gain"] == pytest.approx(after - before, abs=1e-9)
    lived.observe_root(problem(), 4, 4, 7, None)
    assert lived.metrics()["transfer/root_success_after"] == pytest.approx(7 / 8, abs=1e-9)


def test_a_tree_that_is_gone_still_counts():
    pool = Forest(drop_retired_events=True)
    for number, (k_before, k_after) in enumerate([(0, 4), (2, 3)]):
        pool.observe_root(problem(number), 0, 4, 1, [as_ids([5, 6])])
        pool.observe_root(problem(number), k_before, 4, 2, None)
        pool.observe_node(grow(pool, [5], 3), 4, 4, 4, None)
        pool.observe_root(problem(number), k_after, 4, 5, None)
        pool.observe_root(problem(number), 4, 4, 6, None)
    assert pool.cleanup() == 2 and len(pool) == 0
    metrics = pool.metrics()
    assert metrics["transfer/trees"] == 2
    assert metrics["transfer/root_success_before"] == pytest.approx((0 / 4 + 2 / 4) / 2, abs=1e-9)
    assert metrics["transfer/root_success_after"] == pytest.approx((8 / 8 + 7 / 8) / 2, abs=1e-9)


def test_mastery_and_waiting(lived):
    metrics = lived.metrics()
    assert (metrics["mastery/nodes"], metrics["mastery/visits_mean"], metrics["mastery/steps_mean"]) == (1, 2, 5 - 3)
    assert metrics["mastery/unfailed_share"] == 0 and metrics["mastery/reopened_roots"] == 0
    assert metrics["mastery/first_node_step"] == 3 and metrics["mastery/first_node_wait_mean"] == 3 - 1
    assert metrics["mastery/node_event_age_mean"] == 3 - 2  # the newest failure of the root was of step 2
    # Of the five failures of the root one was corrected; that of the retired state cannot be dispatched.
    ages = lived.event_ages(10)
    assert ages == {f"teacher/event_age_{name}": 9 for name in ("mean", "max", "p50", "p90")}
    lived.observe_root(problem(), 4, 4, 8, None)
    assert lived.event_ages(10) == {}
    lived.observe_root(problem(), 0, 4, 9, [as_ids([8])])
    assert lived.metrics()["mastery/reopened_roots"] == 1
    assert lived.event_ages(10)["teacher/event_age_mean"] == pytest.approx((4 * 9 + 1) / 5)
    assert lived.event_ages(10)["teacher/event_age_p50"] == 9


def test_depths_count_active_states():
    pool = Forest()
    pool.observe_root(problem(), 0, 2, 1, [as_ids([5, 6, 7, 8])])
    nodes = []
    for step in range(2, 9):
        nodes.append(grow(pool, [step], step))
        pool.observe_node(nodes[-1], 0, 2, step, [as_ids([5])])
    metrics = pool.metrics()
    assert [metrics[f"forest_depth/{d}"] for d in (1, 2, 3, 4)] == [1] * 4 and metrics["forest_depth/from_5"] == 3
    assert metrics["forest_depth/mean"] == 4 and metrics["forest_depth/max"] == 7
    pool.observe_node(nodes[-1], 2, 2, 9, None)
    assert pool.metrics()["forest_depth/max"] == 6 and pool.metrics()["mastery/unfailed_share"] == 0


def test_history_survives_a_snapshot_and_may_be_absent_from_an_older_one(lived, tmp_path):
    lived.state(str(tmp_path))
    restored = Forest()
    restored.restore(str(tmp_path))
    for pool in (lived, restored):
        pool.observe_root(problem(), 1, 4, 7, None)
    assert restored.metrics() == lived.metrics() and restored.event_ages(9) == lived.event_ages(9)

    header = json.loads((tmp_path / "curriculum.json").read_text())
    del header["history"]
    (tmp_path / "curriculum.json").write_text(json.dumps(header))
    with np.load(tmp_path / "trees.npz") as columns:
        names = [name for name in columns.files if name not in ("mastered", "before_succ", "before_total")]
        np.savez(tmp_path / "trees.npz", **{name: columns[name] for name in names if not name.startswith("after_")})
    older = Forest()
    older.restore(str(tmp_path))
    assert older.metrics()["mastery/nodes"] == older.metrics()["transfer/trees"] == 0
    assert older.metrics()["forest/num_nodes"] == 2


def test_names_are_documented(lived):
    lived.observe_root(problem(), 0, 4, 9, [as_ids([8])])
    known = documented()
    assert not [name for name in lived.metrics() | lived.event_ages(9) if not known.fullmatch(name)]


def test_what_is_known_of_a_node(lived):
    lived.observe_root(problem(), 0, 4, 9, [as_ids([8, 8])])
    child = grow(lived, [8], 10)
    about = lived.look_up(child)
    assert about["ids"].tolist() == [*PROMPT, 0, 8] and about["depth_edges"] == 1 and about["created_step"] == 10
    assert about["suffix_ids"].tolist() == [9] and about["reward"] == 1.0 and about["root_success_rate"] == 0.0
    root = lived.look_up(about["tree"])
    assert root["parent"] is None and root["suffix_ids"] is None and root["descendants"] == 2
    assert lived.look_up(99) == {}
