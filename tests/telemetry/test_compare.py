"""Paired comparison of two arms against enumeration, closed forms and simulation; results that cannot be read."""

import itertools
import json
import math

import numpy as np
import pytest

from deepgrpo.data.cells import DataError
from deepgrpo.telemetry import compare, evaluation


def result(rewards: dict[str, list], seed=0, weights="w", **changes):
    protocol = dict.fromkeys((*compare.PROTOCOL, *compare.TOLD), 1) | {
        "sets": {name: {"problems": len(rows), "digest": name} for name, rows in rewards.items()},
        "temperature": 1.0,
    }
    items = {name: [{"id": str(i), "rewards": row} for i, row in enumerate(rows)] for name, rows in rewards.items()}
    return {
        "protocol": protocol | changes, "seed": seed, "model": {"weights": weights}, "items": items,
        "selection": {"label": ""}, "scores": {name: {"incomplete": False} for name in rewards},
    }  # fmt: skip


def against(one, other, **options):
    names = ([f"a{i}" for i in range(len(one))], [f"b{i}" for i in range(len(other))])
    return compare.compare(one, other, names, **options)


def test_sign_test_is_mcnemars_exact_one():
    for wins, losses in itertools.product(range(6), range(6)):
        n = wins + losses
        outcomes = [sum(bits) for bits in itertools.product((0, 1), repeat=n)]
        extreme = np.mean([abs(k - n / 2) >= abs(wins - n / 2) for k in outcomes])
        assert compare.sign_test(wins, losses) == pytest.approx(extreme, abs=1e-12)


def test_permutation_test_is_of_the_difference_that_is_shown():
    sign = compare.permutation_test([np.zeros((1, 9))], [np.array([[1.0] * 6 + [-1.0] * 2 + [0.0]])], 0)
    assert sign == compare.sign_test(6, 2)  # one set, right or wrong
    rng = np.random.default_rng(0)
    one, other = [rng.random((2, n)) for n in (3, 5)], [rng.random((3, n)) for n in (3, 5)]
    moved = np.concatenate([(b.mean(0) - a.mean(0)) / a.shape[1] for a, b in zip(one, other, strict=True)])
    sums = [sum(signs * moved) for signs in itertools.product((1, -1), repeat=8)]
    tail = np.mean([value >= abs(sum(moved)) - 1e-12 for value in sums])
    assert compare.permutation_test(one, other, 0) == pytest.approx(min(1.0, 2 * tail), abs=1e-12)


def test_the_mean_of_sets_and_its_test_never_point_apart():
    """Ten problems won in a small set outweigh fifty lost in a large one, which as one list would be a loss."""
    small = ([[0.0]] * 30, [[1.0]] * 10 + [[0.0]] * 20)
    large = ([[1.0]] * 50 + [[0.0]] * 450, [[0.0]] * 500)
    found = against(*([result({"A": a, "B": b}, weights=name)] for name, a, b in zip("vw", small, large, strict=True)))
    mean = found["mean"]
    assert mean["difference"] == pytest.approx((10 / 30 - 50 / 500) / 2) and mean["low"] > 0
    assert mean["p"] < 0.05 and mean["wins"] == 10 and mean["losses"] == 50
    assert "one seed an arm" in " ".join(found["notes"])


def test_seeds_needed_has_the_power_that_it_promises():
    # (1.959964 + 0.841621)^2 * 2 / 0.5^2 = 62.79
    assert compare.seeds_needed(0.5, (1.0, 1.0)) == 63 and compare.seeds_needed(-0.5, (1.0, 1.0)) == 63
    assert compare.seeds_needed(0.0, (1.0, 1.0)) is None and compare.seeds_needed(1.0, (0.0, 0.0)) == 1
    S, rng = compare.seeds_needed(0.4, (1.0, 0.5)), np.random.default_rng(5)
    gaps = rng.normal(0.4, math.sqrt(0.5), (4000, S)).mean(axis=1) - rng.normal(0.0, 1.0, (4000, S)).mean(axis=1)
    assert np.mean(np.abs(gaps) / math.sqrt(1.5 / S) > 1.959964) == pytest.approx(0.8, abs=0.02)


