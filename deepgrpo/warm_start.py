"""Makes the student of a demo: a small Qwen2 that knows the task and is then taught to be sloppy.

    python -m deepgrpo.warm_start --config=configs/carry_chain.py

Two phases of supervised training from scratch, on text from the task's generator (`data.carry_chain`, `data.lookup_chain`). The
first, on clean solutions, teaches the algorithm. The second, short, on solutions that forget carries or look-ups, hides it: such
a step is then right with a small probability, a whole chain never. Sloppy text alone would not do: a student that never learnt
when to carry has nothing that reinforcement could bring out. The recipe is `warm_start()` in the experiment's file; its hash
names the folder, so a student is made once and a changed recipe makes another one.
"""

import functools
import importlib
import json
import pathlib
import runpy
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from deepgrpo import config as config_lib
from deepgrpo.config import flags
from deepgrpo.config.streams import tool
from deepgrpo.data import templates
from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.preflight import rules
from deepgrpo.weights import files, hf

RECORD = "warm_start.json"  # in the student's folder: the recipe that made it and what it can do
STEPS_PER_CALL = 50  # of one compiled scan
MEASURED = 256  # held-out questions of the final measurement


def main(config, line) -> None:
    """Makes the student in `config.model.path`, unless it is there already."""
    path, folder = line.file, pathlib.Path(config.model.path)
    make_recipe = runpy.run_path(path).get("warm_start")
    if make_recipe is None:
        raise config_lib.ConfigError(
            f"{path} has no function warm_start(), which returns the recipe; expected an experiment like configs/carry_chain.py"
        )
    recipe = make_recipe().to_dict()
    if (folder / RECORD).is_file():
        record = json.loads((folder / RECORD).read_text())
        if record["fingerprint"] != task_of(recipe).fingerprint(recipe):
            raise config_lib.ConfigError(
                f"{folder} holds a student of another recipe than that of {path}: remove it, or set another --config.model.path"
            )
        print(f"warm start: cached in {folder}\n{report(record['ability'])}")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise config_lib.ConfigError(
            f"model.path = {folder} exists and is no student of this program (it has no {RECORD}): remove it, or set another "
            "--config.model.path"
        )
    began = time.monotonic()
    ability = make_student(recipe, folder)
    print(f"warm start: {time.monotonic() - began:.0f} s -> {folder}\n{report(ability)}")


def task_of(recipe: Mapping[str, Any]) -> Any:
    """The module of the task that a recipe's student learns."""
    return importlib.import_module(f"deepgrpo.data.{recipe.get('task', 'carry_chain')}")


