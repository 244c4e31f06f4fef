"""What a run needs, before it starts: memory by part, compiled shapes, tokens, FLOPs and seconds of a step, teacher's bill.

    python -m deepgrpo.plan --config=configs/math_1p5b.py --device=h200 [--devices=8] [--mfu=0.4] [--compile] [--json]

All of it is estimated, and nothing but a CPU was run. Needs neither weights nor data nor the device: a model's folder that is not
there yet is replaced by the shapes of a known model (--preset, or model.origin), and lengths by assumptions, which are printed.
If data and tokenizer are there, prompts are counted.
--compile also compiles the real optimizer step from shapes alone and shows XLA's own account of its memory beside the estimate.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo import config as config_lib
from deepgrpo.config import flags as flags_lib
from deepgrpo.config.streams import tool
from deepgrpo.curriculum import pool_class
from deepgrpo.data import dataset as dataset_lib
from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.learner import costs, packing, sharding
from deepgrpo.learner import step as programs_lib
from deepgrpo.learner.minibatch import (
    cut,
    injection_count,
    least_prompts,
    responses_per_prompt,
    step_rows,
)
from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER, Objective
from deepgrpo.learner.rows import Row
from deepgrpo.model.attention import choose_backend
from deepgrpo.model.config import SHAPES, ModelConfig, preset_shapes
from deepgrpo.model.transformer import Placement, Transformer, abstract_params
from deepgrpo.preflight import rules
from deepgrpo.preflight.rules import ORACLE
from deepgrpo.teacher.prompts import plain_prompt
from deepgrpo.telemetry.log import Console
from deepgrpo.telemetry.plan_tables import show
from deepgrpo.types import as_ids
from deepgrpo.weights.model_folder import context_problems

FLAGS = ("--device=KIND", "--devices=N", "--preset=NAME", "--mfu=SHARE", "--compile", "--json")  # named when one is mistyped
DEVICES = {  # name: JAX's device_kind (which costs.PEAKS knows), memory in GB, its bandwidth in GB/s; as the vendors state them
    "b200": ("NVIDIA B200", 180, 8000),
    "h200": ("NVIDIA H200", 141, 4800),
    "h100": ("NVIDIA H100 80GB HBM3", 80, 3350),
    "a100": ("NVIDIA A100-SXM4-80GB", 80, 2039),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40, 1555),
    "l40s": ("NVIDIA L40S", 48, 864),
    "v4": ("TPU v4", 32, 1228),
    "v5e": ("TPU v5 lite", 16, 819),
    "v5p": ("TPU v5", 95, 2765),
    "v6e": ("TPU v6 lite", 32, 1640),
    "cpu": ("cpu", 0, 0),
}


def parse(argv: list[str]) -> tuple[argparse.Namespace, config_lib.CommandLine, object]:
    """Our own flags, then the configuration's; raises ConfigError or argparse's SystemExit for what is neither."""
    parser = argparse.ArgumentParser(
        prog="python -m deepgrpo.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="and --config=PATH, --config.KEY=VALUE as for deepgrpo.train",
    )
    add = parser.add_argument
    add("--device", choices=DEVICES, help="kind of the learner's devices; default: h100, or cpu for experiments that run there")
    add("--devices", type=positive(int), default=1, help="how many of them the learner has")
    add("--mfu", type=share, default=0.4, help="model-FLOPs utilisation that the learner is assumed to reach")
    add("--bandwidth-share", type=share, default=0.5, help="share of memory bandwidth that decoding is assumed to reach")
    add("--preset", default="", help="shapes of a known model, e.g. qwen2.5-math-1.5b; default: model.path, else model.origin")
    add("--prompt-tokens", type=positive(float), help="mean of a dataset prompt; default: of the data, if it is there")
    add("--response-tokens", type=positive(float), help="mean of a response; default: a quarter of rollout.max_model_len")
    add("--problems", type=positive(int), help="of the training set; default: of the data, if it is there")
    add("--trained-share", type=share, default=1.0, help="share of the groups whose rewards differ, which train")
    add("--failure-share", type=share, default=0.5, help="share of the responses that fail, and may go to the teacher")
    add("--compile", action="store_true", help="compile the largest optimizer step and show XLA's account of its memory")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    arguments, rest = parser.parse_known_args(argv[1:])
    config, line = rules.from_command_line([argv[0], *rest], FLAGS)
    if arguments.device is None:
        arguments.device = "h100" if config.requires_accelerator else "cpu"
    return arguments, line, config


def positive(kind: type):
    def read(text: str):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return read


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


CHARACTERS_PER_TOKEN = 4  # of English text


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step is assumed to look like. Lengths are means, in tokens; problems: 0 if not known."""

    prompt: float
    response: float
    problems: int
    trained_share: float
    failure_share: float