def test_wins_losses_ties_and_a_paired_interval():
    rng = np.random.default_rng(1)
    base = rng.random(400) < 0.5
    better = np.where(rng.random(400) < 0.1, True, base)  # the same but for a few problems
    found = against([result({"A": [[float(x)] for x in base]})], [result({"A": [[float(x)] for x in better]}, weights="v")])
    row = found["sets"]["A"]
    gained = int((better & ~base).sum())
    assert (row["wins"], row["losses"], row["ties"]) == (gained, 0, 400 - gained) and row["p"] < 0.001
    d = gained / 400
    error = math.sqrt(d * (1 - d) / 400)  # an unpaired one would be 5 times as wide
    assert row["difference"] == pytest.approx(d)
    assert (row["low"], row["high"]) == (
        pytest.approx(d - 1.96 * error, abs=error / 4),
        pytest.approx(d + 1.96 * error, abs=error / 4),
    )
    assert "more_seeds" not in row  # one seed an arm says nothing about seeds


def test_seeds_widen_the_interval_and_are_counted():
    rng = np.random.default_rng(2)
    arms = [[result({"A": (rng.random((300, 1)) < p).astype(float).tolist()}, weights=f"{p}") for p in ps]
            for ps in ((0.4, 0.5, 0.6), (0.45, 0.55, 0.65))]  # fmt: skip
    row = against(*arms)["sets"]["A"]
    scores = [[np.mean(r["items"]["A"][i]["rewards"][0]) for i in range(300)] for arm in arms for r in arm]
    variances = [np.var([np.mean(s) for s in scores[i : i + 3]], ddof=1) for i in (0, 3)]
    assert row["seed_error"] == pytest.approx(math.sqrt(sum(variances) / 3))
    assert row["more_seeds"] == max(0, compare.seeds_needed(row["difference"], variances) - 3)
    assert "3 seeds an arm: so few understate" in " ".join(against(*arms)["notes"])
    assert row["low"] < 0 < row["high"] and row["high"] - row["low"] > 2 * 1.96 * 0.03


def test_other_protocols_are_refused_unless_forced():
    one, other = result({"A": [[1.0], [0.0]]}), result({"A": [[1.0], [1.0]]}, weights="v", template="r1", engine="vllm")
    with pytest.raises(compare.NotComparable, match="template: 1 in a0, 'r1' in b0"):
        against([one], [other])
    found = against([one], [other], force=True)
    assert found["sets"]["A"]["difference"] == 0.5
    assert [note for note in found["notes"] if "not alike: template" in note] and [
        n for n in found["notes"] if n.startswith("engine")
    ]
    with pytest.raises(compare.NotComparable, match="no problem in common"):
        against([one], [result({"B": [[1.0]]})], force=True)
    with pytest.raises(compare.NotComparable, match="count as one"):
        against([one, result({"A": [[1.0], [0.0]]})], [result({"A": [[1.0], [1.0]]}, weights="v")])
    lost = against([one], [result({"A": [[1.0], [None]]}, weights="v")])
    assert lost["sets"]["A"]["problems"] == 1 and "1 problems have no verdict" in " ".join(lost["notes"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"protocol": {', "result.json is not JSON"),
        ("[]", "result.json holds a list"),
        ("", "result.json is empty"),
        ('{"protocol": {"sets": 1}}', "protocol.template must be given"),
        (json.dumps(result({"A": [["1"]]})), "items.A[0].rewards[0] must be a finite number, got text"),
        (json.dumps(result({"A": [[math.nan]]})), "items.A[0].rewards[0] must be a finite number, got the number nan"),
    ],
)
def test_a_result_that_cannot_be_read_is_named(tmp_path, text, said):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(DataError) as error:
        compare.read_arm(str(tmp_path))
    assert said in str(error.value)


def test_a_torn_line_of_answers_costs_its_own_chunk(tmp_path):
    entries = {name: [{"id": f"{name}{i}"} for i in range(2)] for name in "ab"}
    log = evaluation.AnswerLog(tmp_path, {"protocol": {"sets": {}}})
    for name, its in entries.items():
        log.append(name, its)
    path = tmp_path / evaluation.ANSWERS
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:-5] + b"\xff", *lines[2:]]))
    assert list(evaluation.AnswerLog(tmp_path, {"protocol": {"sets": {}}}).chunks) == ["b"]
