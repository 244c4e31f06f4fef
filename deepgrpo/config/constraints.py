"""Values and combinations of values that cannot work, found before anything is loaded."""

import difflib
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from deepgrpo.config import branch_rules, curriculum_rules, data_rules, diagnostics_rules, objective_rules, treerl_rules
from deepgrpo.config.data_rules import GENERATED
from deepgrpo.config.errors import ConfigError
from deepgrpo.config.flags import flatten

ORACLE = "oracle"  # teacher.base_url that stands for the rule-based teacher, served for the length of the run

READERS = ("gsm8k", "math", "aime24", "amc", "minerva", "olympiad_bench", "deepscaler", "verl", *GENERATED)  # NAME of "NAME:PATH"

CHOICES = {
    "model.dtype": ("bfloat16", "float32"),
    "model.attention": ("auto", "xla", "cudnn", "splash"),
    "model.remat": ("none", "dots", "full"),
    "data.template": ("chat", "gsm8k", "math_boxed", "qwen_math", "qwen_chat", "r1", "none", "few_shot_arithmetic"),
    "rollout.engine": ("native", "vllm"),
    "vllm.dtype": ("", "bfloat16", "float32"),
    "weights.route": ("orbax", "direct"),
    "rewards.grader": ("typed", "compat_fast", "compat_full"),
    "rewards.extract": ("default", "answer_tag", "answer_tag_lenient", "mark"),
    "loop": ("reasoning", "treerl"),
    "teacher.enable_thinking": ("true", "false", "unset"),
    "judge.enable_thinking": ("true", "false", "unset"),
    "teacher.oracle": ("carry_chain", "arithmetic", "solutions"),
    **curriculum_rules.CHOICES,
    **branch_rules.CHOICES,
    **objective_rules.CHOICES,
    "optim.schedule": ("constant", "cosine"),
    "optim.mini_batch_by": ("groups", "rows"),
    "evaluation.truncated": ("zero", "graded"),
    "evaluation.second_grader": ("", "typed", "compat_fast", "compat_full"),
    "checkpoint.resume": ("auto", "never"),
}

VLLM_TEMPERATURES = "[0.01, 2]"  # above it refuses; anything between 0 and 0.01 it silently takes for 0.01

