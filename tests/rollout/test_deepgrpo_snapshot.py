"""What vLLM's side refuses before it touches its model: the part that needs neither vLLM nor torch."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

import deepgrpo

PATH = pathlib.Path(deepgrpo.__file__).parent / "rollout" / "vllm_plugin" / "deepgrpo_snapshot.py"
SPEC = importlib.util.spec_from_file_location("deepgrpo_snapshot", PATH)
snapshot = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(snapshot)


def tensors(*names: str) -> dict[str, np.ndarray]:
    return {name: np.ones((2, 3), np.float32) for name in names}


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """A snapshot of two files with index and manifest."""
    folder = tmp_path / "v1"
    folder.mkdir()
    save_file(tensors("a", "b"), folder / "1.safetensors", metadata={"format": "pt"})
    save_file(tensors("c"), folder / "2.safetensors")
    (folder / snapshot.INDEX).write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}})
    )
    sizes = {path.name: {"size": path.stat().st_size} for path in folder.iterdir()}
    (folder / snapshot.MANIFEST).write_text(json.dumps({"files": sizes}))
    return folder


def test_complete_snapshots_are_read(folder):
    found = snapshot.read(folder)
    assert {name: (entry.file.name, entry.shape) for name, entry in found.items()} == {
        "a": ("1.safetensors", (2, 3)),
        "b": ("1.safetensors", (2, 3)),
        "c": ("2.safetensors", (2, 3)),
    }
    (folder / snapshot.INDEX).unlink()
    (folder / snapshot.MANIFEST).unlink()
    (folder / "1.safetensors").rename(folder / snapshot.SINGLE)
    assert snapshot.read(folder).keys() == {"a", "b"}


def test_only_folders_below_the_root(folder, tmp_path):
    assert snapshot.locate(str(folder), str(tmp_path)) == folder
    (folder / "out").symlink_to("/etc")
    for path in ("/etc", str(tmp_path), str(folder / "out"), str(folder / ".." / "..")):
        with pytest.raises(snapshot.SnapshotError, match="outside"):
            snapshot.locate(path, str(tmp_path))
    with pytest.raises(snapshot.SnapshotError, match="no such folder"):
        snapshot.locate(str(tmp_path / "v2"), str(tmp_path))


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("kept", [0, 7, 60, -1])
def test_cut_off_file(folder, kept, with_manifest):
    path = folder / "2.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    if not with_manifest:
        (folder / snapshot.MANIFEST).unlink()
    with pytest.raises(
        snapshot.SnapshotError, match="manifest.json says" if with_manifest else "2.safetensors.*(cut off|header)"
    ):
        snapshot.read(folder)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_missing_file(folder, with_manifest):
    (folder / "2.safetensors").unlink()
    if not with_manifest:
        (folder / snapshot.MANIFEST).unlink()
    with pytest.raises(snapshot.SnapshotError, match="2.safetensors: not found"):
        snapshot.read(folder)


def test_files_that_contradict_the_index_or_each_other(folder):
    (folder / snapshot.MANIFEST).unlink()
    save_file(tensors("c", "d"), folder / "2.safetensors")
    with pytest.raises(snapshot.SnapshotError, match="for instance d"):
        snapshot.read(folder)
    save_file(tensors("c", "a"), folder / "2.safetensors")
    with pytest.raises(snapshot.SnapshotError, match="another file holds already: a"):
        snapshot.read(folder)
    save_file({"c": np.ones(2, np.int64)}, folder / "2.safetensors")
    with pytest.raises(snapshot.SnapshotError, match="c is of type I64"):
        snapshot.read(folder)
    (folder / snapshot.INDEX).unlink()
    with pytest.raises(snapshot.SnapshotError, match="neither model.safetensors nor"):
        snapshot.read(folder)
