"""Recoverability: a fixed subset, branches at every place of failed answers alone, and what the records come to."""

import pytest

from deepgrpo.curriculum.pivots import Partition
from deepgrpo.telemetry import recoverability
from deepgrpo.types import Group
from tests.telemetry.made import problem, rollouts
from tests.telemetry.test_documented import documented

PARTITION = Partition("tp", tokens_per_node=2)


def roll(asked):
    """A sampler: problem 1 is right, 2 has no verdict; a branch succeeds once it keeps two tokens of the answer."""

    def run(prompts, purpose):
        asked.append((purpose, [(p.group_id, p.ids.tolist(), p.n) for p in prompts]))
        if purpose == "recoverability":
            rewards = {1: 1.0, 2: None}
            return [Group(p, rollouts([rewards.get(p.problem.index, 0.0)], length=5)) for p in prompts]
        return [Group(p, rollouts([0.0, float(p.locked >= 2), None])) for p in prompts]

    return run


def evaluate(problems, asked):
    settings = {"branches": 3, "threshold": 0.0, "max_model_len": 100}
    return list(recoverability.evaluate(problems, roll(asked), PARTITION, **settings))


def test_every_place_of_failed_answers():
    asked = []
    records = evaluate([problem(i) for i in range(4)], asked)
    assert [purpose for purpose, _ in asked] == ["recoverability", "recoverability:branches:0"]
    assert all(n == 1 for _, _, n in asked[0][1]) and all(n == 3 for _, _, n in asked[1][1])
    # Five tokens in windows of two: root, 2, 2, 1; the last one is no place.
    assert [ids for _, ids, _ in asked[1][1]][:3] == [[1, 2, 0], [1, 2, 0, 10, 11], [1, 2, 0, 10, 11, 12, 13]]
    assert [(r["task_id"], r["position_index"]) for r in records] == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2)]
    assert len({r["uid"] for r in records}) == 2
    second = records[1]
    assert (second["chain_length"], second["position_ratio"]) == (4, 0.5)
    assert (second["n_branches"], second["n_success"], second["recoverability"]) == (2, 1, 1.0)
    assert second["mean_branch_reward"] == 0.5 and second["main_chain_reward"] == 0.0
    assert records[0]["recoverability"] == 0.0


def test_metrics():
    got, known = recoverability.metrics(evaluate([problem(0), problem(3)], [])), documented()
    assert got["recoverability/answers"] == 2 and got["recoverability/positions"] == 6
    assert got["recoverability/recovered_share"] == pytest.approx(4 / 6)
    assert got["recoverability/success_rate"] == pytest.approx(4 / 12)
    assert got["recoverability/recovered_answers_share"] == 1 and got["recoverability/last_recoverable_ratio"] == 0.75
    assert not [name for name in got if not known.fullmatch(name)]
    assert recoverability.metrics([]) == {"recoverability/answers": 0, "recoverability/positions": 0}


def test_more_failures_than_a_chunk(monkeypatch):
    monkeypatch.setattr(recoverability, "CHUNK", 2)
    asked = []
    problems = [problem(i) for i in (0, 3, 4, 5, 6)]
    assert len(evaluate(problems, asked)) == 15
    purposes = [purpose for purpose, _ in asked]
    assert len(set(purposes)) == len(purposes) == 4  # no two of them share their seeds


def test_subset_is_fixed():
    problems = [problem(i) for i in range(50)]
    chosen = [p.index for p in recoverability.subset(problems, 8)]
    assert chosen == [p.index for p in recoverability.subset(problems, 20)][:8] and len(set(chosen)) == 8
    assert chosen != sorted(chosen) and len(recoverability.subset(problems, 99)) == 50
