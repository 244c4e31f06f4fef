"""Tokens a CPU second of the native rollout engine, beside tunix's own sampler in the same run.

    JAX_PLATFORMS=cpu python -m benchmarks.native_sampler --tunix-python=/tmp/tunix-env/bin/python

Case: a decoder of 5M parameters (D=256, F=1024, L=4, 4 heads, 2 key-value heads, V=4096, tied, float32); 8 prompts of 64 tokens,
8 samples each, 192 tokens a sample, temperature 1, log-probs returned, nothing stops early. Each program runs in a process of
its own, is warmed up by one whole call (compilation is not counted), and its calls are timed with `time.process_time`, which
does not depend on what else the machine does. The programs take turns, so that a slow minute hits both.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

PROMPTS, G, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8, 64, 192
D, F, L, N, K, H, V = 256, 1024, 4, 4, 2, 64, 4096

NO_TUNIX = """tunix was not measured. To compare, make it an environment of its own and name its Python:
    python3 -m venv /tmp/tunix-env && /tmp/tunix-env/bin/pip install google-tunix
    python -m benchmarks.native_sampler --tunix-python=/tmp/tunix-env/bin/python"""


def prompts() -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(0).integers(1, V, (PROMPTS, PROMPT_TOKENS)).tolist()


def native():
    """Returns a function of a seed that samples the case and returns the number of tokens."""
    import jax
    import jax.numpy as jnp

    from deepgrpo.model.config import ModelConfig
    from deepgrpo.model.transformer import Transformer
    from deepgrpo.rollout.engine import Request, Sampling
    from deepgrpo.rollout.native import NativeEngine
    from deepgrpo.types import as_ids

    config = ModelConfig("qwen2", V, L, D, N, K, H, F, 1e6, 1e-6, True, True, False, 1024)
    token = jnp.zeros((1, 1), jnp.int32)
    params = Transformer(config, jnp.float32).init(jax.random.key(0), token, token, token)["params"]
    engine = NativeEngine(config, params, jnp.float32, V, slots=PROMPTS * G, decode_steps=16)
    sampling = Sampling(1.0, 1.0, -1, (), PROMPT_TOKENS + RESPONSE_TOKENS)
    rows = [as_ids(row) for row in prompts()]

    def run(seed: int) -> int:
        requests = [Request(row, tuple(seed * 10_000 + i * G + j for j in range(G))) for i, row in enumerate(rows)]
        return sum(len(c.ids) for group in engine.generate(requests, sampling) for c in group)

    return run


def tunix():
    """As `native`, for tunix's vanilla sampler; runs in tunix's environment."""
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen2 import model

    class Tokenizer:  # the sampler takes text: here a prompt's number
        def __init__(self):
            self.rows = prompts()

        def encode(self, text: str) -> list[int]:
            return self.rows[int(text)]

        def decode(self, ids) -> str:
            return ""

        bos_id = staticmethod(lambda: 0)  # 0: none is prepended
        pad_id = staticmethod(lambda: 0)
        eos_id = staticmethod(lambda: V)  # outside the vocabulary: never sampled

    config = model.ModelConfig(
        num_layers=L,
        vocab_size=V,
        embed_dim=D,
        hidden_dim=F,
        num_heads=N,
        head_dim=H,
        num_kv_heads=K,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    cache = CacheConfig(cache_size=PROMPT_TOKENS + RESPONSE_TOKENS, num_layers=L, num_kv_heads=K, head_dim=H)
    sampler = Sampler(model.Qwen2(config, rngs=nnx.Rngs(0)), Tokenizer(), cache)
    texts = [str(i) for i in range(PROMPTS) for _ in range(G)]

    def run(seed: int) -> int:
        out = sampler(
            texts, RESPONSE_TOKENS, max_prompt_length=PROMPT_TOKENS, temperature=1.0, top_p=1.0, seed=seed, return_logprobs=True
        )
        return sum(len(tokens) for tokens in out.tokens)

    return run


def measure(name: str) -> None:
    """Child process: warms up, then times one call for every line on stdin; answers with one JSON line."""
    run = {"native": native, "tunix": tunix}[name]()
    run(0)
    print(json.dumps({"ready": name}), flush=True)
    for seed, _ in enumerate(sys.stdin, start=1):
        start = time.process_time()
        tokens = run(seed)
        print(json.dumps({"tokens": tokens, "cpu_seconds": time.process_time() - start}), flush=True)


class Child:
    def __init__(self, name: str, python: str):
        root = pathlib.Path(__file__).resolve().parent.parent
        paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        command = [python, str(pathlib.Path(__file__).resolve()), "--measure", name]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.answer()

    def answer(self) -> dict:
        for line in self.process.stdout:  # programs may print lines of their own
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(
            f"{self.name} ended with code {self.process.wait()} before it answered; run it by hand: {self.process.args}"
        )

    def time_once(self) -> dict:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix-python", default="", help="Python of an environment with google-tunix; empty: ours alone")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each program")
    parser.add_argument("--measure", choices=("native", "tunix"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tunix_python and not shutil.which(arguments.tunix_python):
        parser.error(f"--tunix-python={arguments.tunix_python}: no such program, expected a Python that has google-tunix")
    if arguments.measure:
        return measure(arguments.measure)

    children = [Child("native", sys.executable)]
    if arguments.tunix_python:
        children.append(Child("tunix", arguments.tunix_python))
    speeds: dict[str, list[float]] = {child.name: [] for child in children}
    print(f"{'program':<8} {'tokens':>7} {'CPU s':>7} {'tokens / CPU s':>15}")
    for _ in range(arguments.repeats):
        for child in children:
            result = child.time_once()
            speeds[child.name].append(result["tokens"] / result["cpu_seconds"])
            print(
                f"{child.name:<8} {result['tokens']:>7} {result['cpu_seconds']:>7.2f} {speeds[child.name][-1]:>15,.0f}",
                flush=True,
            )
    for child in children:
        child.close()
    medians = {name: sorted(values)[len(values) // 2] for name, values in speeds.items()}
    print("\nmedian: " + ", ".join(f"{name} {value:,.0f} tokens / CPU s" for name, value in medians.items()))
    print(f"native / tunix = {medians['native'] / medians['tunix']:.2f}" if "tunix" in medians else NO_TUNIX)


if __name__ == "__main__":
    main()
