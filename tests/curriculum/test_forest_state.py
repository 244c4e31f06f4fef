"""Snapshots: equal content gives equal bytes, a restored forest goes on exactly, and one taken amid changes shows one instant."""

import json
import pathlib

import numpy as np
import pytest

from deepgrpo.curriculum import forest_state
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Annotation
from deepgrpo.curriculum.none import NoCurriculum
from deepgrpo.types import Problem, as_ids
from tests.curriculum.forest_check import check


def grown(trees: int = 8, **bounds) -> Forest:
    """A forest with active and retired nodes, waiting events, events in flight, clocks and SFT credits."""
    pool = Forest(max_model_len=100, **bounds)
    for i in range(trees):
        problem = Problem(i, "test", as_ids([7, i]), {"answer": [i, None]}, f"Wie groß\u2028ist {i}?", {"level": i, "id": 5})
        pool.observe_root(problem, i % 2, 4, 1 + i // 2, [as_ids([i, 5, k]) for k in range(4 - i % 2)])
    for step in (3, 4):
        for failure in pool.dispatch_teacher(trees - 2, step):
            if failure.event % 3:
                ids = as_ids([*failure.state_ids, *failure.response_ids[:2]])
                correction = Annotation(ids, as_ids([9, failure.event]), 1.0, failure.response_ids[2:])
                pool.teacher_result(failure.event, correction, step)
        for state in pool.sample_rollout(3, step):
            pool.observe_node(state.node, int(step == 4) * 2, 2, step, [as_ids([8])])
    for entry in pool.sample_sft(2, 5):
        pool.record_sft(entry.node, 5)
    return pool


def saved(pool: Forest, folder: pathlib.Path) -> dict[str, bytes]:
    folder.mkdir()
    pool.state(str(folder))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def drive(pool: Forest) -> list:
    """What the next operations return."""
    seen = []
    for step in range(6, 12):
        seen += [state.ids.tolist() for state in pool.sample_rollout(2, step)]
        for failure in pool.dispatch_teacher(2, step):
            ids = as_ids([*failure.state_ids, step])
            seen.append((failure.event, failure.step, failure.state_ids.tolist(), failure.response_ids.tolist()))
            seen.append((failure.problem.index, failure.problem.ground_truth, failure.problem.question, failure.problem.extra))
            seen.append(pool.teacher_result(failure.event, Annotation(ids, as_ids([1])), step))
        seen += [entry.suffix_ids.tolist() for entry in pool.sample_sft(1, step)]
    return seen + [sorted(pool.metrics().items())]


def test_restored_forest_goes_on_exactly(tmp_path):
    pool = grown()
    while flying := [event for tree in pool.describe() for event in tree["events"] if event["in_flight"]]:
        pool.teacher_result(flying[0]["event"], None, 5)  # in-flight events would wait again: answered, the two stay equal
    first = saved(pool, tmp_path / "a")
    restored = Forest(max_model_len=100)
    restored.restore(str(tmp_path / "a"))
    check(restored)
    assert saved(restored, tmp_path / "b") == first
    assert drive(restored) == drive(pool)
    assert saved(restored, tmp_path / "c") == saved(pool, tmp_path / "d") != first


def test_events_in_flight_wait_again(tmp_path):
    pool = grown()
    flying = pool.metrics()["teacher/events_in_flight"]
    assert flying > 0
    saved(pool, tmp_path / "a")
    bounded = Forest(max_model_len=100, max_events=4)
    bounded.restore(str(tmp_path / "a"))
    check(bounded)
    before = bounded.metrics()
    assert before["teacher/events_in_flight"] == 0 and before["teacher/events_queued"] == len(pool._index.events) > 5
    bounded.observe_root(Problem(0, "test", as_ids([7, 0]), "", ""), 0, 1, 9, [as_ids([1])])
    assert bounded.metrics()["teacher/events_queued"] == 4  # a tighter bound takes effect with the next event
    check(bounded)


def test_snapshot_amid_changes_shows_its_beginning(tmp_path, monkeypatch):
    pool, twin = grown(40), grown(40)
    expected = saved(twin, tmp_path / "twin")
    monkeypatch.setattr(forest_state, "_SLICE", 30)
    add, slices = forest_state.Writer.add, []

    def add_and_change(writer, rows):
        add(writer, rows)
        if not rows.problems:  # the writer's own start, before the snapshot's
            return
        step = len(slices) + 20
        slices.append(len(rows.problems))
        pool.observe_root(Problem(99, "test", as_ids([1, step]), "", ""), 0, 1, step, [as_ids([1])])
        pool.observe_root(Problem(98, "test", as_ids([7, 60 - step]), "", ""), 4, 4, step, None)
        pool.sample_rollout(3, step)
        pool.mark_sft([pool.sample_sft(1, step)[0].node], step)
        for failure in pool.dispatch_teacher(3, step):
            pool.teacher_result(failure.event, Annotation(as_ids([*failure.state_ids, step]), as_ids([1])), step)
        if step == 24:
            pool.freeze_sft_epoch(0, 2)
            pool.cleanup()

    monkeypatch.setattr(forest_state.Writer, "add", add_and_change)
    assert saved(pool, tmp_path / "a") == expected
    assert len(slices) > 6 and sum(slices) == 40
    check(pool)
    monkeypatch.undo()
    assert saved(pool, tmp_path / "b") != expected


def test_files_open_with_plain_tools(tmp_path):
    saved(grown(), tmp_path / "a")
    header = json.loads((tmp_path / "a/curriculum.json").read_text())
    assert (header["pool"], header["version"]) == ("forest", 1)
    problems = json.loads((tmp_path / "a/problems.json").read_text())
    assert [problem["index"] for problem in problems] == list(range(8))
    nodes = np.load(tmp_path / "a/nodes.npz")
    rows = [nodes["ids"][a:b].tolist() for a, b in zip(nodes["ids_offsets"], nodes["ids_offsets"][1:], strict=False)]
    child = int(np.flatnonzero(nodes["parent"] >= 0)[0])
    parent = int(np.flatnonzero(nodes["id"] == nodes["parent"][child])[0])
    assert rows[child][: len(rows[parent])] == rows[parent] and set(np.load(tmp_path / "a/origins.npz")["reward"]) == {1.0}


def test_empty_forest_round_trips(tmp_path):
    first = saved(Forest(), tmp_path / "a")
    pool = grown()
    pool.restore(str(tmp_path / "a"))
    assert len(pool) == 0 and saved(pool, tmp_path / "b") == first


def test_foreign_folders_are_refused(tmp_path):
    NoCurriculum().state(str(tmp_path))
    with pytest.raises(ValueError, match="'none'.*'forest'"):
        Forest().restore(str(tmp_path))
    header = tmp_path / "curriculum.json"
    header.write_text(json.dumps({"pool": "forest", "version": 7}))
    with pytest.raises(ValueError, match="7 .*'forest'.* 1"):
        Forest().restore(str(tmp_path))
    header.unlink()
    with pytest.raises(ValueError, match="curriculum.json is absent"):
        NoCurriculum().restore(str(tmp_path))


def test_problem_that_json_cannot_hold_is_named(tmp_path):
    pool = Forest()
    pool.observe_root(Problem(12, "test", as_ids([1]), {1, 2}, ""), 0, 1, 1, [as_ids([2])])
    with pytest.raises(ValueError, match="ground_truth=.*of row 12 of 'test'"):
        pool.state(str(tmp_path))
    check(pool)
