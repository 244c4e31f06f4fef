"""Group statistics and validation scores, against values worked out by hand."""

import numpy as np
import pytest

from deepgrpo.telemetry import dumps, statistics
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids


def rollout(reward, reason, finish="stop"):
    completion = Completion(as_ids([5, 6, 2]), np.zeros(3, np.float32), finish, version=4)
    return Rollout(completion, Grade(reward, reward is not None, reason, answer="7"))


def group(name, *rollouts, source="task", node=None, index=0):
    problem = Problem(index, source, as_ids([1, 3]), "7", "3+4=?")
    ids = as_ids([1, 3, 9]) if node is not None else problem.prompt_ids
    return Group(Prompt(ids, problem, len(rollouts), name, node), rollouts)


RIGHT, WRONG = rollout(1.0, "right"), rollout(0.0, "wrong")
CUT, LOST = rollout(0.0, "truncated", "length"), rollout(None, "timeout")


def decode(ids):
    return " ".join(map(str, ids))


def test_group_statistics():
    groups = [group("a", RIGHT, RIGHT), group("b", WRONG, CUT, LOST), group("c", RIGHT, CUT, node=(1, 2)), group("d", LOST)]
    got = statistics.group_statistics(groups, threshold=0.0)
    assert got["rewards/reason_right"] == 3 and got["rewards/reason_truncated"] == 2 and got["rewards/reason_timeout"] == 2
    assert got["rewards/no_verdict_share"] == 2 / 8
    assert got["rewards/truncated_negative_share"] == 2 / 3
    assert got["data/main_chain/groups"] == 3  # d has no verdict at all
    assert got["data/main_chain_original/groups_all_right_share"] == 0.5
    assert got["data/main_chain_original/groups_all_wrong_share"] == 0.5
    assert got["data/main_chain_synthetic/groups_mixed_share"] == 1.0
    assert got["data/main_chain/success_rate"] == 3 / 6


def test_dumps(tmp_path):
    records = dumps.rollout_records([group("c", CUT, LOST, node=(1, 2), index=3)], step=5, decode=decode)
    dumps.write(tmp_path / "rollouts" / "5.jsonl", records)
    first, second = dumps.read(tmp_path / "rollouts" / "5.jsonl")
    assert [*first] == [*records[0]] and first["input"] == "1 3 9" and first["output"] == "5 6 2" and first["task_id"] == 3
    assert (
        first["locked_length"] == 1 and first["locked_text"] == "9" and first["node"] == "(1, 2)" and first["weight_version"] == 4
    )
    assert (first["finished"], second["finished"]) == (False, True) and second["score"] is None


def scores(groups):
    return statistics.validation_metrics(dumps.validation_records(groups, step=1, decode=decode))


def test_one_answer_each_over_two_sources():
    groups = [
        group("a", RIGHT, source="org/math"),
        group("b", WRONG, source="org/math"),  # the same question as a: still a problem of its own
        group("c", RIGHT, source="aime"),
        group("d", LOST, source="aime", index=1),
    ]
    got = scores(groups)
    assert got["val-core/org/math/reward/mean@1"] == 0.5 and got["val-core/aime/reward/mean@1"] == 1.0
    assert got["val-core/avg/reward/mean@1"] == 0.75
    assert got["val-aux/avg/finished/mean@1"] == 1.0 and got["val-aux/aime/no_verdict_share"] == 0.5
    assert not [key for key in got if key.startswith("val-core/") and not key.endswith("mean@1")]


def test_one_source_has_no_average():
    assert not [key for key in scores([group("a", RIGHT), group("b", WRONG)]) if "/avg/" in key]


def test_several_answers():
    rng = np.random.default_rng(1)
    problems = [rng.random(8) < p for p in (0.1, 0.5, 0.9)]
    groups = [group(str(i), *(RIGHT if r else WRONG for r in p)) for i, p in enumerate(problems)]
    before = np.random.get_state()[1].copy()
    got = scores(groups)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # the global generator is untouched
    assert got["val-core/task/reward/mean@8"] == pytest.approx(np.mean(problems))
    assert got["val-aux/task/reward/std@8"] == pytest.approx(np.mean([p.std() for p in problems]))
    for n, section in ((2, "val-aux"), (4, "val-aux"), (8, "val-core")):
        # Best of n draws with replacement from a problem with success rate p is right with probability 1 - (1 - p)**n.
        expected = np.mean([1 - (1 - p.mean()) ** n for p in problems])
        assert got[f"{section}/task/reward/best@{n}/mean"] == pytest.approx(expected, abs=0.03)
    expected = np.mean([p.mean() ** 4 for p in problems])
    assert got["val-aux/task/reward/worst@4/mean"] == pytest.approx(expected, abs=0.03)
    assert scores(groups) == got


def test_the_average_keeps_its_name():
    with pytest.raises(ValueError, match="avg"):
        scores([group("a", RIGHT, source="avg")])
