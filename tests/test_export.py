"""A checkpoint becomes a Hugging Face folder."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo import export
from deepgrpo.model.config import ModelConfig
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import CheckpointError, Checkpoints
from tests.rollout import tiny


@pytest.fixture
def run(tmp_path):
    """(folder, parameters at the start) of a run of two steps, the first of which validated best."""
    params = tiny.random_params(0)
    hf.save(params, tiny.CONFIG, tmp_path / "model", jnp.float32)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    for step, score in ((1, 0.9), (2, 0.1)):
        checkpoints.note_validation(step, {"val-core/X/reward/mean@1": score})
        trained = jax.tree.map(lambda x: x + step, params)  # noqa: B023
        checkpoints.save(step, {"params": trained, "adam": {"count": jnp.int32(step)}}, {})
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"model.path": str(tmp_path / "model")}}))
    return tmp_path, params


@pytest.mark.parametrize(("arguments", "step"), [([], 2), (["--best"], 1)])
def test_newest_or_best(run, monkeypatch, capsys, arguments, step):
    folder, params = run
    line = [f"--checkpoint={folder / 'run'}", f"--out={folder / 'out'}", "--dtype=float32", *arguments]
    monkeypatch.setattr(sys, "argv", ["export", *line])
    export.main()
    assert f"checkpoints/{step} -> " in capsys.readouterr().out
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + step), hf.load(folder / "out"), params)
    assert (folder / "out" / "tokenizer.json").is_file() and ModelConfig.from_hf(folder / "out") == tiny.CONFIG


def test_one_step_and_what_is_refused(run):
    folder, _ = run
    step = folder / "run" / "checkpoints" / "1"
    assert export.export(step, folder / "out", dtype="bfloat16") == step
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export.export(folder / "model", folder / "other")
    with pytest.raises(CheckpointError, match="is one step already"):
        export.export(step, folder / "other", best=True)
    (step / "host.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="host.json has 3 bytes, expected 2"):
        export.export(folder / "run", folder / "other", best=True)
    (folder / "run" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="name its folder with --model"):
        export.export(folder / "run", folder / "other")
