"""Estimators and paired comparison against enumeration, closed forms and simulation."""

import itertools
import json
import math

import numpy as np
import pytest

from deepgrpo.telemetry import compare, evaluation

RNG = np.random.default_rng(3)


def test_pass_at_k_is_the_mean_over_all_sets_of_k_answers():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            hits = [any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k)]
            assert evaluation.pass_at_k([n], [c], k)[0] == pytest.approx(np.mean(hits), abs=1e-12)


def test_pass_at_k_of_many_answers_and_of_too_few():
    found = evaluation.pass_at_k([1024, 1024, 8], [3, 1024, 8], 256)
    assert found[0] == pytest.approx(1 - math.comb(1021, 256) / math.comb(1024, 256), rel=1e-12)
    assert found[1] == 1 and math.isnan(found[2])
    with pytest.raises(ValueError, match="more right answers than answers"):
        evaluation.pass_at_k([2], [3], 1)


@pytest.mark.parametrize(
    "answers, rewards, expected",
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["7", " 7 ", "8", "8", "8"], [1, 1, 0, 0, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),  # a tie: either is as likely
        (["7", "8", "9", "9", "7"], [1, 0, 0, 0, 1], 0.5),
        (["1 /  2", "1 / 2", "3"], [1, 1, 0], 1.0),  # white space folds
        (["", "", "", "7"], [0, 0, 0, 1], 1.0),  # what was not extracted does not vote
        (["", ""], [0, 0], 0.0),
    ],
)
def test_majority_of_all(answers, rewards, expected):
    assert evaluation.majority(answers, np.array(rewards), len(answers), RNG) == expected


def test_majority_of_some_is_the_mean_over_sets_of_k():
    answers, rewards = ["a", "a", "b", "c", "", "b", "b"], np.array([1.0, 1, 0, 0, 0, 0, 0])
    exact = np.mean([
        evaluation.majority([answers[i] for i in chosen], rewards[list(chosen)], 3, RNG)
        for chosen in itertools.combinations(range(7), 3)
    ])  # fmt: skip
    found = [evaluation.majority(answers, rewards, 3, np.random.default_rng(i)) for i in range(40)]
    assert np.mean(found) == pytest.approx(exact, abs=4 * np.std(found) / math.sqrt(40))
    assert math.isnan(evaluation.majority(answers, rewards, 8, RNG))


def test_interval_is_near_the_normal_one_and_repeats():
    values = (RNG.random(900) < 0.3).astype(float)
    found = evaluation.estimate(values, evaluation.generator(0, "x"))
    error = math.sqrt(np.mean(values) * (1 - np.mean(values)) / 899)
    assert found.error == pytest.approx(error, rel=1e-9)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)
    assert evaluation.estimate(values, evaluation.generator(0, "x")) == found
    fine = RNG.random(50)
    draws = [evaluation.bootstrap_means(fine, evaluation.generator(*stream)) for stream in ((0, "x"), (1, "x"), (0, "y"))]
    assert not np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])


def test_nothing_right_is_not_certain():
    found = evaluation.estimate(np.zeros(30), RNG)
    assert (found.low, found.high) == (0, pytest.approx(1 - 0.025 ** (1 / 30)))
    found = evaluation.estimate(np.ones(30), RNG)
    assert (found.low, found.high) == (pytest.approx(0.025 ** (1 / 30)), 1)
    assert evaluation.estimate(np.array([np.nan]), RNG) is None
    assert evaluation.unweighted_mean([np.zeros(30), np.zeros(10)], RNG).high > 0.1


def test_sampling_error():
    problems = [np.array([0.0, 1, 1, 0]), np.array([1.0, 1]), np.array([0.0, 1, 0])]
    by_hand = math.sqrt((1 / 3) / 4 + 0 + (1 / 3) / 3) / 3
    assert evaluation.sampling_error(problems) == pytest.approx(by_hand, rel=1e-12)
    assert math.isnan(evaluation.sampling_error([np.array([1.0])]))


def item(name, rewards, reason="stop"):
    texts = ["7" if reward else "8" for reward in rewards]
    return {"id": name, "rewards": rewards, "answers": texts, "finish_reasons": [reason] * len(rewards)}


def test_what_has_no_verdict_is_excluded_and_counted():
    items = [item(str(i), [1.0, 0.0]) for i in range(98)] + [item("98", [None, None], "abort"), item("99", [1.0, None])]
    (found,) = evaluation.summarize({"A": items}, {}, 2, 0.0, 0).values()
    assert (found["problems"], found["excluded"], found["no_verdict_answers"]) == (99, 1, 3)
    assert found["scores"]["avg@2"]["mean"] == pytest.approx((98 * 0.5 + 1) / 99)
    assert found["scores"]["pass@2"]["problems"] == 98  # one answer does not tell about two
    assert not found["incomplete"]  # 1 % is, more is not
    assert evaluation.summarize({"A": items}, {"A": 1}, 2, 0.0, 0)["A"]["incomplete"]
    (nothing,) = evaluation.summarize({"A": [item("0", [None, None])]}, {}, 2, 0.0, 0).values()
    assert nothing["scores"] == {} and nothing["incomplete"]
    json.dumps(nothing, allow_nan=False)


def test_sets_count_alike():
    sets = {"A": [item(str(i), [1.0]) for i in range(30)], "B": [item(str(i), [float(i % 4 == 0)]) for i in range(400)]}
    mean = evaluation.summarize(sets, {}, 1, 0.0, 0)["mean"]["scores"]["avg@1"]
    assert mean["mean"] == pytest.approx((1.0 + 0.25) / 2)
    assert mean["error"] == pytest.approx(math.sqrt(0.25 * 0.75 / 399) / 2)


#### Comparison


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
    assert (row["wins"], row["losses"], row["ties"]) == (gained, 0, 400 - gained) and row["p_sign"] < 0.001
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
