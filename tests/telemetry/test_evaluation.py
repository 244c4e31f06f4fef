"""Estimators against enumeration, closed forms and simulation."""

import itertools
import json
import math

import numpy as np
import pytest

from deepgrpo.telemetry import statistics

RNG = np.random.default_rng(3)


def test_pass_at_k_is_the_mean_over_all_sets_of_k_answers():
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            hits = [any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k)]
            assert statistics.pass_at_k([n], [c], k)[0] == pytest.approx(np.mean(hits), abs=1e-12)


def test_pass_at_k_of_many_answers_and_of_too_few():
    found = statistics.pass_at_k([1024, 1024, 8], [3, 1024, 8], 256)
    assert found[0] == pytest.approx(1 - math.comb(1021, 256) / math.comb(1024, 256), rel=1e-12)
    assert found[1] == 1 and math.isnan(found[2])
    with pytest.raises(ValueError, match="more right answers than answers"):
        statistics.pass_at_k([2], [3], 1)


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
    assert statistics.majority(answers, np.array(rewards), len(answers), RNG) == expected


def test_majority_of_some_is_the_mean_over_sets_of_k():
    answers, rewards = ["a", "a", "b", "c", "", "b", "b"], np.array([1.0, 1, 0, 0, 0, 0, 0])
    exact = np.mean([
        statistics.majority([answers[i] for i in chosen], rewards[list(chosen)], 3, RNG)
        for chosen in itertools.combinations(range(7), 3)
    ])  # fmt: skip
    found = [statistics.majority(answers, rewards, 3, np.random.default_rng(i)) for i in range(40)]
    assert np.mean(found) == pytest.approx(exact, abs=4 * np.std(found) / math.sqrt(40))
    assert math.isnan(statistics.majority(answers, rewards, 8, RNG))


def test_interval_is_near_the_normal_one_and_repeats():
    values = (RNG.random(900) < 0.3).astype(float)
    found = statistics.estimate(values, statistics.generator(0, "x"))
    error = math.sqrt(np.mean(values) * (1 - np.mean(values)) / 899)
    assert found.error == pytest.approx(error, rel=1e-9)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)
    assert statistics.estimate(values, statistics.generator(0, "x")) == found
    fine = RNG.random(50)
    draws = [statistics.bootstrap_means(fine, statistics.generator(*stream)) for stream in ((0, "x"), (1, "x"), (0, "y"))]
    assert not np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])


def test_nothing_right_is_not_certain():
    found = statistics.estimate(np.zeros(30), RNG)
    assert (found.low, found.high) == (0, pytest.approx(1 - 0.025 ** (1 / 30)))
    found = statistics.estimate(np.ones(30), RNG)
    assert (found.low, found.high) == (pytest.approx(0.025 ** (1 / 30)), 1)
    assert statistics.estimate(np.array([np.nan]), RNG) is None
    assert statistics.unweighted_mean([np.zeros(30), np.zeros(10)], RNG).high > 0.1


def test_sampling_error():
    problems = [np.array([0.0, 1, 1, 0]), np.array([1.0, 1]), np.array([0.0, 1, 0])]
    by_hand = math.sqrt((1 / 3) / 4 + 0 + (1 / 3) / 3) / 3
    assert statistics.sampling_error(problems) == pytest.approx(by_hand, rel=1e-12)
    assert math.isnan(statistics.sampling_error([np.array([1.0])]))


def item(name, rewards, reason="stop"):
    texts = ["7" if reward else "8" for reward in rewards]
    return {"id": name, "rewards": rewards, "answers": texts, "finish_reasons": [reason] * len(rewards)}


def test_what_has_no_verdict_is_excluded_and_counted():
    items = [item(str(i), [1.0, 0.0]) for i in range(98)] + [item("98", [None, None], "abort"), item("99", [1.0, None])]
    (found,) = statistics.summarize({"A": items}, {}, 2, 0.0, 0).values()
    assert (found["problems"], found["excluded"], found["no_verdict_answers"]) == (99, 1, 3)
    assert found["scores"]["avg@2"]["mean"] == pytest.approx((98 * 0.5 + 1) / 99)
    assert found["scores"]["pass@2"]["problems"] == 98  # one answer does not tell about two
    assert not found["incomplete"]  # 1 % is, more is not
    assert statistics.summarize({"A": items}, {"A": 1}, 2, 0.0, 0)["A"]["incomplete"]
    (nothing,) = statistics.summarize({"A": [item("0", [None, None])]}, {}, 2, 0.0, 0).values()
    assert nothing["scores"] == {} and nothing["incomplete"]
    json.dumps(nothing, allow_nan=False)


def test_sets_count_alike():
    sets = {"A": [item(str(i), [1.0]) for i in range(30)], "B": [item(str(i), [float(i % 4 == 0)]) for i in range(400)]}
    mean = statistics.summarize(sets, {}, 1, 0.0, 0)["mean"]["scores"]["avg@1"]
    assert mean["mean"] == pytest.approx((1.0 + 0.25) / 2)
    assert mean["error"] == pytest.approx(math.sqrt(0.25 * 0.75 / 399) / 2)
