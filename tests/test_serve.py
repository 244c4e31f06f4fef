"""Serving for a training elsewhere, with a fake vLLM."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import jax.numpy as jnp
import pytest

from deepgrpo.rollout.vllm_server import VllmServer
from deepgrpo.weights import hf
from tests.conftest import ROOT
from tests.data import small_tokenizer
from tests.rollout import fake_vllm_process, tiny
from tests.rollout.test_vllm_server import descendants, wait_gone

MODEL = dataclasses.replace(
    tiny.CONFIG, vocab_size=272, max_position_embeddings=112
)  # 12 rows more than the tokenizer has tokens


def command(tmp_path, behaviour: str, port: int) -> list[str]:
    model = tmp_path / "model"
    if not model.exists():
        small_tokenizer.write(model)
        hf.save(tiny.random_params(0, MODEL), MODEL, tmp_path / "weights-only", jnp.float32)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tmp_path / "weights-only" / name, model / name)
    values = {
        "name": "served",
        "run_dir": tmp_path,
        "model.path": model,
        "rollout.engine": "vllm",
        "vllm.python": fake_vllm_process.python(tmp_path, behaviour),
        "vllm.port": port,
        "vllm.servers": 2,
        "weights.folder": tmp_path / "weights",
    }
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return [sys.executable, "-m", "deepgrpo.serve", f"--config={ROOT / 'configs' / 'carry_chain.py'}", *overrides]


@pytest.fixture
def port() -> int:
    """The first of two neighbouring ports that are free now."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            try:
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            except (OSError, OverflowError):
                continue
            return first.getsockname()[1]
    raise RuntimeError("no two neighbouring ports are free")


def test_serves_until_told_to_stop_and_replaces_a_dead_server(tmp_path, port):
    environment = os.environ | {"DEEPGRPO_VLLM_TOKEN": "secret", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    arguments = command(tmp_path, "ok", port)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        lines = []
        while not (urls := re.search(r"--config.vllm.attach=(\S+)", lines[-1] if lines else "")):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        first, second = urls[1].split(",")
        assert first == f"http://127.0.0.1:{port}"
        (start,) = (tmp_path / "weights").glob("*/start/config.json")
        assert json.loads(start.read_text())["vocab_size"] == 260  # as the snapshots that the training will send
        attached = VllmServer.attach(first, "secret", "served", deadline=30)
        VllmServer.attach(second, "secret", "served", deadline=30)
        family = descendants(process.pid)
        pid = int(re.search(rf"{first}, process (\d+)", "".join(lines))[1])
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid])
        attached.wait_ready(30)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        wait_gone(family)
        assert not list((tmp_path / "weights").glob("*/start"))


def test_says_what_is_missing(tmp_path, port):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("DEEPGRPO_VLLM_TOKEN", None)
    done = subprocess.run(command(tmp_path, "ok", port), capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1 and "DEEPGRPO_VLLM_TOKEN is not set" in done.stderr and "Traceback" not in done.stderr
    environment["DEEPGRPO_VLLM_TOKEN"] = "secret"
    done = subprocess.run(command(tmp_path, "dies", port), capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1 and "no room for the KV cache" in done.stdout