########################################################################################################################
#  What the run is made of
########################################################################################################################


def find_model(config: Any, preset: str, notes: list[str]) -> ModelConfig:
    """The model's shapes: of --preset, of the folder model.path, or of the known model that model.origin names.

    Raises:
      ConfigError: none of them is known.
    """
    if preset:
        found, origin = preset_shapes(preset), f"--preset={preset}"
    elif (pathlib.Path(config.model.path) / "config.json").is_file():
        model = ModelConfig.from_hf(config.model.path)
        notes += [f"such a run would not start: {what}" for what, _, _ in context_problems(config, model)]
        return model
    else:
        found, origin = preset_shapes(config.model.origin) or preset_shapes(config.model.path), f"{config.model.path} is absent"
    if found is None:
        raise config_lib.ConfigError(
            f"the model's shapes are not known ({origin}): get the folder ({config.model.origin or 'model.path'}), or name one of"
            f" --preset={', '.join(SHAPES)}"
        )
    notes.append(f"{origin}: shapes are those of a table, not of the model's own config.json")
    return found


def find_work(config: Any, arguments: argparse.Namespace, notes: list[str]) -> Work:
    """Lengths and counts, each from the command line, from the data if it is there, or assumed."""
    limit = config.rollout.max_model_len
    prompt, problems = arguments.prompt_tokens, arguments.problems
    if prompt is None or problems is None:
        try:
            tokenizer = tokenizer_lib.load_tokenizer(config.model.path)
            keys = (tokenizer, config.data.template, config.data.max_prompt_length)
            agents = config.loop == "agent"
            loaded = [dataset_lib.load_problems(spec, *keys, agents=agents)[0] for spec in config.data.train]
            found = [problem for problems in loaded for problem in problems]
            prompt = prompt or float(np.mean([len(problem.prompt_ids) for problem in found]))
            problems = problems or len(found)
            notes.append(f"prompts: {problems} problems of {prompt:.0f} tokens on average, counted in the data where not given")
        except (FileNotFoundError, ValueError) as error:
            if prompt is None:
                prompt = max(1.0, min(config.data.max_prompt_length, limit) / 4)
                notes.append(
                    f"prompts of {prompt:.0f} tokens on average: a quarter of what is allowed, the data can't be counted"
                )
            if problems is None:
                what = str(error).partition("\n")[0]
                notes.append(f"the number of problems is not known ({what}): totals of the run need --problems or train.steps")
    response = arguments.response_tokens
    if response is None:
        response = max(1.0, limit / 4)
        notes.append(f"responses of {response:.0f} tokens on average: a quarter of rollout.max_model_len; see --response-tokens")
    if prompt + 1 > limit:
        raise config_lib.ConfigError(f"prompts of {prompt:.0f} tokens leave no room in rollout.max_model_len={limit}")
    notes.append(f"{arguments.trained_share:.0%} of the groups have a contrast and train; the others cost rollouts alone")
    notes.append(f"lengths of responses spread like Gamma(2), cut off at {limit} tokens of prompt and response")
    return Work(prompt, response, problems or 0, arguments.trained_share, arguments.failure_share)


