"""Serving for a training elsewhere, with a fake vLLM."""

import contextlib
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

from deepgrpo import config as config_lib
from deepgrpo import serve
from deepgrpo.rollout.vllm_server import VllmServer
from deepgrpo.weights import hf
from tests.conftest import ROOT
from tests.data import small_tokenizer
from tests.rollout import fake_vllm_process, tiny
from tests.rollout.test_vllm_server import descendants, wait_gone

MODEL = dataclasses.replace(tiny.CONFIG, vocab_size=272, max_position_embeddings=112)  # 12 rows above the tokenizer's
ENVIRONMENT = os.environ | {"DEEPGRPO_VLLM_TOKEN": "secret", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hf.save(tiny.random_params(0, MODEL), MODEL, folder / "model", jnp.float32)
    small_tokenizer.write(folder / "tokenizer")
    shutil.copytree(folder / "tokenizer", folder / "model", dirs_exist_ok=True, ignore=lambda *_: ["config.json"])
    return folder / "model"


def flags(tmp_path, model, python) -> list[str]:
    values = {
        **{"name": "served", "run_dir": tmp_path, "model.path": model, "weights.folder": tmp_path / "weights"},
        **{"rollout.engine": "vllm", "vllm.servers": 2, "vllm.python": python},
    }
    return [f"--config={ROOT / 'configs' / 'carry_chain.py'}", *(f"--config.{key}={value}" for key, value in values.items())]


def command(tmp_path, model, behaviour: str, port: int) -> list[str]:
    python = fake_vllm_process.python(tmp_path, behaviour)
    return [sys.executable, "-m", "deepgrpo.serve", f"--port={port}", *flags(tmp_path, model, python)]


@pytest.fixture
def port() -> int:
    """The first of two neighbouring ports that are free now."""
    for _ in range(100):
        with contextlib.suppress(OSError, OverflowError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            return first.getsockname()[1]
    raise RuntimeError("no two neighbouring ports are free")


@pytest.mark.system
def test_serves_until_told_to_stop_and_replaces_a_dead_server(tmp_path, model, port):
    arguments = command(tmp_path, model, "ok", port)
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
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


def test_says_what_is_missing(tmp_path, model, port, monkeypatch, capsys):
    absent = flags(tmp_path, tmp_path / "model", tmp_path / "python")
    monkeypatch.delenv("DEEPGRPO_VLLM_TOKEN", raising=False)
    with pytest.raises(config_lib.ConfigError) as error:
        serve.main(*serve.parse(["serve.py", *absent]))
    parts = ("DEEPGRPO_VLLM_TOKEN is not set", "launch/vllm_env.sh", "model does not exist")
    assert all(part in str(error.value) for part in parts), str(error.value)  # all at once
    monkeypatch.setenv("DEEPGRPO_VLLM_TOKEN", "secret")
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    arguments = command(tmp_path, model, "dies", port)
    assert serve.main(*serve.parse(arguments[2:])) == 1 and "no room for the KV cache" in capsys.readouterr().out
