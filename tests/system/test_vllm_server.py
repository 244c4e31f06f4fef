"""A real vLLM on the CPU: what it serves after each load is what transformers makes of the exported folder.

Skipped where launch/vllm_env.sh has not made vLLM's environment. One server, restarted once; three more starts after it.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepgrpo.rollout.vllm_server import VllmServer, VllmServerError
from tests.conftest import ROOT
from tests.rollout.test_vllm_server import descendants, wait_gone
from tests.system.real_vllm import DEADLINE, MARKS, check_versions, expected, load, make_models, publish, served, start

pytestmark = MARKS
STARTER = """
import pathlib, sys, time
from tests.system.real_vllm import start
server = start(pathlib.Path(sys.argv[1]), "run-3")
print(server.url, server.token, server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("weights")
    make_models(root)
    return root


@pytest.fixture(scope="module")
def server(root) -> VllmServer:
    server = start(root, "run-1")
    yield server
    server.stop()


def test_nothing_but_health_without_the_token(server):
    paths = ["/metrics", "/v1/models", "/docs", "/openapi.json", "/ping", "/load", "/weight_info", "/deepgrpo/identity"]
    for path in [*paths, "/nothing", "//health", "/health/", "/health/../metrics"]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.token}):
            assert httpx.get(server.url + path, headers=headers).status_code == 401, path
    for path in ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache", "/inference/v1/generate", "/v1/completions"):
        assert httpx.post(server.url + path, json={}).status_code == 401, path
    assert httpx.get(server.url + "/health").status_code == 200
    assert server.token not in pathlib.Path(f"/proc/{server.pid}/cmdline").read_text()


def test_tied_head_after_each_load(server, root):
    check_versions(server, root, "tied")


def test_refused_snapshots_leave_the_old_weights(server, root, tmp_path):
    publish(server, root / "tied-1", 7)
    good = load_file(root / "tied-2" / "model.safetensors")
    norm, head = "model.layers.1.input_layernorm.weight", "lm_head.weight"

    def snapshot(name: str, tensors: dict) -> pathlib.Path:
        folder = root / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        return folder

    cut = snapshot("cut", good)
    os.truncate(cut / "model.safetensors", 100_000)
    cases = {
        root / "absent": ("no such folder", {}),
        tmp_path: ("outside", {}),
        cut: ("cut off", {}),
        snapshot("missing", {name: x for name, x in good.items() if name != norm}): (norm, {"missing": [norm]}),
        snapshot("unexpected", good | {"more": np.ones(2, np.float32)}): ("more", {"unexpected": ["more"]}),
        snapshot("mismatched", good | {norm: np.ones(64, np.float32)}): (
            norm,
            {"mismatched": [f"{norm}: found [64], expected [128]"]},
        ),
        snapshot("nan", good | {norm: np.full(128, np.nan, np.float32)}): ("not finite", {}),
        snapshot("head", good | {head: good[head] + 1}): ("lm_head.weight is not", {}),
    }
    for folder, (message, lists) in cases.items():
        report = load(server, folder)
        assert not report["ok"] and not report["touched"] and message in report["error"], (folder, report)
        assert {kind: report[kind] for kind in ("missing", "unexpected", "mismatched") if report[kind]} == lists
    assert served(server) == expected(root / "tied-1")


def test_killed_engine_is_noticed_and_an_untied_head_served_after_the_restart(server, root):
    family, url = descendants(server.pid), server.url
    (engine,) = (pid for pid in family if "EngineCore" in pathlib.Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(engine, signal.SIGKILL)
    limit = time.monotonic() + 60
    while server.alive():
        assert time.monotonic() < limit
        time.sleep(0.1)
    server.restart(root / "untied-1", DEADLINE)
    wait_gone(family)
    assert server.alive() and server.restarts == 1 and server.url != url
    check_versions(server, root, "untied")
    family = descendants(server.pid)
    assert len(family) > 2
    os.kill(server.pid, signal.SIGKILL)  # with no supervisor left, the kernel ends one process after the other
    wait_gone(family)


def test_failed_start_shows_the_cause(root):
    with pytest.raises(VllmServerError, match=r"(?s)ended with status 1 .*error in its log: .*max_model_len \(4096\)"):
        start(root, "run-2", max_model_len=4096)


def test_foreign_server_is_refused_and_dies_with_its_trainer(root):
    command = [sys.executable, "-c", STARTER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        url, token, pid = trainer.stdout.readline().split()
        with pytest.raises(VllmServerError, match="belongs to run run-3, expected run run-1"):
            VllmServer.attach(url, token, "run-1", deadline=30)
        with pytest.raises(VllmServerError, match="refuses the token of run run-1"):
            VllmServer.attach(url, "guess", "run-1", deadline=30)
        assert VllmServer.attach(url, token, "run-3", deadline=30).alive()
        family = descendants(int(pid))
        assert len(family) > 2
        trainer.kill()
        wait_gone(family)


def test_two_workers_load_and_stop_together(root):
    server = start(root, "run-4", tensor_parallel=2)
    try:
        publish(server, root / "tied-2", 1)
        assert served(server) == expected(root / "tied-2")
        assert not load(server, root / "absent")["ok"]
        family = descendants(server.pid)
        assert len(family) > 4  # supervisor, server, engine core, two workers
    finally:
        server.stop()
    wait_gone(family)
