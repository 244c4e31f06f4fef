"""A disagreement of engine and learner is said aloud."""

import logging

import pytest

from deepgrpo.telemetry import alerts


@pytest.mark.parametrize(
    ("mean", "threshold", "dtype", "alert"),
    [
        (5e-4, 0.0, "float32", 0.0),
        (2e-3, 0.0, "float32", 1.0),
        (0.03, 0.0, "bfloat16", 0.0),
        (2e-3, 0.0, "", 1.0),
        (0.03, 0.01, "bfloat16", 1.0),
    ],
)
def test_mismatch(caplog, mean, threshold, dtype, alert):
    metrics = {"rollout_mismatch/abs_mean": mean, "rollout_mismatch/abs_max": 0.5, "rollout_mismatch/ratio_outside": 0.25}
    with caplog.at_level(logging.WARNING):
        assert alerts.rollout_mismatch(metrics, threshold, "float32", dtype) == {"rollout_mismatch/alert": alert}
    assert bool(caplog.records) == bool(alert)
    assert not alert or "25.0 % of the ratios" in caplog.text


def test_no_measurement_is_no_alert():
    assert alerts.rollout_mismatch({}, 0.0, "float32") == {}


def test_stale_rollouts_may_differ_more():
    stale = {"rollout_mismatch/abs_mean": 0.1, "rollout_mismatch/staleness": 1}
    assert alerts.rollout_mismatch(stale, 0.0, "float32") == {"rollout_mismatch/alert": 0.0}
