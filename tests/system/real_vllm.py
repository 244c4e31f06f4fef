"""A real vLLM on the CPU for system tests: tiny models, the calls of a publication, and what transformers makes of the models."""

import os
import pathlib
import shutil

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
from deepgrpo.rollout.vllm_server import VllmServer
from deepgrpo.weights import hf
from tests.conftest import ROOT
from tests.data import small_tokenizer
from tests.rollout import fake_vllm_process

PYTHON = pathlib.Path(os.environ.get("DEEPGRPO_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
MARKS = [
    pytest.mark.system,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: {PYTHON} is absent, launch/vllm_env.sh makes it"),
]
VOCAB, BLOCK, DEADLINE = 272, 32, 240.0
PROMPTS = [[int(id) for id in np.random.default_rng(n).integers(4, 260, n)] for n in (3, BLOCK - 1, 2 * BLOCK + 5, 5 * BLOCK)]


def make_models(root: pathlib.Path) -> None:
    """The folders tied-1, tied-2, untied-1, untied-2: exports of random models, far from flat; start: tied-1 without its head."""
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


def start(root: pathlib.Path, name: str, max_model_len: int = 256, **vllm) -> VllmServer:
    """A server of the run `name`, on the folder `start`."""
    config = fake_vllm_process.config(PYTHON, name, max_model_len, max_num_seqs=32, **vllm)
    return VllmServer.start(config, root / "start", root, root / f"{name}.log", deadline=DEADLINE)


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
