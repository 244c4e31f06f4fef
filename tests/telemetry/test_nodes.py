"""States by age, what they lean on, the rows' share of the gradient, and the machine's part."""

import numpy as np
import pytest

from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER
from deepgrpo.learner.rows import Row
from deepgrpo.telemetry import machine, nodes, teacher_table
from deepgrpo.types import as_ids
from tests.telemetry.made import Known, decode, group
from tests.telemetry.test_documented import documented

ABOUT = {
    1: {"created_step": 10, "root_success_rate": 0.25},
    2: {"created_step": 7, "root_success_rate": None},
    3: {"created_step": 10, "root_success_rate": 0.5},
}


def states():
    groups = [
        group(str(n), *rewards, locked=[5, 6], node=n) for n, rewards in [(1, (1, 0)), (2, (0,)), (3, (1, 1, None)), (4, (1,))]
    ]
    groups += [group("dataset", 1), group("lost", None, node=1)]
    return nodes.rolled(groups, Known(ABOUT).look_up)


def row(source, advantage, length, injected=False, prompt=2):
    fields = {"teacher_coef": 0.0, "rollout_logps": None, "group_id": "g", "dataset_index": 0, "reward": 0.0}
    return Row(as_ids([1] * prompt), as_ids([1] * length), advantage, source, injected=injected, **fields)


def test_ages_and_hint_reliance():
    found = states()
    assert [state.group.prompt.node for state in found] == [1, 2, 3]  # 4 is unknown, the others are no states or have no verdict
    assert nodes.ages(found, 11, 0.0) == {
        **{"node_age/mean": pytest.approx((1 + 4 + 1) / 3), "node_age/max": 4},
        **{"node_age/0_to_1/groups": 2, "node_age/0_to_1/success_rate": 3 / 4},
        **{"node_age/2_to_4/groups": 1, "node_age/2_to_4/success_rate": 0},
    }
    assert nodes.hint_reliance(found, 0.0) == {"transfer/hint_reliance": pytest.approx(((0.5 - 0.25) + (1.0 - 0.5)) / 2)}
    assert nodes.ages([], 11, 0.0) == nodes.hint_reliance(found[1:2], 0.0) == {}
    names = [nodes.bucket(age) for age in (0, 1, 2, 9, 10, 49, 50, 900)]
    assert names == ["0_to_1", "0_to_1", "2_to_4", "5_to_9", "10_to_19", "20_to_49", "from_50", "from_50"]


def test_log_probs_by_age():
    found = states()
    asked = nodes.sequences(found)
    assert [(prompt.tolist(), response.tolist()) for prompt, response in asked[:1]] == [([1, 2, 0], [5, 6, 10, 11, 99])]
    assert len(asked) == 2 + 1 + 3
    rng = np.random.default_rng(0)
    logps = [rng.uniform(-2, 0, 5).astype(np.float32) for _ in asked]
    got = nodes.scores(found, logps, 11)
    young = [0, 1, 3, 4, 5]
    gaps = np.concatenate([np.abs(logps[i][2:].astype(np.float64) + 0.5) for i in young])
    assert got["node_age/0_to_1/mismatch"] == pytest.approx(gaps.mean(), rel=1e-6)
    assert got["node_age/0_to_1/prefix_logp"] == pytest.approx(np.concatenate([logps[0][:2], logps[3][:2]]).mean(), rel=1e-6)
    assert got["node_age/2_to_4/prefix_logp"] == pytest.approx(logps[2][:2].mean(), rel=1e-6)
    known = documented()
    assert not [name for name in got | nodes.ages(found, 11, 0.0) if not known.fullmatch(name)]


def test_gradient_shares():
    rows = [row(MAIN, -0.5, 4), row(MAIN, 0.25, 8, injected=True), row(BRANCH, 1.0, 4, injected=True), row(TEACHER, 9.0, 9)]
    rows.append(row(MAIN, np.array([1.0, -1.0]), 2))
    got = nodes.gradient_shares(rows)
    assert got == {f"data/gradient_share_{name}": part / 10 for name, part in [("original", 4), ("synthetic", 2), ("branch", 4)]}
    assert nodes.gradient_shares([row(TEACHER, 1.0, 3), row(MAIN, 0.0, 3)]) == {}


def test_sequence_lengths():
    rows = [row(MAIN, 1.0, length, prompt=1) for length in (9, 1, 1, 1, 4)] + [row(TEACHER, 0.0, 3)]
    got = machine.sequence_lengths(rows, 2)
    assert [got[f"main_seqlen/{name}"] for name in ("min", "max", "minmax_diff", "mean")] == [9, 12, 3, 10.5]
    assert (got["main_seqlen/balanced_min"], got["main_seqlen/balanced_max"]) == (10, 11)
    assert got["teacher_seqlen/min"] == 0 and got["teacher_seqlen/max"] == 5 and not any(n.startswith("branch") for n in got)


def test_memory():
    got = machine.memory()
    assert 0.01 < got["perf/cpu_memory_used_gb"] < 1000


def test_teacher_table():
    about = {"suffix_ids": as_ids([8, 99]), "failed_suffix_ids": as_ids([7]), "reward": 1.0, "created_step": 3}
    groups = [group("a", 1), group("b", 1, 0, locked=[5], node=1, stream="branch"), group("c", 0, node=2), group("d", 0, node=3)]
    curriculum = Known({1: about, 2: {"created_step": 1}, 3: about})
    made = teacher_table.records(groups, curriculum, 6, decode, 0.0, 9)
    assert len(made) == 2 and len(teacher_table.records(groups, curriculum, 6, decode, 0.0, 1)) == 1
    first = made[0]
    assert (first["shared_prefix"], first["student_suffix"], first["teacher_suffix"]) == ("5", "7", "8 99")
    assert (first["k_succ"], first["k_total"], first["created_step"]) == (1, 2, 3)
    assert [c["score"] for c in first["continuations"]] == [1, 0]
