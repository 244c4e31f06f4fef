"""A real vLLM on the CPU: what it serves after each load is what transformers makes of the exported folder.

Skipped where launch/vllm_env.sh has not made vLLM's environment. One server, restarted once; two more starts at the end.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.rollout.vllm_server import VllmServer, VllmServerError
from deepgrpo.weights import hf
from tests.conftest import ROOT
from tests.data import small_tokenizer
from tests.rollout.test_vllm_server import descendants, wait_gone

PYTHON = pathlib.Path(os.environ.get("DEEPGRPO_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: {PYTHON} is absent, launch/vllm_env.sh makes it"),
]
VOCAB, BLOCK, DEADLINE = 272, 32, 240.0
PROMPTS = [[int(id) for id in np.random.default_rng(n).integers(4, 260, n)] for n in (3, BLOCK - 1, 2 * BLOCK + 5, 5 * BLOCK)]
STARTER = """
import json, sys, time
from deepgrpo.rollout.vllm_server import VllmServer
server = VllmServer.start(**json.loads(sys.argv[1]))
print(server.url, server.token, server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """The folders tied-1, tied-2, untied-1, untied-2: exports of random models, far from flat; start: tied-1 without its head."""
    root = tmp_path_factory.mktemp("weights")
    small_tokenizer.write(root / "tokenizer")
    token = jnp.zeros((1, 1), jnp.int32)
    for kind in ("tied", "untied"):
        config = ModelConfig("qwen2", VOCAB, 3, 128, 4, 2, 32, 96, 1e4, 1e-6, kind == "tied", True, False, 512)
        initialise = jax.jit(Transformer(config, jnp.float32).init)
        for version in (1, 2):
            params = initialise(jax.random.key(version), token, token, token)["params"]
            params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, params)
            hf.save(params, config, root / f"{kind}-{version}", jnp.float32, tokenizer_from=root / "tokenizer")
    shutil.copytree(root / "tied-1", root / "start")
    weights = load_file(root / "start" / "model.safetensors")
    del weights["lm_head.weight"]  # as the published folders of tied models are
    save_file(weights, root / "start" / "model.safetensors", metadata={"format": "pt"})
    return root


def arguments(root: pathlib.Path, run_id: str, **changes) -> dict:
    return {
        "model_folder": str(root / "start"),
        "python": str(PYTHON),
        "run_id": run_id,
        "log_path": str(root / f"{run_id}.log"),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 32,
        "block_size": BLOCK,
        "weights_root": str(root),
        "deadline": DEADLINE,
    } | changes


@pytest.fixture(scope="module")
def server(root) -> VllmServer:
    server = VllmServer.start(**arguments(root, "run-1"))
    yield server
    server.stop()


def post(server: VllmServer, path: str, body=None):
    """POST with the token; a connection that the server closed meanwhile is no matter, there is a new one each time."""
    headers = {"Authorization": f"Bearer {server.token}"}
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=60, trust_env=False)
    response.raise_for_status()
    return response.json()


def load(server: VllmServer, folder: pathlib.Path) -> dict:
    reports = post(server, "/collective_rpc", {"method": "deepgrpo_load", "args": [str(folder)]})["results"]
    assert len({report["ok"] for report in reports}) == 1  # of several workers all do, or none does
    return reports[0]


def publish(server: VllmServer, folder: pathlib.Path, version: int) -> None:
    post(server, "/pause?mode=wait")
    report = load(server, folder)
    assert report["ok"] and not report["error"] and report["seconds"].keys() == {"check", "load", "head"}, report
    post(server, "/update_weight_version", {"new_version": str(version)})
    assert post(server, "/reset_prefix_cache")["success"]
    post(server, "/resume")


def served(server: VllmServer) -> list[list[int]]:
    """16 greedy tokens after each prompt, asked for twice: the second answer comes from the prefix cache."""
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    answers = [
        [post(server, "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}) for ids in PROMPTS]
        for _ in range(2)
    ]
    first, second = ([answer["choices"][0]["token_ids"] for answer in half] for half in answers)
    assert first == second
    return first


def expected(folder: pathlib.Path) -> list[list[int]]:
    """The same by transformers, reading the exported folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = transformers.GenerationConfig(max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0)
    return [model.generate(torch.tensor([ids]), generation_config=options)[0, len(ids) :].tolist() for ids in PROMPTS]


def check_versions(server: VllmServer, root: pathlib.Path, kind: str) -> None:
    wanted = {version: expected(root / f"{kind}-{version}") for version in (1, 2)}
    assert wanted[1] != wanted[2]
    assert served(server) == wanted[1]
    for number, version in enumerate((2, 1, 2)):
        publish(server, root / f"{kind}-{version}", number)
        assert served(server) == wanted[version], f"publish {number} of {kind}-{version}"


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
        VllmServer.start(**arguments(root, "run-2", max_model_len=4096))


def test_foreign_server_is_refused_and_dies_with_its_trainer(root):
    command = [sys.executable, "-c", STARTER, json.dumps(arguments(root, "run-3"))]
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
    server = VllmServer.start(**arguments(root, "run-4", tensor_parallel=2))
    try:
        publish(server, root / "tied-2", 1)
        assert served(server) == expected(root / "tied-2")
        assert not load(server, root / "absent")["ok"]
        family = descendants(server.pid)
        assert len(family) > 4  # supervisor, server, engine core, two workers
    finally:
        server.stop()
    wait_gone(family)