RANGES = {  # key: interval of its value or of each element
    "seed": "[0, 2147483647]",
    "train.epochs": "[1, inf)",
    "train.steps": "[0, inf)",
    "train.student_tokens": "[0, inf)",
    "data.batch_size": "[1, inf)",
    "data.max_prompt_length": "[1, inf)",
    "data.limit": "[0, inf)",
    "data.validation_limit": "[0, inf)",
    "rollout.n": "[2, inf)",
    "rollout.temperature": "(0, inf)",
    "rollout.top_p": "(0, 1]",
    "rollout.top_k": "[-1, inf)",
    "rollout.max_model_len": "[2, inf)",
    "rollout.slots": "[1, inf)",
    "rollout.decode_steps": "[1, inf)",
    "rollout.max_staleness": "[0, 1]",
    "rollout.mismatch_alert": "[0, inf)",
    "vllm.servers": "[1, inf)",
    "vllm.port": "[1, 65535]",
    "vllm.tensor_parallel": "[1, inf)",
    "vllm.gpu_memory_utilization": "(0, 1]",
    "vllm.max_num_seqs": "[1, inf)",
    "vllm.max_concurrent": "[1, inf)",
    "vllm.block_size": "[1, inf)",
    "vllm.request_deadline": "[10, inf)",
    "vllm.control_deadline": "(0, inf)",
    "vllm.load_deadline": "(0, inf)",
    "vllm.start_deadline": "(0, inf)",
    "vllm.self_test": "[0, inf)",
    "weights.keep": "[1, inf)",
    "weights.attempts": "[1, inf)",
    "weights.tolerance": "[0, inf)",
    "rewards.weight": "[0, inf)",
    "rewards.workers": "[1, inf)",
    "rewards.waiting_workers": "[1, inf)",
    "rewards.deadline": "(0, inf)",
    "judge.temperatures": "[0, inf)",
    "judge.attempts": "[1, inf)",
    "judge.timeout": "(0, inf)",
    "judge.max_tokens": "[0, inf)",
    "judge.max_concurrent": "[1, inf)",
    "judge.token_budget": "[0, inf)",
    "judge.money_budget": "[0, inf)",
    "judge.prompt_price": "[0, inf)",
    "judge.completion_price": "[0, inf)",
    "sandbox.max_concurrent": "[1, inf)",
    "sandbox.seconds": "(0, inf)",
    "teacher.temperatures": "[0, inf)",
    "teacher.attempts": "[1, inf)",
    "teacher.timeout": "(0, inf)",
    "teacher.max_tokens": "[0, inf)",
    "teacher.max_concurrent": "[1, inf)",
    "teacher.min_prefix_match_tokens": "[0, inf)",
    "teacher.min_prefix_match_ratio": "[0, 1]",
    "teacher.min_suffix_len": "[0, inf)",
    "teacher.oracle_error_rate": "[0, 1]",
    "teacher.token_budget": "[0, inf)",
    "teacher.money_budget": "[0, inf)",
    "teacher.prompt_price": "[0, inf)",
    "teacher.completion_price": "[0, inf)",
    **curriculum_rules.RANGES,
    **branch_rules.RANGES,
    **objective_rules.RANGES,
    **treerl_rules.RANGES,
    **diagnostics_rules.RANGES,
    "optim.lr": "(0, inf)",
    "optim.warmup_steps": "[0, inf)",
    "optim.b1": "[0, 1)",
    "optim.b2": "[0, 1)",
    "optim.eps": "(0, inf)",
    "optim.weight_decay": "[0, inf)",
    "optim.grad_clip": "(0, inf)",
    "optim.mini_batch_prompts": "[1, inf)",
    "optim.ppo_epochs": "[1, inf)",
    "learner.micro_batch_tokens": "[1, inf)",
    "learner.buckets": "[1, inf)",
    "learner.logprob_block": "[1, inf)",
    "learner.peak_flops": "[0, inf)",
    "learner.num_processes": "[1, inf)",
    "learner.process_id": "[0, inf)",
    "validation.every": "[0, inf)",
    "validation.n": "[1, inf)",
    "validation.temperature": "[0, inf)",
    "validation.top_p": "(0, 1]",
    "evaluation.n": "[1, inf)",
    "evaluation.temperature": "[0, inf)",
    "evaluation.top_p": "(0, 1]",
    "evaluation.top_k": "[-1, inf)",
    "evaluation.max_new_tokens": "[0, inf)",
    "evaluation.chunk": "[1, inf)",
    "checkpoint.every": "[0, inf)",
    "checkpoint.keep": "[1, inf)",
    "telemetry.rollouts_every": "[0, inf)",
}


