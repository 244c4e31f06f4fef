"""What the value of each key may be by itself: one of a few words, the name of a data set, or a number in an interval.

Numbers are finite and at least 0; the tables below hold the exceptions.
"""

import difflib
import math
import re
from typing import Any

from deepgrpo.curriculum import POOLS
from deepgrpo.data.dataset import READERS
from deepgrpo.learner import TEACHER_LOSSES

GENERATED = {  # data sets that come from a generator, not from a file: what follows their name
    "carry_chain": (r"(train|heldout):0*[1-9]\d*", "SPLIT:COUNT"),
    "lookup_chain": (r"(train|heldout):0*[1-9]\d*", "SPLIT:COUNT"),
    "stdlib": (r"(train|heldout):0*[1-9]\d*", "SPLIT:COUNT"),
    "reasoning_gym": (r"\w+:(train|heldout):0*[1-9]\d*(:.*)?", "GENERATOR:SPLIT:COUNT[:OPTIONS]"),
    "arithmetic": (r"(train|heldout):0*[1-9]\d*(:[1-3])?", "SPLIT:COUNT or SPLIT:COUNT:DIGITS, DIGITS 1 to 3"),
}

CHOICES = {
    "model.dtype": ("bfloat16", "float32"),
    "model.attention": ("auto", "xla", "cudnn", "splash"),
    "model.remat": ("none", "dots", "full"),
    "data.template": ("chat", "gsm8k", "math_boxed", "qwen_math", "qwen_chat", "r1", "none", "few_shot_arithmetic"),
    "rollout.engine": ("native", "vllm"),
    "weights.route": ("orbax", "direct"),
    "rewards.grader": ("typed", "compat_fast", "compat_full"),
    "rewards.extract": ("default", "answer_tag", "answer_tag_lenient", "mark"),
    "loop": ("reasoning", "treerl", "agent"),
    "teacher.enable_thinking": ("true", "false", "unset"),
    "judge.enable_thinking": ("true", "false", "unset"),
    "curriculum.pool": POOLS,
    "curriculum.injection_mode": ("add", "replace"),
    "curriculum.failures": ("all", "longest_prefix"),
    "curriculum.cut": ("teacher", "own", "random", "solution"),
    "curriculum.suffix_sft": ("off", "epoch_local", "post_step"),
    "branches.segment_method": ("sp", "tp", "fp"),
    "objective.advantage": ("group_mean", "grpo_std", "rloo"),
    "objective.zero_gradient_rows": ("drop", "keep"),
    "objective.overlong": ("none", "mask", "soft"),
    "objective.ratio": ("token", "sequence", "sequence_token"),
    "objective.aggregation": ("token_mean", "sequence_mean", "dr_grpo"),
    "objective.kl_type": ("low_var_kl", "kl", "abs", "mse", "k1", "k2", "k3", "off"),
    "objective.teacher_loss": TEACHER_LOSSES,
    "objective.teacher_update": ("joint", "post_ppo"),
    "objective.teacher_reduction": ("mixed_token_mean", "separate_stream_mean"),
    "optim.schedule": ("constant", "cosine"),
    "evaluation.truncated": ("zero", "graded"),
    "evaluation.second_grader": ("", "typed", "compat_fast", "compat_full"),
}

POSITIVE = {  # by section, the keys that must be more than 0
    "train": "epochs",
    "data": "batch_size max_prompt_length",
    "rollout": "temperature slots",
    "vllm": "servers tensor_parallel max_num_seqs",
    "rewards": "workers deadline",
    "agent": "max_turns observation_tokens tool_seconds tool_workers",
    "judge": "timeout max_concurrent",
    "teacher": "attempts timeout max_concurrent",
    "curriculum": "min_remaining_tokens retire_after",
    "branches": "tokens_per_node n_branch_points sample_size_per_step batch_threshold",
    "objective": "clip_high luffy_gamma snis_beta",
    "optim": "lr grad_clip mini_batch_prompts ppo_epochs",
    "optim.teacher": "mini_batch_rows",
    "learner": "micro_batch_tokens buckets logprob_block",
    "validation": "n",
    "evaluation": "n",
    "checkpoint": "keep",
}
INTERVALS = {  # other exceptions, as mathematics writes them
    "seed": "[0, 2147483647]",
    "rollout.n": "[2, inf)",
    "rollout.max_model_len": "[2, inf)",
    "rollout.max_staleness": "[0, 1]",
    "vllm.gpu_memory_utilization": "(0, 1]",
    "vllm.request_deadline": "[10, inf)",
    "rewards.threshold": "(-inf, inf)",
    "teacher.temperatures": "[0, inf)",
    "teacher.min_prefix_match_ratio": "[0, 1]",
    "teacher.oracle_error_rate": "[0, 1]",
    "curriculum.injection_ratio": "(0, 1]",
    "branches.branches_per_point": "[2, inf)",
    "objective.clip_low": "(0, 1)",
    "objective.clip_c": "(1, inf)",
    "objective.entropy_coef": "(-inf, inf)",
    "optim.b2": "[0, 1)",
    "optim.teacher.lr": "[-1, inf)",
    "learner.mesh": "[-1, inf)",
    "evaluation.top_p": "(0, 1]",
}
INTERVALS |= {f"{section}.{name}": "(0, inf)" for section, names in POSITIVE.items() for name in names.split()}


def wrong(key: str, value: Any) -> str:
    """What is wrong with one value by itself, or ""."""
    if key in CHOICES:
        near = difflib.get_close_matches(str(value), CHOICES[key], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return "" if value in CHOICES[key] else f"expected one of {', '.join(CHOICES[key])}{hint}"
    if key == "teacher.oracle":
        known = value in ("carry_chain", "lookup_chain", "arithmetic") or re.fullmatch("solutions:.+", value)
        rules = "carry_chain, lookup_chain, arithmetic, or solutions:FILE with a JSONL of question and answer"
        return "" if known else f"expected {rules}"
    if key in ("data.train", "data.validation", "data.selection"):
        return "; ".join(text for name in value if (text := wrong_set(name)))
    items, interval = value if isinstance(value, tuple) else (value,), INTERVALS.get(key, "[0, inf)")
    numeric = key in INTERVALS or any(isinstance(item, int | float) and not isinstance(item, bool) for item in items)
    possible = not numeric or all(inside(item, interval) for item in items)
    return "" if possible else f"expected {'each ' if isinstance(value, tuple) else ''}in {interval}"


def inside(value: Any, interval: str) -> bool:
    """Whether `value` is a finite number in an interval as mathematics writes it, `(0, 1]`; `inf` stands for no bound."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    low, high = (float(end) for end in interval[1:-1].split(","))
    return (value > low or (interval[0] == "[" and value == low)) and (value < high or (interval[-1] == "]" and value == high))


def wrong_set(name: str) -> str:
    """What is wrong with the form of one "NAME:PATH", or ""; files are looked for later."""
    reader, _, rest = name.partition(":")
    if reader not in READERS:
        near = difflib.get_close_matches(reader, READERS, n=1)
        hint = f"{name} is none; did you mean {near[0]}?" if near else f"{name} is none."
        return f"expected NAME:PATH with NAME one of {', '.join(READERS)}; {hint}"
    if reader in GENERATED:
        pattern, shape = GENERATED[reader]
        good = re.fullmatch(pattern, rest)
        return "" if good else f"{name}: expected {reader}:{shape}, SPLIT train or heldout and COUNT above 0"
    return "" if rest else f"{name}: expected {reader}:PATH, PATH a file or folder"
