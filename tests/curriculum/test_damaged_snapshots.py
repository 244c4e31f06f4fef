"""A saved curriculum that is damaged, foreign or put together from two is refused with the file's name, and never half read."""

import json
import pathlib
import random
import re
import shutil

import numpy as np
import pytest

from deepgrpo.curriculum import POOLS
from deepgrpo.curriculum.saved import NotAsSaved
from tests.curriculum.made import RIGHT, WRONG, correction, create, group, problem


def made(pool):
    return create(pool, branches__tokens_per_node=1)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """Folders of two snapshots of each pool, an early and a late one."""
    folders = {}
    for pool in POOLS:
        curriculum = made(pool)
        for step in range(1, 5):
            curriculum.observe(
                [group(problem(i, (i + 1,)), [WRONG, RIGHT, WRONG] if step % 2 else [WRONG] * 3) for i in range(4)], step
            )
            for failure in curriculum.dispatch(3, step):
                curriculum.resolve(failure, correction(failure, step % 3 + 1), step)
            curriculum.dispatch(1, step)
            if step in (2, 4):
                folders[pool, step] = folder = tmp_path_factory.mktemp(f"{pool}{step}")
                curriculum.state(str(folder))
    return folders


def refused(pool, folder, *names):
    with pytest.raises(NotAsSaved) as error:
        made(pool).restore(str(folder))
    assert str(folder) in str(error.value) and any(name in str(error.value) for name in names), error.value
    assert "checkpoint" in str(error.value) or "curriculum.pool" in str(error.value) or "new run" in str(error.value)


@pytest.mark.parametrize("pool", POOLS)
def test_every_file_of_every_pool_that_is_lost_cut_or_garbled_is_named(pool, snapshots, tmp_path):
    whole = snapshots[pool, 4]
    for number, file in enumerate(sorted(path.name for path in whole.iterdir())):
        data = (whole / file).read_bytes()
        for kind, damaged in enumerate((None, b"", data[: len(data) // 2], data[:-3], b"\x00" * len(data), b"[1, 2]", b"{}")):
            folder = tmp_path / f"{number}-{kind}"
            shutil.copytree(whole, folder)
            if damaged is None:
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(damaged)
            refused(pool, folder, file, "curriculum.json")


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool not in ("none", "branches_inline")])
def test_files_of_two_snapshots_are_not_mixed_and_random_damage_is_no_traceback(pool, snapshots, tmp_path):
    early, late, draw = snapshots[pool, 2], snapshots[pool, 4], random.Random(pool)
    outcomes = []
    for file in sorted(path.name for path in late.iterdir()):
        folder = tmp_path / f"mixed-{file}"
        shutil.copytree(late, folder)
        shutil.copy(early / file, folder / file)
        outcomes.append(restores(pool, folder))
        for _ in range(12):
            data = bytearray((late / file).read_bytes())
            data[draw.randrange(len(data))] = draw.randrange(256)
            shutil.rmtree(folder)
            shutil.copytree(late, folder)
            (folder / file).write_bytes(data)
            restores(pool, folder)
    assert pool != "forest" or not all(outcomes), "snapshots of different steps do not fit"


def restores(pool, folder) -> bool:
    """Whether a folder is taken in; any other error than the refusal fails the test."""
    try:
        curriculum = made(pool)
        curriculum.restore(str(folder))
        curriculum.metrics()
    except NotAsSaved:
        return False
    return True


def edited(folder: pathlib.Path, file: str, **changes) -> None:
    with np.load(folder / file) as arrays:
        columns = dict(arrays.items())
    np.savez(folder / file, **(columns | {name: change(columns[name].copy()) for name, change in changes.items()}))


def put(place, value):
    def change(column):
        column[place] = value
        return column

    return change


@pytest.mark.parametrize(
    "file, changes",
    [
        ("nodes.npz", {"parent": put(1, 10_000)}),
        ("nodes.npz", {"id": put(1, 0)}),
        ("nodes.npz", {"ids": put(0, -5)}),
        ("nodes.npz", {"ids_offsets": put(1, 10_000)}),
        ("nodes.npz", {"active": lambda column: column[:-1]}),
        ("events.npz", {"node": put(0, 10_000)}),
        ("events.npz", {"id": put(0, 10_000)}),
        ("trees.npz", {"num_nodes": put(0, 10_000)}),
        ("trees.npz", {"num_nodes": put(0, 0)}),
        ("nodes.npz", {"event": lambda column: column[:-1]}),
        ("nodes.npz", {"created_step": lambda column: column.astype(float)}),
        ("trees.npz", {"problem": put(0, 99)}),
    ],
)
def test_a_forest_whose_numbers_do_not_fit_is_refused(file, changes, snapshots, tmp_path):
    shutil.copytree(snapshots["forest", 4], tmp_path / "x")
    edited(tmp_path / "x", file, **changes)
    refused("forest", tmp_path / "x", file, "curriculum.json", "nodes.npz", "trees.npz")


@pytest.mark.parametrize("value", [None, 3, ["g"]])
def test_a_row_whose_value_is_of_another_type_is_named(value, snapshots, tmp_path):
    shutil.copytree(snapshots["suffixes", 4], tmp_path / "x")
    file = tmp_path / "x" / "failed_pool.json"
    content = json.loads(file.read_text())
    content["rows"][1]["group_id"] = value
    file.write_text(json.dumps(content))
    with pytest.raises(NotAsSaved, match=re.escape(f"row 1: group_id is {value!r}")):
        made("suffixes").restore(str(tmp_path / "x"))


@pytest.mark.parametrize("pool", POOLS)
def test_another_pools_folder_is_refused(pool, snapshots):
    other = "flat" if pool != "flat" else "chain"
    with pytest.raises(NotAsSaved, match=f"saved by pool type '{pool}', but this run uses '{other}'; set curriculum.pool={pool}"):
        made(other).restore(str(snapshots[pool, 4]))
