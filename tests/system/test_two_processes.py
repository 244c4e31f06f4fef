"""The training loop with a learner of two processes: the run of one process, saved, resumed and published by both."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params
from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import read_arrays
from tests.conftest import ROOT

pytestmark = pytest.mark.system

KEYS = {
    **{"curriculum.pool": "none", "rollout.engine": "vllm", "data.train": "carry_chain:train:16", "data.validation_limit": 4},
    **{"data.batch_size": 4, "optim.mini_batch_prompts": 2, "rollout.n": 4, "train.student_tokens": 0, "validation.every": 0},
    **{
        "vllm.python": sys.executable,
        "learner.mesh": "1,2,1",
        "learner.micro_batch_tokens": 896,
        "checkpoint.every": 2,
        "objective.kl_coef": 0.01,
    },
}


def run(folder: pathlib.Path, count: int, fails: str = "", told: int | None = None, **overrides: object) -> None:
    """Runs two devices in `count` processes. fails: what the first one says when all are to end with an error.
    told: the process that gets SIGTERM after two steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = KEYS | {"run_dir": folder, "weights.folder": folder / "weights"} | overrides
    if count > 1:
        keys |= {"learner.coordinator": f"127.0.0.1:{port}"}
    flags = ["--config=configs/carry_chain.py", *(f"--config.{key}={value}" for key, value in keys.items())]
    line = [sys.executable, "tests/system/train_process.py", str(2 // count), *flags]
    started = [
        subprocess.Popen(
            [*line, f"--config.learner.process={index},{count}"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]
    metrics = folder / "carry_chain" / "metrics.jsonl"
    try:
        while told is not None and not (metrics.exists() and len(metrics_lib.read(metrics)) > 1):
            assert all(process.poll() is None for process in started), [process.communicate()[0][-4000:] for process in started]
            time.sleep(0.1)
        if told is not None:
            started[told].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=900)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert (process.returncode != 0) == bool(fails), output[-4000:]
    assert fails in outputs[0]


def test_two_processes_train_save_resume_and_publish_as_one(student, tmp_path):
    run(tmp_path / "one", 1, **{"train.steps": 4})
    run(tmp_path / "two", 2, **{"train.steps": 2})
    run(tmp_path / "two", 2, **{"train.steps": 4})  # from the checkpoint that both wrote
    run(tmp_path / "two", 2, fails="optim.lr", **{"train.steps": 6, "optim.lr": 1.0})  # refused by the first: nobody waits for it
    config = ModelConfig.from_hf(student)
    found = {}
    for name in ("one", "two"):
        folder = tmp_path / name / "carry_chain"
        records = metrics_lib.read(folder)
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        assert all(record["actor/grad_norm"] > 0 and record["perf/recompilations"] == 0 for record in records)
        params = read_arrays(folder / "checkpoints" / "4", abstract_params(config), prefix="params.")
        found[name] = records, params
        published = hf.load(next((tmp_path / name / "weights").glob("*/4")))
        jax.tree.map(lambda a, b, n=config: np.testing.assert_array_equal(a, b[tuple(map(slice, a.shape))]), published, params)
    for ours, theirs in zip(*(records for records, _ in found.values()), strict=True):
        for key in ("actor/grad_norm", "actor/total_loss", "rollout_mismatch/abs_mean", "rollout_mismatch/probe"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-5), key
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), *(params for _, params in found.values()))


def test_a_signal_to_the_second_process_ends_both_after_a_saved_step(student, tmp_path):
    run(tmp_path, 2, told=1, **{"train.steps": 500, "checkpoint.every": 0})
    folder = tmp_path / "carry_chain"
    last = metrics_lib.read(folder)[-1]["step"]
    assert 2 <= last < 500 and (folder / "latest").read_text() == f"{last}\n"
    assert "stopped by a signal" in (folder / "log.txt").read_text()
