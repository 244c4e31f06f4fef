"""Rollout throughput: our engine over HTTP to a vLLM server, beside vLLM's own offline API and the native JAX engine.

    JAX_PLATFORMS=cpu python -m benchmarks.rollout                        a decoder of 1M parameters; needs launch/vllm_env.sh
    JAX_PLATFORMS=cpu python -m benchmarks.rollout --model=small          90M

Case: 32 prompts of 160 tokens that share their first 32, 8 samples each, 128 tokens a sample, temperature 1, log-probs of the
sampled tokens, a seed a request, nothing stops early, float32. All three have the same weights. Each is warmed up by one whole
call; then they take turns, so that a slow minute hits all of them. Two numbers: tokens a second of the clock, which depends on
what else the machine does, and tokens a second of CPU time, of all processes involved, which hardly does.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

PROMPTS, G, SHARED, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 32, 160, 128
MAX_MODEL_LEN = PROMPT_TOKENS + RESPONSE_TOKENS
CPU_ENVIRONMENT = {  # as deepgrpo starts its servers (rollout/vllm_plugin/deepgrpo_launcher.py)
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def prompts(vocabulary: int) -> list[list[int]]:
    import random

    rng = random.Random(0)
    shared = [rng.randrange(2, vocabulary) for _ in range(SHARED)]
    return [shared + [rng.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS - SHARED)] for _ in range(PROMPTS)]


#### vLLM's offline API, in a process of vLLM's environment


def offline(model: str, vocabulary: int) -> None:
    """Warms up, then answers every line on standard input by one JSON line."""
    import vllm

    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256, "block_size": 32, "enforce_eager": True}
    cpu = {"enable_chunked_prefill": False}
    llm = vllm.LLM(
        model, logprobs_mode="processed_logprobs", enable_prefix_caching=True, disable_log_stats=True, **options, **cpu
    )
    asked = [{"prompt_token_ids": ids} for ids in prompts(vocabulary)]

    def run(seed: int) -> int:
        shared = {
            "n": G,
            "max_tokens": RESPONSE_TOKENS,
            "temperature": 1.0,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
        }
        parameters = [vllm.SamplingParams(seed=seed * 10_000 + i * G, **shared) for i in range(PROMPTS)]
        answers = llm.generate(asked, parameters, use_tqdm=False)
        return sum(len(output.token_ids) for answer in answers for output in answer.outputs)

    run(0)
    print(json.dumps({"ready": True}), flush=True)
    for seed, _ in enumerate(sys.stdin, start=1):
        llm.reset_prefix_cache()
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = run(seed)
        result = {"tokens": tokens, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(result), flush=True)


class Offline:
    def __init__(self, python: str, model: str, vocabulary: int):
        command = [python, __file__, "--offline", model, "--vocabulary", str(vocabulary)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | CPU_ENVIRONMENT
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.answer()

    def answer(self) -> dict[str, float]:
        for line in self.process.stdout:  # vLLM prints lines of its own
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"vLLM ended with code {self.process.wait()}; run it by hand: {self.process.args}")

    def __call__(self, seed: int) -> dict[str, float]:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


#### our engines


def descendants_cpu_seconds(pid: int) -> float:
    """User and system time that the processes below `pid`, and itself, have had."""
    rows = [line.split() for line in subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()]
    family = {pid}
    while more := {int(child) for child, parent in rows if int(parent) in family} - family:
        family |= more
    total = 0
    for member in family:
        fields = pathlib.Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def ours(
    engine, vocabulary: int, forget: Callable[[], None], others_cpu: Callable[[], float]
) -> Callable[[int], dict[str, float]]:
    """A function of a seed that samples the case once."""
    from deepgrpo.rollout.engine import Request, Sampling
    from deepgrpo.types import as_ids

    sampling = Sampling(1.0, 1.0, -1, (), MAX_MODEL_LEN)
    rows = [as_ids(ids) for ids in prompts(vocabulary)]

    def run(seed: int) -> dict[str, float]:
        forget()
        requests = [Request(row, tuple(seed * 10_000 + i * G + j for j in range(G))) for i, row in enumerate(rows)]
        wall, cpu = time.perf_counter(), time.process_time() + others_cpu()
        tokens = sum(len(c.ids) for group in engine.generate(requests, sampling) for c in group)
        return {"tokens": tokens, "wall": time.perf_counter() - wall, "cpu": time.process_time() + others_cpu() - cpu}

    run(0)
    return run


def measure(model_name: str, python: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Results of each engine, call by call."""
    import jax.numpy as jnp

    from benchmarks.exchange import MODELS, make_learner
    from configs import common
    from deepgrpo.rollout.engine import Sampling
    from deepgrpo.rollout.native import NativeEngine
    from deepgrpo.types import as_ids
    from deepgrpo.weights.engines import open_engine

    model, config = MODELS[model_name], common.get_config()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = pathlib.Path(temporary)
        config.name, config.model.path, config.model.dtype = "rollout-benchmark", str(folder / "model"), "float32"
        config.rollout.engine = "vllm"
        config.vllm.python, config.rollout.max_model_len, config.objective.kl_coef = python, MAX_MODEL_LEN, 0.0
        config.learner.buckets, config.learner.micro_batch_tokens = (MAX_MODEL_LEN,), 8 * MAX_MODEL_LEN
        learner = make_learner(model, config, folder)
        texts = [as_ids(ids) for ids in prompts(model.vocab_size)]
        engine, _ = open_engine(config, stack, learner, texts, Sampling(1.0, 1.0, -1, (), MAX_MODEL_LEN), 0, folder)
        replica = engine.fleet.replicas[0]
        vllm = ours(
            engine,
            model.vocab_size,
            lambda: replica.control.reset_prefix_cache(60.0),
            lambda: descendants_cpu_seconds(replica.server.pid),
        )
        native = NativeEngine(model, learner.policy, jnp.float32, model.vocab_size, slots=256, decode_steps=16)
        runs = {"vLLM server, our engine": vllm, "native JAX engine": ours(native, model.vocab_size, lambda: None, lambda: 0.0)}
        runs["vLLM offline API"] = child = Offline(python, str(engine.fleet.weights.folder), model.vocab_size)
        stack.callback(child.close)
        results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for seed in range(1, repeats + 1):
            for name, run in runs.items():
                results[name].append(run(seed))
                print(seed, name, {key: round(value, 2) for key, value in results[name][-1].items()}, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="of the environment that launch/vllm_env.sh made")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each")
    parser.add_argument("--offline", default="", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not shutil.which(arguments.vllm_python):
        parser.error(f"--vllm-python={arguments.vllm_python}: no such program; launch/vllm_env.sh makes vLLM's environment")
    if arguments.offline:
        return offline(arguments.offline, arguments.vocabulary)

    import rich.console
    import rich.table

    results = measure(arguments.model, arguments.vllm_python, arguments.repeats)
    table = rich.table.Table(
        title=f"{PROMPTS} prompts x {G} samples x {RESPONSE_TOKENS} tokens, {arguments.model} model, float32"
    )
    for column in ("engine", "tokens / s", "of offline", "tokens / CPU s", "of offline"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    medians = {
        name: [statistics.median(call["tokens"] / call[clock] for call in calls) for clock in ("wall", "cpu")]
        for name, calls in results.items()
    }
    base = medians["vLLM offline API"]
    for name, (wall, cpu) in medians.items():
        table.add_row(name, f"{wall:,.0f}", f"{wall / base[0]:.2f}", f"{cpu:,.0f}", f"{cpu / base[1]:.2f}")
    rich.console.Console(width=120).print(table)


if __name__ == "__main__":
    main()