def make_student(recipe: Mapping[str, Any], folder: pathlib.Path, log: Callable[[str], None] = print) -> dict[str, float]:
    """Trains a student and writes its Hugging Face folder, which appears at once and complete; returns `measure`'s result.

    Raises:
      RuntimeError: after the clean phase it cannot do the task well enough to hide anything.
    """
    task, config = task_of(recipe), model_config(recipe)
    model = Transformer(config, dtype=jnp.float32, unroll=config.num_layers)
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        task.build_tokenizer(tokenizer_folder)
        tokenizer = tokenizer_lib.load_tokenizer(tokenizer_folder)
        one = jnp.zeros((1, 1), jnp.int32)
        params = model.init(jax.random.key(recipe["seed"]), one, one, one + 1)["params"]
        update = make_update(model, prompt_length(task, tokenizer), recipe)
        for number, phase in enumerate(("clean", "sloppy")):
            tokens = corpus(recipe, phase, np.random.default_rng((recipe["seed"], number)), tokenizer)
            params = train(update, params, tokens, recipe[phase]["lr"], lambda text, phase=phase: log(f"{phase} {text}"))
            ability = measure(task, model, params, tokenizer)
            if phase == "clean" and ability["chain_greedy"] < recipe["required_clean"]:
                raise RuntimeError(
                    f"the clean phase ended with {ability['chain_greedy']:.3f} of the held-out chains right, the recipe requires "
                    f"{recipe['required_clean']}: raise clean.steps, or try another seed"
                )
        with files.new_folder(folder) as temporary:
            hf.save(params, config, temporary, jnp.float32, tokenizer_from=tokenizer_folder)
            record = {"fingerprint": task.fingerprint(recipe), "recipe": recipe, "ability": ability}
            (temporary / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            check_tokenizer(task, temporary, tokenizer)
    return ability


def model_config(recipe: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        model_type="qwen2",
        vocab_size=task_of(recipe).EMBEDDING_ROWS,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
        max_position_embeddings=256,
        **recipe["model"],
    )


#### Text


def prompt_length(task: Any, tokenizer: tokenizer_lib.Tokenizer) -> int:
    """Every prompt of the task is so many tokens long."""
    return len(templates.chat(next(task.questions("train", seed=0)), tokenizer))


def encode(task: Any, questions: list[str], answers: list[str], tokenizer: tokenizer_lib.Tokenizer) -> np.ndarray:
    """int32[n, T + 1]: prompts as training will see them, then answers and the end of the turn. All are of one length."""
    frame = tokenizer.apply_chat_template(
        [{"role": "user", "content": "QUESTION"}], tokenize=False, add_generation_prompt=True
    )  # once: rendering a template costs more than all the rest
    texts = [frame.replace("QUESTION", q) + a + task.END for q, a in zip(questions, answers, strict=True)]
    return np.array(tokenizer(texts)["input_ids"], np.int32)


def corpus(recipe: Mapping[str, Any], phase: str, rng: np.random.Generator, tokenizer: tokenizer_lib.Tokenizer) -> np.ndarray:
    """int32[steps, B, T + 1]: what a phase trains on, each row once."""
    steps, rows, forget = recipe[phase]["steps"], recipe["batch_size"], recipe[phase]["forget"]
    task = task_of(recipe)
    stream = task.questions("train", seed=int(rng.integers(2**31)))
    questions = [next(stream) for _ in range(steps * rows)]
    tokens = encode(task, questions, [task.sloppy_solution(q, forget, rng) for q in questions], tokenizer)
    return tokens.reshape(steps, rows, -1)


def check_tokenizer(task: Any, folder: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Raises RuntimeError if lying beside the model changed the tokenizer: a model type brings rules of its own."""
    text = "".join(task.VOCABULARY)
    found, expected = tokenizer_lib.load_tokenizer(str(folder))(text)["input_ids"], tokenizer(text)["input_ids"]
    if found != expected:
        raise RuntimeError(f"beside the model the tokenizer encodes {text!r} as {found}, in training it was {expected}")


#### Training


def response_logps(model: Transformer, params: dict, tokens: jax.Array, prompt: int) -> jax.Array:
    """float32[B, R, V]: log-probs at the response's positions of int32[B, prompt + R]."""
    inputs = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    hidden, _ = model.apply({"params": params}, inputs, positions, jnp.ones_like(inputs))
    return jax.nn.log_softmax(model.apply({"params": params}, hidden[:, prompt - 1 :], method="logits"))


def make_optimizer(recipe: Mapping[str, Any]) -> optax.GradientTransformation:
    """Muon on the matrices, Adam on the rest: here it needs a fraction of AdamW's steps. The learning rate comes later."""

    def matrices(params):
        layers = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)  # kernels are [L, in, out]
        return jax.tree_util.tree_map_with_path(lambda path, _: layers if path[-1].key == "kernel" else None, params)

    muon = contrib.muon(1.0, adam_b2=recipe["b2"], muon_weight_dimension_numbers=matrices)
    return optax.chain(optax.clip_by_global_norm(recipe["grad_clip"]), muon)


def make_update(model: Transformer, prompt: int, recipe: Mapping[str, Any]) -> Callable:
    """Returns (params, optimizer state | None, tokens int32[n, B, T + 1], lr float32[n]) -> (params, state, losses), compiled."""
    optimizer, observed = make_optimizer(recipe), getattr(task_of(recipe), "observed", None)

    def loss(params, tokens):
        logps = response_logps(model, params, tokens, prompt)
        learned = None if observed is None else ~observed(tokens[:, prompt:])[..., None]
        return -jnp.take_along_axis(logps, tokens[:, prompt:, None], -1).mean(where=learned)

    def step(carry, batch):
        params, state = carry
        tokens, lr = batch
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, jax.tree.map(lambda u: lr * u, updates)), state), value

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, tokens, lr):
        (params, state), losses = jax.lax.scan(step, (params, state), (tokens, lr))
        return params, state, losses

    return lambda params, state, *batches: update(params, optimizer.init(params) if state is None else state, *batches)


