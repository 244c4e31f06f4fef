"""CPU seconds of one optimizer step: the learner, the learner with each technique off, and tunix's trainer, in one run.

    JAX_PLATFORMS=cpu python -m benchmarks.learner                  makes tunix's environment in .cache on first use
    JAX_PLATFORMS=cpu python -m benchmarks.learner --without-tunix

Case: a decoder of 5M parameters (D=256, F=1024, L=4, 4 heads, 2 key-value heads, V=4096, tied, float32); 8 prompts of 64 tokens,
8 responses each; one optimizer step (AdamW, gradient norm clipped to 1, no KL penalty) on the 64 rows. `equal`: responses of
192 tokens. `ragged`: of 24 to 192. `half`: equal, but half of the groups have no contrast, so that their rows have no gradient.
Tunix pads all rows to the longest, as its GRPO learner does; its packing needs a TPU (elsewhere its packed log-probs are not
causal). Its micro-batch is the fastest of those in TUNIX_ROWS, its layers are not recomputed, which is its default. Our
micro-batches are those of MICRO_BATCH_TOKENS, our layers are recomputed, which is our default.

Each library runs in a process of its own. Every program is warmed up by whole steps (compilation is not counted), then all take
turns, so that a slow minute hits all of them. CPU seconds are `time.process_time` of the whole process, packing included; wall
seconds depend on what else the machine does. The figures are medians, and ratios are of medians.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

PROMPTS, G, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8, 64, 192
D, F, L, N, K, H, V = 256, 1024, 4, 4, 2, 64, 4096
OWN = "deepgrpo"
VARIANTS = {  # of our step: what differs from it, and the work on which that is measured
    OWN: ({}, ("equal", "ragged", "half")),
    "without shared prefixes": ({"learner.share_prefix": False}, ("equal", "ragged")),
    "without packing either": ({"learner.share_prefix": False, "packing": False}, ("equal", "ragged")),
    "all logits of a micro-batch at once": ({"learner.logprob_block": 1 << 20}, ("equal", "ragged")),
    "with a pass for old log-probs": ({"old_pass": True}, ("equal", "ragged")),
    "with the rows that have no gradient": ({"objective.zero_gradient_rows": "keep"}, ("half",)),
    "remat none": ({"model.remat": "none"}, ("equal", "ragged")),
    "remat dots": ({"model.remat": "dots"}, ("equal", "ragged")),
}
TUNIX = ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax==0.2.8")
# The fastest that were found. Rows of 192 tokens: 64 whole responses, and 8 prompts in three more, make 4 micro-batches of 17.
MICRO_BATCH_TOKENS = {"equal": 17 * RESPONSE_TOKENS, "ragged": 4096, "half": 17 * RESPONSE_TOKENS}
TUNIX_ROWS = (16, 8)  # of a micro-batch
REPORTED = ("perf/tokens", "perf/padding_fraction")
ROOT = pathlib.Path(__file__).resolve().parent.parent
TUNIX_FOLDER = ROOT / ".cache" / "tunix-0.1.7"


def case(work: str) -> tuple[list[list[int]], list[list[list[int]]], list[list[float]]]:
    """Prompt ids, each prompt's response ids and their advantages."""
    import numpy as np

    random = np.random.default_rng(0)
    sizes = np.full((PROMPTS, G), RESPONSE_TOKENS)
    if work == "ragged":
        sizes = random.integers(24, RESPONSE_TOKENS + 1, (PROMPTS, G))
        sizes[0, 0] = RESPONSE_TOKENS
    rewards = random.random((PROMPTS, G))
    if work == "half":
        rewards[::2] = 1.0
    prompts = random.integers(1, V, (PROMPTS, PROMPT_TOKENS)).tolist()
    responses = [[random.integers(1, V, size).tolist() for size in row] for row in sizes]
    return prompts, responses, (rewards - rewards.mean(1, keepdims=True)).tolist()


#### Our step


