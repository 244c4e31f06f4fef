"""Records of hard states: identity, counts, texts and their limits, the pair, rollouts; a full disk is only warned of."""

import hashlib
import json

import pytest

from deepgrpo.curriculum.base import Correction
from deepgrpo.curriculum.forest import Forest
from deepgrpo.telemetry import dumps
from deepgrpo.telemetry.recover import Pair
from deepgrpo.types import as_ids
from tests.curriculum.made import forest
from tests.telemetry.made import STOP, Known, decode, group, problem

DUMP = dumps.StateDump(decode, (STOP,), 0.0)


@pytest.fixture
def curriculum() -> Forest:
    """Three trees with a state each, the second tree's with one more below it."""
    pool = forest()
    for index in range(3):
        pool.observe_root(problem(index), 0, 1, 1, [as_ids([5, 6, 7])])
    for failure in pool.dispatch(3, 1):
        pool.resolve(failure, Correction(as_ids([5]), as_ids([8, STOP]), 1.0, as_ids([6, 7])), 2)
    pool.observe_node(node(pool, 1), 0, 1, 2, [as_ids([8, 9])])
    (failure,) = pool.dispatch(1, 2)
    pool.resolve(failure, Correction(as_ids([8]), as_ids([4]), 1.0, as_ids([9])), 3)
    return pool


def node(curriculum: Forest, index: int) -> int:
    return curriculum.find([1, 2, index], [1, 2, index, 5])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, limit in {"DUMP_STATES": 2, "DUMP_DEEPER": 1, "DUMP_ROLLOUTS": 2}.items():
        monkeypatch.setattr(dumps, name, limit)


def states(curriculum: Forest):
    return [group(f"4:state:{i}", 1, 0, 0, None, index=i, locked=[5], node=node(curriculum, i)) for i in range(3)]


def test_records_in_order_paired_ones_first_then_deep_ones(curriculum):
    groups = states(curriculum)
    root = group("4:state:1:root", 0, 0, index=1, stream="paired")
    pair = Pair(groups[1], root, {})
    made = DUMP.records([group("4:0", 0), *groups], [pair], curriculum, 4)
    assert [(r["source"], r["task_id"]) for r in made] == [
        ("forest_prefix", 1),
        ("paired_root", 1),
        ("forest_prefix", 0),
        ("forest_debug_deeper", 1),
    ]
    assert made[0]["pair"] == made[1]["pair"]
    assert made[0]["pair"]["prefix_minus_root"] == pytest.approx(1 / 3) and made[2]["pair"] is None
    assert (made[1]["k_succ"], made[1]["k_total"], len(made[1]["rollouts"])) == (0, 2, 2)
    assert made[3]["depth_edges"] == 2 and made[3]["rollouts"] == [] and made[3]["k_total"] is None
    json.dumps(made, allow_nan=False)


def test_a_record_tells_where_its_state_comes_from(curriculum):
    record = DUMP.records(states(curriculum)[1:2], [], curriculum, 4)[0]
    assert record["prompt_sha1"] == hashlib.sha1(b"1,2,1").hexdigest()
    assert record["state_sha1"] == hashlib.sha1(b"1,2,1,5").hexdigest()
    assert (record["depth_edges"], record["depth_tokens"], record["descendants"], record["deepest_depth"]) == (1, 1, 1, 2)
    assert (record["k_succ"], record["k_total"], record["rate"]) == (1, 3, pytest.approx(1 / 3))
    assert (record["observations"], record["last_fail_step"], record["created_step"]) == (1, 2, 2)
    assert (record["original_prompt"], record["locked_prefix"], record["augmented_prompt"]) == ("1 2 1", "5", "1 2 1 5")
    assert (record["teacher_suffix"], record["teacher_full_response"]) == ("8 99", "5 8 99")
    assert record["original_failed_suffix"] == "6 7"
    assert record["teacher_suffix_finished"] and record["teacher_suffix_completed"] and record["teacher_suffix_length"] == 2
    assert record["lineage"][0]["parent"] is None and len(record["children"]) == 1
    assert record["rollouts"][0] == {
        **{"row": 0, "score": 1, "finished": True, "completed": True},
        **{"response": "10 11 99", "full_response": "5 10 11 99"},
    }
    assert len(record["rollouts"]) == 2


def test_long_texts_are_cut(curriculum, monkeypatch):
    monkeypatch.setattr(dumps, "DUMP_CHARACTERS", 3)
    record = DUMP.records(states(curriculum)[:1], [], curriculum, 4)[0]
    assert record["augmented_prompt"] == "1 2 [... 4 of 7 characters cut]" and record["locked_prefix"] == "5"


def test_what_is_written_is_counted_and_a_failure_only_warns(curriculum, tmp_path, caplog):
    records = DUMP.records(states(curriculum), [], curriculum, 4)
    counts = dumps.show_states(tmp_path / "prefix_debug" / "4.jsonl", records)
    assert counts == {"prefix_debug_dump/records": 3, "prefix_debug_dump/deeper_records": 1}
    assert len((tmp_path / "prefix_debug" / "4.jsonl").read_text().splitlines()) == 3
    (tmp_path / "file").write_text("")
    assert set(dumps.show_states(tmp_path / "file" / "4.jsonl", records).values()) == {0}
    assert "could not be written" in caplog.text


def test_teacher_table(monkeypatch):
    about = {"suffix_ids": as_ids([8, 99]), "failed_suffix_ids": as_ids([7]), "reward": 1.0, "created_step": 3}
    groups = [group("a", 1), group("b", 1, 0, locked=[5], node=1, stream="branch"), group("c", 0, node=2), group("d", 0, node=3)]
    curriculum = Known({1: about, 2: {"created_step": 1}, 3: about})
    made = DUMP.teacher_table(groups, curriculum, 6)
    monkeypatch.setattr(dumps, "TABLE_STATES", 1)
    assert len(made) == 2 and len(DUMP.teacher_table(groups, curriculum, 6)) == 1
    first = made[0]
    assert (first["shared_prefix"], first["student_suffix"], first["teacher_suffix"]) == ("5", "7", "8 99")
    assert (first["k_succ"], first["k_total"], first["created_step"]) == (1, 2, 3)
    assert [c["score"] for c in first["continuations"]] == [1, 0]
