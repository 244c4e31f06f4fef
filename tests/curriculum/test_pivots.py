"""Segments, the places between them, the model of their worth, and draws among them."""

import itertools
import json
import types

import numpy as np
import pytest

from deepgrpo.curriculum.pivots import Partition, Pivot, PivotModel, candidates, fit_logistic, full_stop_id
from deepgrpo.types import as_ids
from tests.conftest import golden_cases
from tests.curriculum.replay import DRAWS, TOLERANCE, inclusion

METHODS = {"sentence": "sp", "token_count": "tp", "fixed_count": "fp"}


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"partition"}))
def test_golden_partition(case):
    inputs = dict(case["inputs"])
    keys = {"tokens_per_segment": "tokens_per_node", "n_segments": "n_segments", "stop_token_ids": "stop_ids"}
    sizes = {ours: inputs[theirs] for theirs, ours in keys.items() if theirs in inputs}
    cut = Partition(METHODS[inputs["method"]], **sizes)
    assert [list(segment) for segment in cut.segments(as_ids(inputs["response_ids"]))] == case["expected"]["segments"]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 24])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_segments_cover_the_response_without_gaps(n, size):
    ids = as_ids(np.random.default_rng(n).integers(0, 3, n))
    for method in METHODS.values():
        segments = Partition(method, size, size, (1,)).segments(ids)
        assert segments[0][0] == 0 and segments[-1][1] == n
        assert all(end == start for (_, end), (start, _) in zip(segments, segments[1:], strict=False))
        assert all(end > start for start, end in segments) or segments == [(0, 0)]
        lengths = [end - start for start, end in segments]
        if method == "fp":
            assert len(segments) == max(1, min(size, n)) and max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)


def test_the_full_stop_is_the_one_without_white_space():
    tokenizer = types.SimpleNamespace(get_vocab=lambda: {"▁.": 0, ".": 1, ".Ċ": 2})
    assert full_stop_id(tokenizer) == 1
    with pytest.raises(ValueError, match="segment_method=tp or fp"):
        full_stop_id(types.SimpleNamespace(get_vocab=lambda: {"a": 0, ".Ċ": 1}))


def chain(inputs):
    ends = list(itertools.accumulate(inputs["segment_lengths"]))
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"expandable"}))
def test_golden_candidates(case):
    inputs = case["inputs"]
    open_end = inputs.get("last_finish") == "STOP"
    found = candidates(inputs["prompt_len"], chain(inputs), inputs["max_model_len"], open_end=open_end)
    assert [pivot.index for pivot in found] == case["expected"]["candidate_indices"]


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"utility_sampling"}))
def test_golden_utility(case):
    inputs, expected, tolerance = case["inputs"], case["expected"], case["tolerance"]
    model = PivotModel(gamma=inputs["position_bias"], model=inputs["prob_model_type"], window=inputs["window_size"])
    for row in inputs["feedback"]:
        model.observe(Pivot(row["index"], row["total"], 0).ratio, row["success"])
    model.refit()
    found = candidates(inputs["prompt_len"], chain(inputs), inputs["max_model_len"])
    assert [pivot.index for pivot in found] == expected["candidate_indices"]
    np.testing.assert_allclose(
        probabilities(model, found), expected["probabilities"], atol=tolerance["atol"], rtol=tolerance["rtol"]
    )
    state, metrics = model.state(), model.metrics()
    assert state["ratios"] == pytest.approx(expected["buffer_ratios"]) and state["labels"] == expected["buffer_labels"]
    assert metrics["branching/labels"] == expected["buffer_size"]
    if inputs["prob_model_type"] == "logistic":
        assert metrics["branching/fitted"] == expected["fitted"]
    for name in ("weight", "bias"):
        if name in expected:  # the exact optimum of the regularised objective
            assert metrics[f"branching/{name}"] == pytest.approx(expected[name], abs=1e-6)
    chosen = model.choose(found, inputs["n_points"], np.random.default_rng(0))
    assert len(chosen) == len(set(chosen)) == expected["n_selected"]


def test_root_can_be_left_out():
    segments = [(0, 4), (4, 8), (8, 9)]
    assert [pivot.index for pivot in candidates(3, segments, 100, min_index=1)] == [1, 2]
    assert candidates(3, segments, 100)[2] == Pivot(2, 4, 8) and Pivot(2, 4, 8).ratio == 0.75
    assert [pivot.index for pivot in candidates(3, segments, 7)] == [0]  # no room after the first segment
    assert candidates(3, [(0, 0)], 100, min_index=1) == []


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_fit_is_the_minimum(rate):
    """The gradient of the objective, written from the formula, vanishes there."""
    random = np.random.default_rng(5)
    ratios, labels = random.random(3000), random.random(3000) < rate
    weight, bias = fit_logistic(ratios, labels)
    signs = np.where(labels, 1.0, -1.0)
    pull = -signs / (1.0 + np.exp(signs * (weight * ratios + bias)))
    assert weight + (pull * ratios).sum() == pytest.approx(0, abs=1e-8) and pull.sum() == pytest.approx(0, abs=1e-8)


def probabilities(model, pivots) -> np.ndarray:
    """Of each pivot to be the first that is drawn, float64[N]."""
    weights = model.log_weights(pivots)
    weights = np.exp(weights - weights.max(initial=-np.inf))
    return weights / weights.sum()


def fed(labels, **options) -> PivotModel:
    model = PivotModel(**options)
    for i, label in enumerate(labels):
        model.observe((i + 1) / (len(labels) + 1), label)
    model.refit()
    return model


def test_a_fit_outlives_the_class_that_leaves_the_window_and_a_restart():
    model = fed([True, False] * 6, window=12)
    fit = model.state()["fit"]
    assert fit is not None
    for _ in range(12):
        model.observe(0.5, False)
    model.refit()
    assert model.state()["fit"] == fit and model.metrics()["branching/success_rate"] == 0
    again = PivotModel(window=12)
    again.restore(json.loads(json.dumps(model.state())))
    pivots = [Pivot(i, 6, i) for i in range(5)]
    assert again.state() == model.state() and again.metrics() == model.metrics()
    np.testing.assert_array_equal(again.log_weights(pivots), model.log_weights(pivots))


def test_draws_are_successive_draws_by_weight():
    pivots = [Pivot(i, 5, i) for i in range(4)]
    for model in (fed([True, False] * 8), PivotModel("random"), PivotModel(gamma=-3.0)):
        weights = probabilities(model, pivots).tolist()
        random = np.random.default_rng(1)
        draws = [model.choose(pivots, 2, random) for _ in range(DRAWS)]
        counts = [sum(pivot in draw for draw in draws) / DRAWS for pivot in pivots]
        np.testing.assert_allclose(counts, inclusion(weights, 2), atol=TOLERANCE)
    assert probabilities(PivotModel("random"), pivots).tolist() == [0.25] * 4


def test_extreme_exponents_stay_finite():
    """rho^gamma itself leaves float64 here."""
    pivots = [Pivot(i, 1000, i) for i in range(999)]
    deepest = PivotModel(gamma=4000.0)
    assert probabilities(deepest, pivots)[-1] > 0.98 and len(set(deepest.choose(pivots, 9, np.random.default_rng(0)))) == 9
    assert deepest.choose([], 3, np.random.default_rng(0)) == []