def inside(value: float, interval: str) -> bool:
    """Whether `value` lies in an interval as written in mathematics, `(0, 1]`; `inf` stands for no bound."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    low, high = (float(end) for end in interval[1:-1].split(","))
    return (value > low or (interval[0] == "[" and value == low)) and (value < high or (interval[-1] == "]" and value == high))


def problems(config: config_dict.ConfigDict, flat: Mapping[str, Any]) -> list[str]:
    """Returns every problem of a configuration's values, `flat` being the same by dotted key."""
    found = []
    for key, allowed in CHOICES.items():
        if flat[key] not in allowed:
            near = difflib.get_close_matches(str(flat[key]), allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            found.append(f"{key} = {flat[key]!r}: expected one of {', '.join(allowed)}{hint}")
    for key, interval in RANGES.items():
        values = flat[key] if isinstance(flat[key], tuple) else (flat[key],)
        if not all(inside(value, interval) for value in values):
            found.append(f"{key} = {flat[key]!r}: expected {'each ' if isinstance(flat[key], tuple) else ''}in {interval}")
    found += data_rules.problems(config.data, READERS)
    # A rule over a value that is wrong by itself would only add noise.
    broken = {problem.partition(" ")[0] for problem in found}
    for keys, fits, expected in rules(config):
        if not fits and not broken.intersection(keys):
            found.append(f"{', '.join(f'{key} = {flat[key]!r}' for key in keys)}: {expected}")
    return found


Rule = tuple[tuple[str, ...], bool, str]  # keys, whether their values fit, what is expected and what to do


def rules(config: config_dict.ConfigDict) -> list[Rule]:
    """Only what the run will use is judged: without injection nobody asks the teacher."""
    injects = config.curriculum.pool != "none"
    return (
        size_rules(config)
        + process_rules(config)
        + distribution_rules(config)
        + objective_rules.rules(config)
        + reward_rules(config)
        + evaluation_rules(config)
        + (judge_rules(config) if config.judge.base_url else [])
        + (vllm_rules(config) if config.rollout.engine == "vllm" else [])
        + (curriculum_rules.rules(config) if injects else [])
        + curriculum_rules.start_rules(config)
        + branch_rules.rules(config)
        + treerl_rules.rules(config)
        + diagnostics_rules.rules(config)
        + (teacher_rules(config) if injects and config.teacher.enabled else [])
    )


def size_rules(config: config_dict.ConfigDict) -> list[Rule]:
    data, rollout, learner, optim = config.data, config.rollout, config.learner, config.optim
    return [
        (
            ("name",),
            bool(re.fullmatch(r"[\w][\w.+=-]*", str(config.name))),
            "expected a folder's name: letters, digits and . _ - + =",
        ),
        (("data.train",), bool(data.train), "expected at least one training set; add --config.data.train=NAME:PATH"),
        (
            ("validation.every", "data.validation"),
            config.validation.every == 0 or bool(data.validation),
            "validation needs a validation set; name one, or set --config.validation.every=0",
        ),
        (
            ("data.max_prompt_length", "rollout.max_model_len"),
            data.max_prompt_length < rollout.max_model_len,
            "the longest prompt must leave room for a response; raise rollout.max_model_len or lower data.max_prompt_length",
        ),
        (
            ("optim.mini_batch_prompts", "data.batch_size"),
            optim.mini_batch_prompts <= data.batch_size,
            "an optimizer step cannot hold more prompts than a training step; lower optim.mini_batch_prompts",
        ),
        (
            ("optim.schedule", "train.steps", "train.student_tokens", "curriculum.injection_mode", "rollout.dynamic_sampling"),
            optim.schedule == "constant" or bool(config.train.steps) or steps_are_known(config),
            "the cosine ends with the run, and a token budget, states in the place of prompts or dynamic sampling leave its "
            "steps open; set train.steps (python -m deepgrpo.plan estimates them), or optim.schedule=constant",
        ),
        (
            ("learner.buckets",),
            bool(learner.buckets) and list(learner.buckets) == sorted(set(learner.buckets)),
            "expected at least one row length, in rising order",
        ),
        (
            ("learner.buckets", "rollout.max_model_len"),
            not learner.buckets or learner.buckets[-1] >= rollout.max_model_len,
            "the last bucket must hold the longest sequence; append rollout.max_model_len to learner.buckets",
        ),
        (
            ("learner.micro_batch_tokens", "learner.buckets"),
            not learner.buckets or learner.micro_batch_tokens >= learner.buckets[-1],
            "a micro-batch must hold one row of the longest bucket; raise learner.micro_batch_tokens",
        ),
        (
            ("learner.mesh",),
            len(learner.mesh) == 3 and learner.mesh.count(-1) <= 1 and all(size == -1 or size > 0 for size in learner.mesh),
            "expected devices along (data, fsdp, tensor), at most one of them -1 (what is left)",
        ),
        (
            ("model.attention", "model.dtype"),
            config.model.attention != "cudnn" or config.model.dtype == "bfloat16",
            "cuDNN's attention is for bfloat16; set model.dtype=bfloat16, or model.attention=xla",
        ),
        (
            ("validation.n", "validation.temperature"),
            config.validation.n == 1 or config.validation.temperature > 0,
            "greedy answers to one problem are all the same; set validation.n=1 or a temperature above 0",
        ),
    ]


def replaces_none(config: config_dict.ConfigDict) -> bool:
    """Whether every step takes a full batch of dataset prompts at its start."""
    return config.curriculum.pool == "none" or config.curriculum.injection_mode != "replace"


def steps_are_known(config: config_dict.ConfigDict) -> bool:
    """Whether the passes over the data alone say how many steps a run has."""
    return replaces_none(config) and not config.train.student_tokens and not config.rollout.dynamic_sampling


def process_rules(config: config_dict.ConfigDict) -> list[Rule]:
    learner = config.learner
    return [
        (
            ("learner.coordinator",),
            not learner.coordinator or bool(re.fullmatch(r"\S+:\d+", learner.coordinator)),
            "expected HOST:PORT of process 0",
        ),
        (
            ("learner.num_processes", "learner.coordinator"),
            learner.num_processes == 1 or bool(learner.coordinator),
            "several processes need learner.coordinator=HOST:PORT (schedulers that JAX knows set neither)",
        ),
        (
            ("learner.process_id", "learner.num_processes"),
            learner.process_id < learner.num_processes,
            "processes are numbered from 0; expected a number below learner.num_processes",
        ),
    ] + [((key, "learner.num_processes"), fits, text) for key, fits, text in several_rules(config, learner.num_processes)]


def several_rules(config: config_dict.ConfigDict, processes: int) -> list[tuple[str, bool, str]]:
    """(key, whether its value fits, what to do) for a learner of so many processes."""
    alone = processes == 1
    return [
        (
            "rollout.engine",
            alone or config.rollout.engine == "vllm",
            "the native engine lives in one process with its learner; use rollout.engine=vllm",
        ),
        (
            "weights.route",
            alone or config.weights.route == "orbax",
            "route direct reads the whole policy in one process; use weights.route=orbax",
        ),
        (
            "weights.folder",
            alone or bool(config.weights.folder),
            "the learner's processes write a snapshot together; name a folder that all their hosts share",
        ),
    ]


def process_problems(config: config_dict.ConfigDict, processes: int) -> list[str]:
    """What a learner of so many processes cannot work with: for those whose number a scheduler decided."""
    found = several_rules(config, processes)
    return [f"{key}, with {processes} processes of the learner: {text}" for key, fits, text in found if not fits]


def distribution_rules(config: config_dict.ConfigDict) -> list[Rule]:
    rollout = config.rollout
    return [
        (
            ("rollout.top_p", "rollout.top_k"),
            rollout.top_p == 1 and rollout.top_k == -1,
            "the policy that is trained is the whole distribution; rollouts from a part of it would bias every ratio. "
            "Use top_p=1 and top_k=-1 (a lower rollout.temperature is allowed, and trained at)",
        ),
    ]


def evaluation_rules(config: config_dict.ConfigDict) -> list[Rule]:
    data, keys, best = config.data, config.evaluation, config.checkpoint.best_metric
    return [
        (
            ("evaluation.n", "evaluation.temperature"),
            keys.n == 1 or keys.temperature > 0,
            "greedy answers to one problem are all the same; set evaluation.n=1 or a temperature above 0",
        ),
        (("evaluation.top_k",), keys.top_k != 0, "expected -1 (off) or at least 1"),
        (
            ("evaluation.max_new_tokens", "rollout.max_model_len"),
            keys.max_new_tokens < config.rollout.max_model_len,
            "a response and its prompt share the context; raise rollout.max_model_len or lower evaluation.max_new_tokens",
        ),
        (
            ("evaluation.temperature",),
            config.rollout.engine != "vllm" or keys.temperature == 0 or inside(keys.temperature, VLLM_TEMPERATURES),
            f"vLLM samples at 0 (greedy) or at temperatures in {VLLM_TEMPERATURES}",
        ),
        (
            ("data.selection", "data.validation"),
            not set(data.selection) & set(data.validation),
            "a set that chooses the checkpoint cannot be reported as well; take it out of one of them",
        ),
        (
            ("data.selection", "validation.every"),
            not data.selection or config.validation.every > 0,
            "sets that choose the best checkpoint are used by validations; set validation.every above 0",
        ),
        (
            ("checkpoint.best_metric", "data.selection"),
            not (best and data.selection) or best.startswith("selection/"),
            "the metric is of a reported set; name one that begins with selection/, or leave data.selection empty",
        ),
    ]


def reward_rules(config: config_dict.ConfigDict) -> list[Rule]:
    """Only the form of the entries: the functions that they name are imported when the run starts, before its data are read."""
    rewards = config.rewards
    path, number = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
    extras = [entry.rpartition("=")[0] for entry in rewards.extra]
    sources = [entry.partition("=")[0] for entry in rewards.graders]
    return [
        (
            ("rewards.extra",),
            all(re.fullmatch(rf"([a-z_]+|{path})={number}", entry) for entry in rewards.extra)
            and len(set(extras)) == len(extras),
            "expected NAME=WEIGHT each, NAME a reward of rewards/weighted.py or package.module:function, none twice",
        ),
        (
            ("rewards.graders",),
            all(re.fullmatch(rf"[^=]+={path}", entry) for entry in rewards.graders) and len(set(sources)) == len(sources),
            "expected SOURCE=package.module:function each, no source twice",
        ),
        (
            ("rewards.weight", "rewards.extra"),
            rewards.weight > 0 or bool(rewards.extra),
            "nothing would be rewarded; set a weight above 0 or add a reward to rewards.extra",
        ),
    ]


def vllm_rules(config: config_dict.ConfigDict) -> list[Rule]:
    rollout, vllm, validation = config.rollout, config.vllm, config.validation
    return [
        (
            ("rollout.temperature",),
            inside(rollout.temperature, VLLM_TEMPERATURES),
            f"vLLM samples at temperatures in {VLLM_TEMPERATURES}",
        ),
        (
            ("validation.temperature",),
            validation.temperature == 0 or inside(validation.temperature, VLLM_TEMPERATURES),
            f"vLLM samples at 0 (greedy) or at temperatures in {VLLM_TEMPERATURES}",
        ),
        (
            ("vllm.attach",),
            all(re.match(r"https?://[^/\s]+", url) for url in vllm.attach) and len(set(vllm.attach)) == len(vllm.attach),
            "expected http://HOST:PORT each, no two the same",
        ),
        (
            ("vllm.gpu_ids", "vllm.servers", "vllm.tensor_parallel"),
            len(vllm.gpu_ids) in (0, vllm.servers * vllm.tensor_parallel) and len(set(vllm.gpu_ids)) == len(vllm.gpu_ids),
            "expected servers times tensor_parallel different GPUs, or none named",
        ),
        (
            ("vllm.gpu_ids", "vllm.servers"),
            bool(vllm.gpu_ids) or vllm.servers == 1 or bool(vllm.attach) or not config.requires_accelerator,
            "several servers would share the visible GPUs; name each one's with vllm.gpu_ids",
        ),
    ]


def teacher_rules(config: config_dict.ConfigDict) -> list[Rule]:
    teacher = config.teacher
    return [
        (
            ("teacher.base_url",),
            teacher.base_url == ORACLE or bool(re.match(r"https?://[^/\s]+", teacher.base_url)),
            f"expected http://HOST:PORT/v1 or {ORACLE}",
        ),
        (
            ("teacher.base_url", "teacher.oracle", "data.train"),
            teacher.base_url != ORACLE
            or teacher.oracle == "solutions"
            or all(name.partition(":")[0] == teacher.oracle for name in config.data.train),
            "the rule only knows its own questions; set teacher.oracle to the data set's, or teacher.base_url to an endpoint",
        ),
        (
            ("teacher.oracle", "teacher.oracle_solutions"),
            teacher.base_url != ORACLE or (teacher.oracle == "solutions") == bool(teacher.oracle_solutions),
            "the rule solutions needs its file of questions and answers, the others take none",
        ),
        (("teacher.temperatures",), bool(teacher.temperatures), "expected at least one temperature"),
        (
            ("teacher.money_budget", "teacher.prompt_price", "teacher.completion_price"),
            teacher.money_budget == 0 or teacher.prompt_price + teacher.completion_price > 0,
            "a money budget needs prices",
        ),
        (
            ("teacher.replay",),
            not teacher.replay or pathlib.Path(teacher.replay).is_dir(),
            "expected the folder of an earlier run's replies (<run>/teacher); it does not exist",
        ),
    ]


def judge_rules(config: config_dict.ConfigDict) -> list[Rule]:
    judge = config.judge
    return [
        (("judge.base_url",), bool(re.match(r"https?://[^/\s]+", judge.base_url)), "expected http://HOST:PORT/v1"),
        (("judge.model", "judge.base_url"), bool(judge.model), "expected the name of the model that the endpoint serves"),
        (("judge.temperatures",), bool(judge.temperatures), "expected at least one temperature"),
        (
            ("judge.money_budget", "judge.prompt_price", "judge.completion_price"),
            judge.money_budget == 0 or judge.prompt_price + judge.completion_price > 0,
            "a money budget needs prices",
        ),
        (
            ("judge.replay",),
            not judge.replay or pathlib.Path(judge.replay).is_dir(),
            "expected the folder of an earlier run's replies (<run>/judge); it does not exist",
        ),
    ]


def validate(config: config_dict.ConfigDict) -> None:
    """Raises one ConfigError with every value out of its range and every combination that cannot work."""
    if found := problems(config, flatten(config)):
        plural = f"{len(found)} problems" if len(found) > 1 else "1 problem"
        raise ConfigError("\n  ".join([f"configuration error (values): {plural}", *found]))
