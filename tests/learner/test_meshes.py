"""A learner on eight devices is the learner on one, whatever the mesh and however few the rows; and it moves between meshes."""

import jax
import numpy as np
import pytest

from deepgrpo.learner import packing, sharding
from deepgrpo.weights.checkpoint import Checkpoints
from tests.learner import tiny

MESHES = [(1, 8, 1), (1, 4, 2), (2, 4, 1)]


def learner(mesh, **keys):
    return tiny.make_learner(mesh, objective__kl_coef=0.1, **keys)


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def on_one_device():
    made = learner((1, 1, 1))
    metrics = [made.update(tiny.make_rows(n, seed=n), n) for n in (1, 3, 9)]
    return metrics, jax.device_get(made.state)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_number_of_rows_trains_on_any_mesh(mesh, on_one_device):
    """1, 3 and 9 rows are multiples of no mesh: they are padded with rows of no weight, none is left out."""
    metrics, state = on_one_device
    made = learner(mesh)
    for n, expected in zip((1, 3, 9), metrics, strict=True):
        found = made.update(tiny.make_rows(n, seed=n), n)
        assert (
            found["perf/tokens"] == expected["perf/tokens"] == sum(packing.row_length(row) for row in tiny.make_rows(n, seed=n))
        )
        for key in ("actor/grad_norm", "actor/total_loss", "actor/main_chain/mb_tokens", "actor/main_chain/mb_samples"):
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    assert_close(made.state, state)


def test_masters_and_moments_are_split_and_donated():
    made = learner((1, 8, 1))
    before = made.policy
    kernel = before["layers"]["mlp"]["up_proj"]["kernel"]
    for leaf in (kernel, made.state["adam"]["mu"]["layers"]["mlp"]["up_proj"]["kernel"]):
        assert leaf.dtype == np.float32 and leaf.addressable_shards[0].data.size == leaf.size // 8
    reference = jax.device_get(made.state["reference"])
    for step in range(2):
        made.update(tiny.make_rows(5, seed=step), step)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert tiny.same(reference, made.state["reference"]) and tiny.same(reference, tiny.parameters())


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_a_checkpoint_of_eight_devices_is_restored_on_fewer(mesh, eight):
    checkpoints, state, expected = eight
    made = learner(mesh)
    arrays, _, _ = checkpoints.restore(1, made.abstract_state())
    made.restore(arrays)
    assert tiny.same(made.state, state)
    found = made.update(tiny.make_rows(6, seed=7), 1)
    assert found["actor/total_loss"] == pytest.approx(expected["actor/total_loss"], abs=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A checkpoint saved on eight devices after one update, what it holds, and the next update's metrics there."""
    made = learner((1, 8, 1))
    made.update(tiny.make_rows(6), 0)
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep=1)
    checkpoints.save(1, made.state, {})
    state = jax.device_get(made.state)
    return checkpoints, state, made.update(tiny.make_rows(6, seed=7), 1)


def test_an_update_does_not_wait_for_its_devices():
    """What follows an update may be enqueued before its metrics are fetched, and two updates may be under way."""
    made, other = learner((1, 1, 1)), learner((1, 1, 1))
    expected = [other.update(tiny.make_rows(4, seed=s), s) for s in range(3)]
    pending = [made.start_update(tiny.make_rows(4, seed=s), s) for s in range(3)]
    assert made.host_state()["optimizer_steps"] == 3 and tiny.same(made.state, other.state)
    for a, b in zip(pending, expected, strict=True):
        found = a.metrics()
        assert {k: v for k, v in found.items() if k.startswith("actor")} == {k: v for k, v in b.items() if k.startswith("actor")}
        assert found is not a.metrics() and found == a.metrics()
    assert sharding.batch_shards(made.mesh) == 1
