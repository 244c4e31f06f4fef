"""Checkpoints: bit for bit, on any mesh, whatever kills the process and however full the disk is."""

import json
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepgrpo.weights.checkpoint import CRASH_POINTS, CheckpointError, Checkpoints, read_arrays

ROOT = pathlib.Path(__file__).resolve().parents[2]


def opened(folder, keep: int = 1) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep)


def state(value: float = 1.0, rows: int = 16) -> dict:
    rng = np.random.default_rng(3)
    params = {
        "layers": {"kernel": rng.normal(size=(rows, 8)).astype(np.float32)},
        "norm": {"scale": np.full(8, value, np.float32)},
    }
    params = jax.tree.map(jnp.asarray, params)
    return {"params": params, "opt_state": optax.adamw(1e-3).init(params), "step": jnp.int32(7)}


def place(tree, fsdp: int, tensor: int):
    """Shards every matrix over a mesh of fsdp x tensor devices."""
    devices = np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"))
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec("fsdp", "tensor") if x.ndim == 2 else PartitionSpec()), tree
    )
    return jax.device_put(tree, shardings)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_everything_comes_back_to_the_bit(tmp_path):
    arrays = state()
    odd = np.array([np.nan, -0.0, 1e-45, np.inf, 0.1, -np.nan, 3.4e38, 1.0], np.float32)
    arrays["params"]["norm"]["scale"] = jnp.asarray(odd)
    arrays["half"] = jnp.asarray([1.5, -2.0], jnp.bfloat16)
    host = {"cursor": [1, 2], "lr": 0.1 + 0.2, "name": "é", "none": None, "big": 2**70}
    writer = {"curriculum": lambda folder: (folder / "trees.jsonl").write_text("{}\n")}
    assert opened(tmp_path).save(5, arrays, host, writer) > 0
    found, found_host, folder = opened(tmp_path).restore(5, abstract(arrays))
    assert bits(found) == bits(arrays) and jax.tree.structure(found) == jax.tree.structure(arrays)
    assert found_host == host and (folder / "curriculum" / "trees.jsonl").read_text() == "{}\n"
    assert not any(b"pickle" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    scales = read_arrays(folder, {"norm": abstract(arrays)["params"]["norm"]} | {"layers": arrays["params"]["layers"]}, "params.")
    assert bits(scales["norm"]) == bits(arrays["params"]["norm"])


@pytest.mark.parametrize("fsdp, tensor", [(1, 1), (2, 1), (2, 2)])
def test_restored_on_another_mesh(tmp_path, fsdp, tensor):
    saved = place(state(), 8, 1)
    opened(tmp_path).save(1, saved, {})
    target = abstract(place(state(), fsdp, tensor))
    found, _, _ = opened(tmp_path).restore(1, target)
    assert bits(found) == bits(saved)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, target)


KILLED = """
import os, sys
import numpy as np
from deepgrpo.weights.checkpoint import CRASH_POINTS, Checkpoints

for point in CRASH_POINTS:  # forked before JAX has started, so that its imports are paid once
    if (child := os.fork()) == 0:
        os.environ["DEEPGRPO_CRASH_AT"] = point + "@2"
        checkpoints = Checkpoints(os.path.join(sys.argv[1], point, "checkpoints"), 1)
        for step in (1, 2):
            checkpoints.note_validation(step, {"val-core/X/reward/mean@1": float(step)})
            checkpoints.save(step, {"w": np.full(8, step, np.float32)}, {"step": step})
        os._exit(0)
    print(point, os.waitpid(child, 0)[1])
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    result = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == [word for point in CRASH_POINTS for word in (point, "9")], result.stderr
    return folder


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_at_any_point_there_is_a_checkpoint_to_resume_from(killed, point):
    step = 2 if point in ("after_rename", "after_pointer") else 1
    checkpoints = opened(killed / point)
    assert checkpoints.latest_step() == step
    found, host, _ = checkpoints.restore(step, {"w": np.zeros(8, np.float32)})
    assert host == {"step": step} and np.array_equal(found["w"], np.full(8, step))
    assert checkpoints.best.step == step
    assert json.loads((killed / point / "best_checkpoint.json").read_text())["step"] == step
    assert int((killed / point / "latest").read_text()) == step
    checkpoints.save(step + 1, found, {})  # goes on, and nothing of the killed save stays behind
    assert sorted(p.name for p in (killed / point / "checkpoints").iterdir()) == sorted({str(step), str(step + 1)})


def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(tmp_path):
    small, large = state(), state(rows=200_000)
    checkpoints = opened(tmp_path)
    checkpoints.save(1, small, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoints/2: .* take [\d,]+ bytes, [\d,]+ are free .* make room") as error:
            checkpoints.save(2, large, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.__cause__ is not None
    assert [p.name for p in checkpoints.folder.iterdir()] == ["1"] and opened(tmp_path).latest_step() == 1
    checkpoints.save(2, large, {})
    assert opened(tmp_path).latest_step() == 2


def test_a_writer_that_fails_names_the_path(tmp_path):
    def write(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"checkpoints/3: .*No space left on device"):
        opened(tmp_path).save(3, state(), {}, {"curriculum": write})
    with pytest.raises(CheckpointError, match=r"host.cursor\[0\] is a int64, expected JSON"):
        opened(tmp_path).save(3, state(), {"cursor": [np.int64(3)]})
    assert not list((tmp_path / "checkpoints").iterdir())


def test_copies_are_as_good_as_originals_and_half_copies_are_passed_over(tmp_path, caplog):
    checkpoints = opened(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state(step), {"step": step})
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder, tmp_path / "elsewhere" / "checkpoints")
    assert opened(tmp_path / "elsewhere").latest_step() == 4
    shutil.copytree(folder / "2", folder / "12")
    (folder / "4" / "manifest.json").unlink()
    data = max((p for p in (folder / "3" / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1  # one bit, same size
    data.write_bytes(damaged)
    resumed = opened(tmp_path)
    assert resumed.latest_step() == 2
    for step, problem in {12: "holds step 2", 4: "manifest.json is missing", 3: "is damaged: sha256"}.items():
        assert any(f"checkpoints/{step} is passed over" in text and problem in text for text in caplog.messages)
    _, host, _ = resumed.restore(2, abstract(state()))
    assert host == {"step": 2}
    resumed.save(3, state(33), {"step": 33})  # the damaged folder of that step gives way
    assert opened(tmp_path).restore(3, abstract(state()))[1] == {"step": 33}


def test_another_model_is_refused_by_name(tmp_path):
    opened(tmp_path).save(1, state(), {})
    other = state()
    other["params"]["layers"]["bias"] = jnp.ones(3)
    other["params"]["norm"]["scale"] = jnp.ones(9)
    del other["step"]
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path).restore(1, abstract(other))
    text = str(error.value)
    assert "params.layers.bias: not in the checkpoint" in text and "step: found" in text
    assert "params.norm.scale: found {'shape': [8]" in text and "[9]" in text


def test_a_step_is_saved_once_and_an_empty_folder_has_no_latest(tmp_path):
    checkpoints = opened(tmp_path)
    assert checkpoints.latest_step() is None
    checkpoints.save(1, state(), {"first": True})
    assert checkpoints.save(1, state(), {"first": False}) == 0
    assert opened(tmp_path).restore(1, abstract(state()))[1] == {"first": True}
