"""When a state retires, what its teacher wrote, and snapshots from before the count of successes in a row."""

import numpy as np
import pytest

from deepgrpo.curriculum.forest_pool import Forest
from tests.curriculum.test_suffix_sft import grow


def test_a_state_retires_after_so_many_whole_successes_in_a_row(tmp_path):
    pool = Forest(retire_after=2)
    node = grow(pool, 1, 1, 7)
    outcomes = [(2, 2), (1, 2), (2, 2)]  # the second one breaks the row
    assert [pool.observe_node(node, *outcome, step, None)["node_retired"] for step, outcome in enumerate(outcomes, 2)] == [
        0,
        0,
        0,
    ]
    pool.state(str(tmp_path))
    restored = Forest(retire_after=2)
    restored.restore(str(tmp_path))
    assert restored.observe_node(node, 2, 2, 5, None)["node_retired"] == 1

    (root,) = (n["node"] for tree in pool.describe() for n in tree["nodes"] if n["origin"] is None)
    problem = pool.describe()[0]["problem"]
    assert pool.observe_root(problem, 2, 2, 6, None)["root_deactivated"] == 1  # a root with the first
    assert pool.continuation(root) is None and pool.continuation(99) is None
    suffix, reward = pool.continuation(node)
    assert suffix.tolist() == [5, 6] and reward == 1.0
    with pytest.raises(ValueError, match="retire_after must be >= 1"):
        Forest(retire_after=0)


def test_a_snapshot_without_that_count_is_read_as_zero(tmp_path):
    pool = Forest(retire_after=2)
    node = grow(pool, 1, 1, 7)
    pool.observe_node(node, 2, 2, 2, None)
    pool.state(str(tmp_path))
    with np.load(tmp_path / "nodes.npz") as columns:
        np.savez(tmp_path / "nodes.npz", **{name: columns[name] for name in columns.files if name != "mastered_in_a_row"})
    older = Forest(retire_after=2)
    older.restore(str(tmp_path))
    assert older.observe_node(node, 2, 2, 3, None)["node_retired"] == 0
    assert older.observe_node(node, 2, 2, 4, None)["node_retired"] == 1