def groups_of_step(config: Any, work: Work, notes: list[str]) -> list[tuple[int, int, float, int]]:
    """Groups of a step once the curriculum is full: (responses, prompt tokens, mean response tokens, stream) of each."""
    batch, n, curriculum = config.data.batch_size, responses_per_prompt(config), config.curriculum
    pool = pool_class(curriculum.pool)
    if config.loop == "agent":
        turns, tool = config.agent.max_turns, config.agent.tool_seconds
        notes.append(
            f"agents: up to {turns} turns a response and {tool:g} s a call; neither calls nor repeated prefills are counted"
        )
    if config.loop == "treerl":
        notes.append(f"treerl: {n} responses a prompt, as long as others; that they share beginnings is not counted")
    prompt = max(1, round(work.prompt))
    prefix = min(round(work.response / 2), config.rollout.max_model_len - prompt - 1)
    rest, teacher = max(1.0, work.response - prefix), config.objective.teacher_loss != "null"
    states = injection_count(batch, curriculum.injection_ratio, batch) if pool.by_ratio else 0
    dataset = batch - states if curriculum.injection_mode == "replace" else batch
    groups = [(n, prompt, work.response, MAIN)] * dataset + [(curriculum.rollout_n or n, prompt + prefix, rest, MAIN)] * states
    branches, each = pool.branch_groups(config, dataset * n * work.failure_share)
    groups += [(each, prompt + prefix, rest, BRANCH)] * (round(branches) if each else 0)
    if teacher and pool.keeps_suffixes and (pool.branches or curriculum.teacher_rows):
        groups += [(1, prompt + prefix, rest, TEACHER)] * (round(branches) if pool.branches else states)
    if len(groups) > dataset:
        notes.append(f"the pool is full, and states and branches begin {prefix} tokens into a response of average length")
    return groups


def rows_of_step(config: Any, work: Work, groups: list[tuple[int, int, float, int]]) -> list[Row]:
    """Rows with the lengths of a step's, groups without contrast left out evenly. Ids mean nothing, but tell prompts apart."""
    random, limit, rows = np.random.default_rng(0), config.rollout.max_model_len, []
    for g, (n, prompt, response, stream) in enumerate(groups):
        lengths = np.clip(np.round(random.gamma(2.0, response / 2.0, n)), 1, limit - prompt).astype(int)
        if stream != TEACHER and math.floor((g + 1) * work.trained_share) == math.floor(g * work.trained_share):
            continue
        ids = np.zeros(prompt, np.int32)
        ids[0] = g
        rows += [Row(as_ids(ids), as_ids(np.zeros(size)), 1.0, stream, 0.0, None, str(g), g, False, 1.0) for size in lengths]
    return rows


########################################################################################################################
#  Estimates
########################################################################################################################


