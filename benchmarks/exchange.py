"""What it costs to give a vLLM server new weights, beside one plain copy of the same bytes in the same run.

    JAX_PLATFORMS=cpu python -m benchmarks.exchange                    both models, both routes; needs launch/vllm_env.sh
    JAX_PLATFORMS=cpu python -m benchmarks.exchange --dtype=bfloat16

Models: small, 90M parameters (D=768, L=14, 359 MB in float32), and tiny, 1M. For each, a learner and a server of its own on this
machine; every publication is a real one, proof included. Medians of the publications after the first, in milliseconds. `blocked`
is what the learner waits for; the rest happens behind its back. `copy` writes a buffer of the snapshot's size to a file beside.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import rich.console
import rich.table
import tokenizers
import transformers

from configs import common
from deepgrpo.learner.learner import Learner
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.rollout.engine import Sampling
from deepgrpo.types import as_ids
from deepgrpo.weights import hf
from deepgrpo.weights.engines import open_engine

MODELS = {
    "small": ModelConfig("qwen2", 12288, 14, 768, 12, 4, 64, 2048, 1e4, 1e-6, True, True, False, 1024),
    "tiny": ModelConfig("qwen2", 2048, 4, 128, 4, 2, 32, 384, 1e4, 1e-6, True, True, False, 1024),
}
PARTS = ("blocked", "snapshot", "orbax", "convert", "load", "proof", "total")


def write_tokenizer(folder: pathlib.Path, size: int) -> None:
    """A tokenizer of so many meaningless words: the engine wants one, and its size is the vocabulary."""
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="w1").save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))


def make_learner(model: ModelConfig, config, folder: pathlib.Path) -> Learner:
    """A random model on disk, and the learner of it."""
    token = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(Transformer(model, jnp.float32).init)(jax.random.key(0), token, token, token)["params"]
    write_tokenizer(folder / "tokenizer", model.vocab_size)
    hf.save(params, model, folder / "model", jnp.float32, folder / "tokenizer")
    config.model.remat, config.rollout.n, config.seed = "none", 8, 0
    return Learner(
        model,
        params,
        config,
        total_steps=1,
    )


def measure(name: str, route: str, dtype: str, python: str, publications: int) -> dict[str, float]:
    """Median milliseconds of the parts, and `copy` and `mb`."""
    model, config = MODELS[name], common.get_config()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = pathlib.Path(temporary)
        config.name, config.model.path, config.model.dtype = f"exchange-{name}", str(folder / "model"), dtype
        config.rollout.engine, config.weights.route, config.vllm.python = "vllm", route, python
        config.objective.kl_coef, config.learner.buckets, config.learner.micro_batch_tokens = 0.0, (128,), 1024
        learner = make_learner(model, config, folder)
        prompts = [as_ids(jax.random.randint(jax.random.key(i), (24,), 2, model.vocab_size)) for i in range(8)]
        engine, publish = open_engine(config, stack, learner, prompts, Sampling(1.0, 1.0, -1, (1,), 256), 0, folder)
        move = jax.jit(lambda tree, size: jax.tree.map(lambda x: x + size * jnp.sign(x), tree), donate_argnums=0)
        records, copies = [], []
        for version in range(1, publications + 1):
            learner.restore(learner.state | {"params": move(learner.policy, 1e-5)})
            publish(learner.policy, version)
            assert engine.version == version  # waits for the proof
            metrics = engine.metrics()
            records.append({part: 1e3 * metrics[f"timing_s/publish_{part}"] for part in PARTS})
            copies.append(copy_milliseconds(engine.fleet.weights.folder))
    result = {part: statistics.median(record[part] for record in records[1:]) for part in PARTS}
    return result | {"copy": statistics.median(ms for ms, _ in copies), "mb": copies[0][1]}


def copy_milliseconds(folder: pathlib.Path) -> tuple[float, float]:
    """Time of writing as many bytes as the snapshot has to a file beside it, and the megabytes."""
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    target = folder.with_name(".copy")
    start = time.perf_counter()
    target.write_bytes(data)
    seconds = time.perf_counter() - start
    target.unlink()
    return 1e3 * seconds, len(data) / 1e6


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    route: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="of the environment that launch/vllm_env.sh made")
    parser.add_argument("--publications", type=int, default=6, help="of each case; the first is not counted")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    if not shutil.which(arguments.vllm_python):
        parser.error(f"--vllm-python={arguments.vllm_python}: no such program; launch/vllm_env.sh makes vLLM's environment")
    table = rich.table.Table(title=f"Publishing {arguments.dtype} weights to vLLM, milliseconds")
    for column in ("model", "route", "MB", *PARTS, "copy", "total / copy"):
        table.add_column(column, justify="left" if column in ("model", "route") else "right")
    for case in [Case(model, route) for model in arguments.models for route in ("orbax", "direct")]:
        found = measure(case.model, case.route, arguments.dtype, arguments.vllm_python, arguments.publications)
        numbers = [f"{found[part]:,.0f}" for part in PARTS]
        ratio = f"{found['total'] / found['copy']:.1f}"
        table.add_row(case.model, case.route, f"{found['mb']:,.0f}", *numbers, f"{found['copy']:,.0f}", ratio)
        print(case, {part: round(value) for part, value in found.items()}, flush=True)
    rich.console.Console(width=120).print(table)


if __name__ == "__main__":
    main()
