"""Arms, intervals and the picture."""

import sys

import numpy as np
import pytest

from deepgrpo.telemetry import plot
from deepgrpo.telemetry.metrics import Metrics


def run(folder, name, scores, tokens=100):
    out = Metrics(folder / name, tensorboard=False)
    out.write(0, {"val-core/task/reward/mean@1": scores[0]})
    for step, score in enumerate(scores[1:], 1):
        out.write(step, {"training/student_tokens": step * tokens, "val-core/task/reward/mean@1": score})
    out.close()
    return folder / name


def test_arms_and_curves(tmp_path):
    runs = [
        run(tmp_path, "forest-s0", [0.0, 0.2, 0.4]),
        run(tmp_path, "forest-s1", [0.0, 0.4, 0.8]),
        run(tmp_path, "plain-s0", [0, 0]),
    ]
    arms = plot.arms_of([plot.read_curve(path, "") for path in runs])
    assert {name: len(curves) for name, curves in arms.items()} == {"forest": 2, "plain": 1}
    tokens, scores = plot.arm_curve(arms["forest"])
    assert (tokens[0], tokens[-1]) == (0.0, 200.0)
    np.testing.assert_allclose(scores.mean(axis=0)[-1], 0.6)
    assert plot.with_interval(np.array([0.5])) == "0.500"


def test_interval_is_that_of_the_mean():
    values = np.random.default_rng(0).normal(size=(30, 2))
    low, high = plot.bootstrap_interval(values)
    half = 1.96 * values.std(axis=0) / np.sqrt(30)
    np.testing.assert_allclose((high - low) / 2, half, rtol=0.1)
    assert np.all((low < values.mean(axis=0)) & (values.mean(axis=0) < high))


def test_command(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    runs = [run(tmp_path, f"{arm}-s{seed}", [0.0, seed / 10]) for arm in ("forest", "plain") for seed in (1, 2)]
    out = tmp_path / "new" / "demo.png"
    monkeypatch.setattr(sys, "argv", ["plot", *map(str, runs), "--out", str(out)])
    plot.main()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "0.150 [0.100, 0.200]" in capsys.readouterr().out


def test_what_is_no_run(tmp_path):
    with pytest.raises(SystemExit, match="no run folder"):
        plot.read_curve(tmp_path, "")
    with pytest.raises(SystemExit, match="it has: val-core/task/reward/mean@1"):
        plot.read_curve(run(tmp_path, "a", [0.0, 1.0]), "val-core/other")