def own(variant: str, work: str):
    """Returns a function that takes one optimizer step and waits for it, and returns its metrics."""
    import jax

    from configs import common
    from deepgrpo.learner import rows as rows_lib
    from deepgrpo.learner.learner import Learner
    from deepgrpo.learner.objective import MAIN
    from deepgrpo.learner.packing import Bin, build, whole
    from deepgrpo.model.config import ModelConfig
    from deepgrpo.model.transformer import Transformer
    from deepgrpo.types import as_ids

    edits = dict(VARIANTS[variant][0])
    packing, old_pass = edits.pop("packing", True), edits.pop("old_pass", False)

    class Measured(Learner):
        def _layout(self, mini_batches):
            if packing:
                return super()._layout(mini_batches)
            return [self._one_a_row(rows) for rows in mini_batches]

        def _one_a_row(self, rows):
            (shape,) = self.shapes
            cells = []
            for start in range(0, len(rows), shape.B):
                cell = Bin(shape.B, shape.T, shape.C)
                for r, i in enumerate(range(start, min(start + shape.B, len(rows)))):
                    cell._put(r, whole(i, rows[i]))
                cells.append(cell)
            return build(rows, cells, shape, 1)

        def _old_pass(self, batches, device):
            if old_pass:
                device[0]["old_logp"] = self._score(self.policy, device[0], batches[0].used)
            return super()._old_pass(batches, device)

    keys = common.get_config()
    keys.model.dtype, keys.objective.kl_coef, keys.optim.mini_batch_prompts = "float32", 0.0, PROMPTS
    keys.model.attention, keys.rollout.n, keys.seed = "xla", G, 0
    keys.update_from_flattened_dict(edits)
    keys.learner.buckets = (RESPONSE_TOKENS, PROMPT_TOKENS + RESPONSE_TOKENS) if packing else (PROMPT_TOKENS + RESPONSE_TOKENS,)
    keys.learner.micro_batch_tokens = MICRO_BATCH_TOKENS[work] if keys.learner.share_prefix else 4096
    config = ModelConfig("qwen2", V, L, D, N, K, H, F, 1e6, 1e-6, True, True, False, 1024)
    token = jax.numpy.zeros((1, 1), jax.numpy.int32)
    learner = Measured(
        config,
        Transformer(config, jax.numpy.float32).init(jax.random.key(0), token, token, token)["params"],
        keys,
        max_rows=(PROMPTS * G, 0),
        total_steps=1000,
    )
    prompts, responses, advantages = case(work)
    every = [
        rows_lib.Row(as_ids(prompt), as_ids(ids), a, MAIN, 0.0, None, str(i), i, False, 0.0)
        for i, (prompt, row, group) in enumerate(zip(prompts, responses, advantages, strict=True))
        for ids, a in zip(row, group, strict=True)
    ]

    def run() -> dict:
        return learner.update(rows_lib.keep_rows(every, keys.objective.zero_gradient_rows), 1)

    return run


#### Tunix's step


def tunix(rows: int, work: str):
    """As `own`, for the trainer of tunix's GRPO learner with micro-batches of `rows`; runs in tunix's environment."""
    import flax
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    # An nnx.Variable with a sharding wants a mesh as soon as it is made, under flax 0.12, which tunix's models don't expect.
    flax.config.update("flax_always_shard_variable", False)
    from tunix.models.qwen2 import model
    from tunix.rl import algo_core, common, rl_cluster, trainer
    from tunix.rl.grpo.grpo_learner import GRPOConfig

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
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01))
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer, eval_every_n_steps=1 << 30, mini_batch_size=PROMPTS * G, train_micro_batch_size=rows
    )
    actor = trainer.Trainer(model.Qwen2(config, rngs=nnx.Rngs(0)), optimizer, training, dict)
    algorithm = GRPOConfig(num_generations=G, beta=0.0, loss_agg_mode="token-mean")
    algorithm.temperature = 1.0
    actor.with_loss_fn(
        lambda model, train_example, algo_config: algo_core.grpo_loss_fn(model, train_example, algorithm, pad_id=0, eos_id=V),
        has_aux=True,
    )
    actor.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    actor.with_rl_metrics_to_log({"kl": np.mean})
    actor.is_managed_externally = True

    prompts, responses, advantages = case(work)
    padded = [ids + [0] * (RESPONSE_TOKENS - len(ids)) for group in responses for ids in group]
    prompt_ids, completion_ids = np.repeat(prompts, G, axis=0), np.array(padded)
    advantage = np.array(advantages, np.float32).reshape(-1)

    def examples():
        for start in range(0, PROMPTS * G, rows):
            part = slice(start, start + rows)
            ids = jnp.asarray(prompt_ids[part], jnp.int32), jnp.asarray(completion_ids[part], jnp.int32)
            yield common.TrainExample(ids[0], ids[0] != 0, ids[1], ids[1] != 0, jnp.asarray(advantage[part]), None, None)

    def run() -> dict:
        actor.train(examples(), None)
        jax.block_until_ready(nnx.state(actor.model))
        return {}

    return run