def learning_rates(peak: float, steps: int) -> np.ndarray:
    """float32[steps]: up linearly in the first twentieth, then down to a twentieth of the peak along a cosine."""
    warm = max(1, steps // 20)
    progress = np.clip((np.arange(steps) - warm) / max(1, steps - warm), 0, 1)
    decayed = 0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * progress))
    return (peak * np.minimum(np.arange(steps) / warm, decayed)).astype(np.float32)


def train(update: Callable, params: dict, tokens: np.ndarray, peak: float, log: Callable[[str], None]) -> dict:
    """One phase over int32[steps, B, T + 1], with a fresh optimizer; returns the parameters."""
    steps, rates, state = len(tokens), learning_rates(peak, len(tokens)), None
    for first in range(0, steps, STEPS_PER_CALL):
        part = slice(first, first + STEPS_PER_CALL)
        params, state, losses = update(params, state, tokens[part], rates[part])
        if part.stop % (2 * STEPS_PER_CALL) == 0 or part.stop >= steps:
            log(f"{min(part.stop, steps)}/{steps} loss {np.asarray(losses)[-5:].mean():.4f}")
    return params


#### What the student can do


def measure(task: Any, model: Transformer, params: dict, tokenizer: tokenizer_lib.Tokenizer) -> dict[str, float]:
    """Teacher-forced on held-out solutions: how a step comes out after a right prefix, and how a whole chain does.

    At temperature 1 these are exact probabilities, not counts: a chain's is the product of its tokens', without those that an
    environment writes.

    Returns:
      {hard | other | chain}_{sampled | greedy}: share of the steps that the sloppy text gets wrong (`hard_steps` of the task), of
      the other steps, and of the whole chains; 0 where there are none.
    """
    questions = [row["question"] for row in task.problems("heldout", MEASURED)]
    tokens = encode(task, questions, [task.solution(q) for q in questions], tokenizer)
    prompt, steps = prompt_length(task, tokenizer), task.STEPS
    logps = np.asarray(jax.jit(functools.partial(response_logps, model, prompt=prompt))(params, jnp.asarray(tokens)))
    wanted = tokens[:, prompt:]  # [n, R]
    line = len(task.solution(questions[0]).partition("\n")[0]) + 1  # tokens a step: one a character
    observed = task.observed(wanted) if hasattr(task, "observed") else np.zeros(wanted.shape, bool)
    sampled = np.where(observed, 0.0, np.take_along_axis(logps, wanted[..., None], -1)[..., 0].astype(np.float64))
    greedy = (logps.argmax(-1) == wanted) | observed
    per_step = np.exp(sampled[:, : steps * line].reshape(-1, steps, line).sum(-1))
    per_step_greedy = greedy[:, : steps * line].reshape(-1, steps, line).all(-1)
    hard = np.array([task.hard_steps(q) for q in questions])

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if values.size else 0.0

    return {
        "hard_sampled": mean(per_step[hard]),
        "hard_greedy": mean(per_step_greedy[hard]),
        "other_sampled": mean(per_step[~hard]),
        "other_greedy": mean(per_step_greedy[~hard]),
        "chain_sampled": float(np.exp(sampled.sum(-1)).mean()),
        "chain_greedy": float(greedy.all(-1).mean()),
    }


def report(ability: Mapping[str, float]) -> str:
    def row(name: str, kind: str) -> str:
        return f"  {name:<31} {ability[f'{kind}_sampled']:>9.2g}   {ability[f'{kind}_greedy']:>6.2g}"

    head = f"  {'right after a right prefix':<31} {'sampled':>9}   {'greedy':>6}"
    return "\n".join([head, row("hard steps", "hard"), row("other steps", "other"), row("whole chains", "chain")])


if __name__ == "__main__":
    flags.run(tool()(main), rules.from_command_line, lasting=False)
