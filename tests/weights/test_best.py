"""The best checkpoint and retention, through the class that training uses."""

import json

import numpy as np
import pytest

from deepgrpo.weights.checkpoint import Best, Checkpoints, better, deciding_metric
from tests.conftest import golden_cases

ARRAYS = {"params": {"w": np.ones(3, np.float32)}}


def replay(folder, validations: list[dict], save_freq: int, keep: int) -> tuple[list[dict], list[int]]:
    """Validation precedes the periodic save, as in the training loop. Returns what is on disk after each, and the saves."""
    checkpoints, saves, history = Checkpoints(folder / "checkpoints", keep), [], []
    for validation in validations:
        step = validation["step"]
        if checkpoints.note_validation(step, validation["metrics"]) or step % save_freq == 0:
            checkpoints.save(step, ARRAYS, {"step": step})
            saves.append(step)
        best = json.loads((folder / "best_checkpoint.json").read_text()) if checkpoints.best else None
        latest = int((folder / "latest").read_text()) if saves else None
        history.append({"step": step, "on_disk": checkpoints.steps(), "best": best, "latest": latest})
    return history, saves


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"best_checkpoint"}))
def test_golden(tmp_path, case):
    inputs, expected = case["inputs"], case["expected"]
    history, saves = replay(tmp_path, inputs["validations"], inputs["save_freq"], inputs["max_to_keep"])
    assert saves == expected["saves"]
    for found, wanted in zip(history, expected["history"], strict=True):
        if wanted["best"] is not None:
            assert found["best"].pop("score") == pytest.approx(wanted["best"].pop("score"), abs=1e-9)
        assert found == wanted


def test_a_dethroned_best_goes_and_an_equal_score_does_not_dethrone(tmp_path):
    scores = {1: 0.2, 2: 0.5, 3: 0.5, 4: 0.1, 5: 0.6, 6: 0.0}
    validations = [{"step": step, "metrics": {"val-core/X/reward/mean@1": score}} for step, score in scores.items()]
    history, _ = replay(tmp_path, validations, save_freq=1, keep=1)
    assert [entry["on_disk"] for entry in history] == [[1], [2], [2, 3], [2, 4], [5], [5, 6]]


@pytest.mark.parametrize(
    "keys, configured, chosen",
    [
        (["val-core/A/reward/mean@1"], "", "val-core/A/reward/mean@1"),
        (["val-core/A/reward/best@4/mean"], "", "val-core/A/reward/best@4/mean"),
        (["val-core/A/reward/mean@4", "val-core/A/reward/best@4/mean"], "", "val-core/A/reward/mean@4"),
        (["val-core/A/r/mean@1", "val-core/B/r/mean@1", "val-core/avg/r/mean@1"], "", "val-core/avg/r/mean@1"),
        (["val-core/A/r/mean@1", "val-core/B/r/mean@1"], "val-core/B/r/mean@1", "val-core/B/r/mean@1"),
        (["val-core/A/r/mean@1", "val-core/B/r/mean@1"], "", None),
        (["val-aux/A/r/mean@1", "critic/score/mean"], "", None),
        (["val-core/A/r/mean@1"], "val-core/C/r/mean@1", None),
    ],
)
def test_which_metric_decides(keys, configured, chosen):
    metrics = dict.fromkeys(keys, 0.5)
    if chosen is None:
        with pytest.raises(LookupError, match="best_metric"):
            deciding_metric(metrics, configured)
    else:
        assert deciding_metric(metrics, configured) == chosen


def test_validations_that_do_not_compete(caplog, tmp_path):
    metric = "val-core/X/reward/mean@1"
    checkpoints = Checkpoints(tmp_path, 1)
    assert not checkpoints.note_validation(0, {metric: 0.9})  # before the first step
    assert not checkpoints.note_validation(1, {"critic/score/mean": 0.9})  # no validation at this step
    assert not caplog.records
    assert not checkpoints.note_validation(1, {metric: 0.9, "val-core/Y/reward/mean@1": 0.9})
    assert not checkpoints.note_validation(2, {metric: float("nan")})
    assert ["step 1 does not compete" in caplog.messages[0], "is NaN" in caplog.messages[1]] == [True, True]
    assert checkpoints.note_validation(3, {metric: -1.0}) and checkpoints.best == Best(3, -1.0, metric)
    assert better({metric: -1.0}, 4, checkpoints.best, "") is None