#### Processes


def serve(library: str) -> None:
    """Child process: for each line [program, work] on stdin takes a step and answers with its times as a JSON line."""
    programs = {}
    for line in sys.stdin:
        key = program, work = tuple(json.loads(line))
        if key not in programs:
            programs[key] = tunix(int(program), work) if library == "tunix" else own(program, work)
            programs[key]()
        start = time.process_time(), time.monotonic()
        metrics = programs[key]()
        answer = {"cpu": time.process_time() - start[0], "wall": time.monotonic() - start[1]}
        print(json.dumps(answer | {key: float(metrics[key]) for key in REPORTED if key in metrics}), flush=True)


class Child:
    def __init__(self, library: str, python: str):
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        command = [python, str(pathlib.Path(__file__).resolve()), "--serve", library]
        self.errors = ROOT / ".cache" / f"benchmark-learner-{library}.log"
        self.errors.parent.mkdir(exist_ok=True)
        with self.errors.open("w") as log:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            self.process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def step(self, program: str, work: str) -> dict:
        self.process.stdin.write(json.dumps([program, work]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # programs may print lines of their own
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{program} ended with code {self.process.wait()} before it answered; see {self.errors}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def tunix_python() -> str:
    """Python of tunix's environment, which is made if it is not there."""
    python, ready = TUNIX_FOLDER / "bin" / "python", TUNIX_FOLDER / "ready"
    if not ready.exists():
        print(f"making {TUNIX_FOLDER}, some minutes: pip install {' '.join(TUNIX)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", TUNIX_FOLDER], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TUNIX], check=True)
        ready.touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-tunix", action="store_true", help="measure our own step alone")
    parser.add_argument("--only", default="", help="only variants of our step whose name contains this, besides the plain one")
    parser.add_argument("--work", default="", choices=("equal", "ragged", "half"), help="only this work")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each program")
    parser.add_argument("--serve", choices=(OWN, "tunix"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve)

    children = {OWN: Child(OWN, sys.executable)}
    turns = [
        (OWN, name, work) for name, (_, works) in VARIANTS.items() if name == OWN or arguments.only in name for work in works
    ]
    if not arguments.without_tunix:
        children["tunix"] = Child("tunix", tunix_python())
        turns += [("tunix", str(rows), work) for rows in TUNIX_ROWS for work in ("equal", "ragged")]
    turns = [turn for turn in turns if arguments.work in ("", turn[2])]
    found: dict[tuple[str, str, str], list[dict]] = {turn: [] for turn in turns}
    for round_ in range(arguments.repeats + 1):  # the first one compiles, and takes a second step to be sure
        for turn in turns:
            answer = children[turn[0]].step(*turn[1:])
            if round_:
                found[turn].append(answer)
            else:
                print(f"compiled: {' '.join(turn)}", file=sys.stderr, flush=True)
    for child in children.values():
        child.close()
    report(found)


def report(found: dict[tuple[str, str, str], list[dict]]) -> None:
    medians = {
        turn: {key: statistics.median(answer[key] for answer in answers) for key in answers[0]} for turn, answers in found.items()
    }
    best = {}
    for (library, _, work), median in medians.items():
        if library == "tunix":
            best[work] = min(best.get(work, median["cpu"]), median["cpu"])
    print(f"{'step':<40} {'work':<7} {'CPU s':>7} {'wall s':>7} {'of tunix':>9} {'tokens':>7} {'padding':>8}")
    for (library, program, work), median in medians.items():
        name = f"tunix, micro-batches of {program} rows" if library == "tunix" else program
        ratio = f"{median['cpu'] / best[work]:>9.2f}" if work in best else " " * 9
        tokens = f"{median['perf/tokens']:>7.0f}" if library == OWN else ""
        padding = f"{median['perf/padding_fraction']:>8.2f}" if "perf/padding_fraction" in median else ""
        print(f"{name:<40} {work:<7} {median['cpu']:>7.2f} {median['wall']:>7.2f} {ratio} {tokens} {padding}")


if __name__ == "__main__":
    main()
