"""The parts of diagnostics: states by age, rows, the machine, times of responses, and what is warned of."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER
from deepgrpo.learner.rows import Row
from deepgrpo.rollout.engine import Request
from deepgrpo.telemetry import diagnostics
from deepgrpo.types import Completion, as_ids
from tests.telemetry.made import Known, group
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
    return diagnostics.rolled(groups, Known(ABOUT).look_up)


def row(source, advantage, length, injected=False, prompt=2):
    fields = {"teacher_coef": 0.0, "rollout_logps": None, "group_id": "g", "dataset_index": 0, "reward": 0.0}
    return Row(as_ids([1] * prompt), as_ids([1] * length), advantage, source, injected=injected, **fields)


def test_ages_and_hint_reliance():
    found = states()
    assert [state.group.prompt.node for state in found] == [1, 2, 3]  # 4 is unknown, the others are no states or have no verdict
    assert diagnostics.ages(found, 11, 0.0) == {
        **{"node_age/mean": pytest.approx((1 + 4 + 1) / 3), "node_age/max": 4},
        **{"node_age/0_to_1/groups": 2, "node_age/0_to_1/success_rate": 3 / 4},
        **{"node_age/2_to_4/groups": 1, "node_age/2_to_4/success_rate": 0},
    }
    assert diagnostics.hint_reliance(found, 0.0) == {"transfer/hint_reliance": pytest.approx(((0.5 - 0.25) + (1.0 - 0.5)) / 2)}
    assert diagnostics.ages([], 11, 0.0) == diagnostics.hint_reliance(found[1:2], 0.0) == {}
    names = [diagnostics.bucket(age) for age in (0, 1, 2, 9, 10, 49, 50, 900)]
    assert names == ["0_to_1", "0_to_1", "2_to_4", "5_to_9", "10_to_19", "20_to_49", "from_50", "from_50"]


def test_log_probs_by_age():
    found = states()
    asked = diagnostics.sequences(found)
    assert [(prompt.tolist(), response.tolist()) for prompt, response in asked[:1]] == [([1, 2, 0], [5, 6, 10, 11, 99])]
    assert len(asked) == 2 + 1 + 3
    rng = np.random.default_rng(0)
    logps = [rng.uniform(-2, 0, 5).astype(np.float32) for _ in asked]
    got = diagnostics.scores(found, logps, 11)
    young = [0, 1, 3, 4, 5]
    gaps = np.concatenate([np.abs(logps[i][2:].astype(np.float64) + 0.5) for i in young])
    assert got["node_age/0_to_1/mismatch"] == pytest.approx(gaps.mean(), rel=1e-6)
    assert got["node_age/0_to_1/prefix_logp"] == pytest.approx(np.concatenate([logps[0][:2], logps[3][:2]]).mean(), rel=1e-6)
    assert got["node_age/2_to_4/prefix_logp"] == pytest.approx(logps[2][:2].mean(), rel=1e-6)
    known = documented()
    assert not [name for name in got | diagnostics.ages(found, 11, 0.0) if not known.fullmatch(name)]


def test_gradient_shares():
    rows = [row(MAIN, -0.5, 4), row(MAIN, 0.25, 8, injected=True), row(BRANCH, 1.0, 4, injected=True), row(TEACHER, 9.0, 9)]
    rows.append(row(MAIN, np.array([1.0, -1.0]), 2))
    got = diagnostics.gradient_shares(rows)
    assert got == {f"data/gradient_share_{name}": part / 10 for name, part in [("original", 4), ("synthetic", 2), ("branch", 4)]}
    assert diagnostics.gradient_shares([row(TEACHER, 1.0, 3), row(MAIN, 0.0, 3)]) == {}


def test_sequence_lengths():
    rows = [row(MAIN, 1.0, length, prompt=1) for length in (9, 1, 1, 1, 4)] + [row(TEACHER, 0.0, 3)]
    got = diagnostics.sequence_lengths(rows, 2)
    assert [got[f"main_seqlen/{name}"] for name in ("min", "max", "minmax_diff", "mean")] == [9, 12, 3, 10.5]
    assert (got["main_seqlen/balanced_min"], got["main_seqlen/balanced_max"]) == (10, 11)
    assert got["teacher_seqlen/min"] == 0 and got["teacher_seqlen/max"] == 5 and not any(n.startswith("branch") for n in got)


def test_memory():
    got = diagnostics.memory()
    assert 0.01 < got["perf/cpu_memory_used_gb"] < 1000


class Ticking:
    """A clock, and an engine under which it advances by 1 s a response."""

    version = 7

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def generate(self, requests, sampling, on_done=None, feed=None):
        made = [[Completion(as_ids([1] * (4 - j)), np.zeros(4 - j), "stop", 7) for j in range(len(r.seeds))] for r in requests]
        for i, row in enumerate(made):
            for j, completion in enumerate(row):
                self.now += 1.0
                on_done(i, j, completion)
        return made


@dataclasses.dataclass(frozen=True)
class Context:
    engine: Any


def loop(context, prompts, step, purpose):
    done = []
    requests = [Request(p.ids, tuple(range(p.n))) for p in prompts]
    context.engine.generate(requests, None, on_done=lambda i, j, completion: done.append((i, j)))
    assert context.engine.version == 7 and len(done) == sum(p.n for p in prompts)  # the loop still hears of every response
    return []


def prompts(*streams):
    return [group(str(i), 0, 0, locked=[i], node=node, stream=stream).prompt for i, (node, stream) in enumerate(streams)]


def test_seconds_by_kind():
    engine = Ticking()
    clock = diagnostics.Clock(engine)
    timed = clock.timed(loop)
    timed(Context(engine), prompts((None, "main"), (3, "main"), (4, "branch")), 1, "train")
    timed(Context(engine), prompts((9, "branch")), 1, "branches:0")
    timed(Context(engine), prompts((None, "main")), 2, "train/1")
    timed(Context(engine), prompts((None, "main")), 1, "validation")
    got = clock.metrics(1)
    assert [got[f"timing_s/agent_loop/generate_main_chain/{x}"] for x in ("min", "max", "mean")] == [1, 4, 2.5]
    assert [got[f"timing_s/agent_loop/generate_branch_chain/{x}"] for x in ("min", "max", "mean")] == [1, 6, 3.5]
    slowest = {"seconds": 6, "prompt_length": 4, "response_length": 3}
    assert {name.rpartition("/")[2]: value for name, value in got.items() if "/slowest/" in name} == slowest
    assert (got["timing_s/one_stage/main_chain_wall"], got["timing_s/one_stage/synthetic_wall"]) == (2, 4)
    assert (got["timing_s/one_stage/synthetic_count"], got["timing_s/one_stage/buffer_branch_count"]) == (1, 2)
    known = documented()
    assert not [name for name in got if not known.fullmatch(name)]


def test_a_step_is_forgotten_once_it_was_asked_for():
    engine = Ticking()
    clock = diagnostics.Clock(engine)
    clock.timed(loop)(Context(engine), prompts((None, "main")), 2, "train")
    assert clock.metrics(1).get("timing_s/agent_loop/slowest/seconds") is None
    assert clock.metrics(2)["timing_s/agent_loop/slowest/seconds"] == 2
    assert "timing_s/agent_loop/slowest/seconds" not in clock.metrics(2)


@pytest.mark.parametrize(("mean", "dtype", "alert"), [(5e-4, "float32", 0.0), (2e-3, "float32", 1.0), (0.03, "bfloat16", 0.0)])
def test_mismatch(caplog, mean, dtype, alert):
    metrics = {"rollout_mismatch/abs_mean": mean, "rollout_mismatch/abs_max": 0.5, "rollout_mismatch/ratio_outside": 0.25}
    with caplog.at_level(logging.WARNING):
        assert diagnostics.rollout_mismatch(metrics, dtype) == {"rollout_mismatch/alert": alert}
    assert bool(caplog.records) == bool(alert)
    assert not alert or "25.0 % of the ratios" in caplog.text


def test_no_measurement_is_no_alert():
    assert diagnostics.rollout_mismatch({}, "float32") == {}


def test_stale_rollouts_may_differ_more():
    stale = {"rollout_mismatch/abs_mean": 0.1, "rollout_mismatch/staleness": 1}
    assert diagnostics.rollout_mismatch(stale, "float32") == {"rollout_mismatch/alert": 0.0}