def learner_work(config: Any, model: ModelConfig, mini_batches: list[list[Row]], shapes: list, shards: int, apart: bool) -> dict:
    """Tokens and model FLOPs of a step, packed as the learner packs them."""
    tokens, padded, used = [], 0, {}
    for rows in mini_batches:
        cells, shape = packing.choose(rows, shapes, shards, apart)
        tokens.append(sum(packing.length(piece) for cell in cells for pieces in cell.rows for piece in pieces))
        micro_batches = -(-len(cells) // shards)
        padded += micro_batches * shape.B * shape.T
        used[shape.T] = used.get(shape.T, 0) + micro_batches
    epochs = config.optim.ppo_epochs
    update = costs.update_flops(model, mini_batches, tokens) * epochs
    old = costs.update_flops(model, mini_batches[1:], tokens[1:]) / 3  # the first mini-batch of a step is on policy
    every = sum(packing.row_length(row) for rows in mini_batches for row in rows)
    return {
        "rows": sum(map(len, mini_batches)),
        "optimizer_steps": len(mini_batches) * epochs,
        "micro_batches_by_row_length": used,
        "tokens": sum(tokens),
        "spared_by_shared_prefixes": every - sum(tokens),
        "padding_share": 1 - sum(tokens) / max(1, padded),
        "flops_update": update,
        "flops_reference": costs.update_flops(model, mini_batches, tokens) / 3 if config.objective.kl_coef else 0.0,
        "flops_old_log_probs": old,
    }


def rollout_work(config: Any, model: ModelConfig, groups: list, device: str, mesh: dict, bandwidth_share: float) -> dict:
    """Sampled tokens of a step, bytes of keys and values, and seconds if nothing but memory bandwidth limits decoding."""
    vllm, limit = config.vllm, config.rollout.max_model_len
    size = jnp.dtype(config.model.dtype).itemsize
    sampled = [(n, prompt, response) for n, prompt, response, stream in groups if stream != TEACHER]
    sequences, tokens = sum(n for n, _, _ in sampled), sum(n * response for n, _, response in sampled)
    token = 2 * model.num_layers * model.num_kv_heads * model.head_size * size
    if config.rollout.engine == "vllm":
        engines, tensor = len(vllm.attach) or vllm.servers, vllm.tensor_parallel
        slots = vllm.max_num_seqs
    else:
        engines, tensor = mesh["data"] * mesh["fsdp"], mesh["tensor"]
        slots = -(-config.rollout.slots // engines)
    weights = size * model.num_parameters
    length = sum(n * (prompt + response / 2) for n, prompt, response in sampled) / sequences
    busy = max(1.0, min(slots, sequences / engines))
    bandwidth = DEVICES[device][2] * 1e9 * bandwidth_share * tensor
    seconds = tokens / engines / busy * (weights + busy * length * token) / bandwidth if bandwidth else None
    return {
        "engine": config.rollout.engine,
        "sequences": sequences,
        "tokens": tokens,
        "kv_bytes_per_token": token,
        "sequences_at_once_per_engine": slots,
        "kv_bytes_per_engine_at_full_length": slots * limit * token,
        "kv_bytes_per_engine_at_mean_length": int(busy * length * token),
        "weight_bytes_per_engine": weights,
        "devices_per_engine": tensor,
        "engines": engines,
        "seconds": seconds,
    }


def teacher_work(config: Any, work: Work, groups: list, steps: int | None, notes: list[str]) -> dict | None:
    """Corrections, tokens and money of a step and of the run, before budgets and cached replies; None: there is no teacher."""
    teacher = config.teacher
    if not teacher.enabled or not pool_class(config.curriculum.pool).asks_teacher:
        return None
    one = config.curriculum.failures == "longest_prefix"
    main = [(n, prompt, response) for n, prompt, response, stream in groups if stream == MAIN]
    corrections = [(1 - (1 - work.failure_share) ** n if one else n * work.failure_share, r) for n, _, r in main]
    count = sum(number for number, _ in corrections)
    instructions = len(plain_prompt("", "")) / CHARACTERS_PER_TOKEN
    asked = sum(number * (instructions + work.prompt + response) for number, response in corrections)
    answered = sum(number * min(response, teacher.max_tokens or math.inf) for number, response in corrections)
    money = (asked * teacher.prices[0] + answered * teacher.prices[1]) / 1e6
    a_step = {"corrections": count, "prompt_tokens": asked, "completion_tokens": answered, "money": money}
    notes.append(f"{work.failure_share:.0%} of the responses fail, and a correction is as long as a response")
    if teacher.base_url != ORACLE and not any(teacher.prices):
        notes.append("the teacher's tokens cost nothing: teacher.prices is not set")
    if config.objective.teacher_update == "post_ppo":
        notes.append("the learner's optimizer steps on the teacher's tokens alone are not counted")
    return {
        "rule_based": teacher.base_url == ORACLE,
        "per_step": a_step,
        "per_run": {name: value * steps for name, value in a_step.items()} if steps else None,
        "budget_lasts_steps": teacher.token_budget / (asked + answered) if teacher.token_budget and asked else None,
    }


def steps_of(config: Any, work: Work, sampled: float) -> int | None:
    """Steps until the run ends, None if that is not known. sampled: tokens a step."""
    epochs = config.train.epochs * (work.problems // least_prompts(config))  # of a full pool, as everywhere here
    ends = [config.train.steps or epochs, math.ceil(config.train.student_tokens / sampled)]
    return min((end for end in ends if end), default=None)


def seconds_of(config: Any, arguments: argparse.Namespace, work: float, rollout: float | None, notes: list[str]) -> dict:
    """Seconds of a step: model FLOPs `work` at the assumed utilisation, and rollouts; None where a speed is not known."""
    kind = DEVICES[arguments.device][0]
    peak = costs.peak_flops(kind, config.model.dtype)
    learner = work / (peak * arguments.mfu * arguments.devices) if peak else None
    if learner is None:
        notes.append(f"FLOP/s of {kind} in {config.model.dtype} are not known: no seconds")
    else:
        rate = f"{arguments.mfu:.0%} of {peak / 1e12:.0f} TFLOP/s a device"
        notes.append(f"the learner reaches {rate} in what the mathematics asks for; recomputation comes on top")
    if rollout is not None:
        rate = f"{arguments.bandwidth_share:.0%} of the memory bandwidth"
        notes.append(f"decoding reaches {rate}, and no answer is waited for alone")
    step = None
    if learner is not None and rollout is not None:  # with max_staleness the next rollouts run beside the update
        step = max(learner, rollout) if config.rollout.max_staleness else learner + rollout
    return {"learner": learner, "rollout": rollout, "step": step}


def memory_of(config: Any, arguments: argparse.Namespace, model: ModelConfig, shapes: list, mini_batches: int, rollout: dict):
    """Bytes on a device of the learner, by part, and of an engine beside it."""
    mesh = sharding.mesh_sizes(config.learner.mesh, arguments.devices)
    parts, shape = worst(config, model, shapes, mesh, backend_of(config, arguments.device), mini_batches)
    if config.rollout.engine == "native":
        held = {"engine_weights": "weight_bytes_per_engine", "engine_kv": "kv_bytes_per_engine_at_full_length"}
        parts |= {name: rollout[key] // mesh["tensor"] for name, key in held.items()}
    together, capacity = sum(parts.values()), DEVICES[arguments.device][1] * 10**9
    fits = together <= capacity if capacity else None
    held = {"bytes_by_part": parts, "bytes": together, "of_shape": dataclasses.asdict(shape)}
    return held | {"device_bytes": capacity, "fits": fits}


def plan(config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is estimated, as what --json prints. Allocates nothing and compiles nothing."""
    notes: list[str] = []
    if arguments.device != "cpu":
        notes.append(f"nothing was run on {arguments.device}: memory and seconds are estimates, held against XLA for CPUs alone")
    model, work = find_model(config, arguments.preset, notes), find_work(config, arguments, notes)
    mesh, attention = sharding.mesh_sizes(config.learner.mesh, arguments.devices), backend_of(config, arguments.device)
    shards = mesh["data"] * mesh["fsdp"]
    shapes = programs_lib.batch_shapes(config, step_rows(config), shards)
    groups = groups_of_step(config, work, notes)
    mini_batches = cut(rows_of_step(config, work, groups), config, 1)
    learner = learner_work(config, model, mini_batches, shapes, shards, attention == "splash")
    rollout = rollout_work(config, model, groups, arguments.device, mesh, arguments.bandwidth_share)
    if config.rollout.engine == "vllm":
        notes.append("the learner's devices hold the learner alone; vLLM takes vllm.gpu_memory_utilization of its own")
    steps = steps_of(config, work, rollout["tokens"])
    passes = steps * least_prompts(config) / work.problems if steps and work.problems else None
    if config.rollout.dynamic_sampling and not config.train.steps:
        notes.append("dynamic sampling draws further prompts, so that the passes over the data end after fewer steps")
    total = sum(value for key, value in learner.items() if key.startswith("flops_"))
    seconds = seconds_of(config, arguments, total, rollout["seconds"], notes)
    teacher = teacher_work(config, work, groups, steps, notes)
    return {
        "model": dataclasses.asdict(model) | {"parameters": model.num_parameters},
        "device": {"name": arguments.device, "count": arguments.devices, "mesh": mesh, "attention": attention},
        "memory": memory_of(config, arguments, model, shapes, len(mini_batches), rollout),
        "shapes": [dataclasses.asdict(shape) for shape in shapes],
        "work": dataclasses.asdict(work) | {"steps": steps, "passes": passes},
        "learner": learner,
        "rollout": rollout,
        "seconds": seconds | {"run": seconds["step"] * steps if seconds["step"] and steps else None},
        "teacher": teacher,
        "assumptions": notes,
    }


def backend_of(config: Any, device: str) -> str:
    """The attention backend that a run on such devices would choose."""
    if config.model.attention != "auto":
        return config.model.attention
    kind = DEVICES[device][0]
    if kind.startswith("TPU"):
        return "splash"
    return "cudnn" if kind.startswith("NVIDIA") and config.model.dtype == "bfloat16" else "xla"


def worst(config: Any, model: ModelConfig, shapes: list, mesh: dict, attention: str, mini_batches: int, **changes: Any):
    """(bytes on a device by part, shape) of the shape that needs most memory."""
    keys = dict(reference=bool(config.objective.kl_coef), mini_batches=mini_batches) | changes
    plans = [(costs.plan_memory(model, shape, config, mesh, attention, **keys), shape) for shape in shapes]
    return max(plans, key=lambda found: sum(found[0].values()))


def compiled(config: Any, model: ModelConfig, devices: int, shape: packing.Shape) -> dict[str, Any]:
    """XLA's account of the optimizer step compiled for a shape, beside the estimate for the same program."""
    found = jax.devices()[:devices]
    if len(found) < devices:
        raise config_lib.ConfigError(
            f"--compile for {devices} devices: JAX has {len(found)} of {found[0].device_kind}. JAX_PLATFORMS=cpu compiles for as"
            f" many CPU devices as are asked for"
        )
    mesh = sharding.make_mesh(config.learner.mesh, found)
    dtype = jnp.dtype(config.model.dtype)
    attention = choose_backend(config.model.attention, found[0], dtype)
    programs = programs_lib.Programs(
        Transformer(model, dtype=dtype, remat=config.model.remat, placement=Placement(attention, sharding.rows(mesh))),
        mesh,
        programs_lib.abstract_state(abstract_params(model), mesh, Objective.from_config(config.objective)),
        config,
    )
    with jax.set_mesh(mesh):
        program = programs.lower("train_step", shape).compile()
    parts, _ = worst(config, model, [shape], dict(mesh.shape), attention, 1, reference=False)
    measured, estimated = costs.compiled(program), sum(parts.values())
    return {
        "on": f"{devices} x {found[0].device_kind}",
        "attention": attention,
        "program": "train_step, without reference and engine",
        "of_shape": dataclasses.asdict(shape),
        "bytes_estimated": estimated,
        "bytes_xla": measured,
        "estimate_over_xla": estimated / measured,
    }


@tool()
def main(arguments: argparse.Namespace, line: config_lib.CommandLine, config: Any) -> None:
    if not arguments.compile:
        jax.config.update("jax_platforms", "cpu")  # a plan must not take a device's memory from whoever uses it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    found = plan(config, arguments)
    if arguments.compile:
        model = find_model(config, arguments.preset, [])
        found["compiled"] = compiled(config, model, arguments.devices, packing.Shape(**found["memory"]["of_shape"]))
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found, Console(width=None if sys.stdout.isatty() else 110, soft_wrap=True))


if __name__ == "__main__":
    flags_lib.run(main, parse, lasting=False)
