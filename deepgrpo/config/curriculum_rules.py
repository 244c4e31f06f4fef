"""Values and combinations of the section `curriculum` that cannot work."""

import importlib
import math
from typing import Any

from ml_collections import config_dict

STEP_CHECKED = ("carry_chain", "arithmetic")  # data sets whose grader reports how much of a wrong answer was right
pools = importlib.import_module("deepgrpo.curriculum")  # a floor above, hence by its name; only what is asked for is imported

CHOICES = {
    "curriculum.pool": pools.POOLS,
    "curriculum.injection_mode": ("add", "replace"),
    "curriculum.failures": ("all", "longest_prefix"),
    "curriculum.cut": ("teacher", "own", "random", "solution"),
    "curriculum.suffix_sft": ("off", "epoch_local", "post_step"),
}

RANGES = {
    "curriculum.injection_ratio": "(0, 1]",
    "curriculum.rollout_n": "[0, inf)",
    "curriculum.min_remaining_tokens": "[1, inf)",
    "curriculum.max_events_per_parent": "[0, inf)",
    "curriculum.max_events": "[0, inf)",
    "curriculum.max_nodes_per_tree": "[0, inf)",
    "curriculum.retire_after": "[1, inf)",
}

Rule = tuple[tuple[str, ...], bool, str]


def pool_of(config: config_dict.ConfigDict) -> Any:
    """The class of the pool in use, whose attributes say what it can do (`curriculum.base.Curriculum` lists them)."""
    name = config.curriculum.pool
    return pools.pool_class(name if name in pools.POOLS else "none")  # a wrong name is told by itself


def rules(config: config_dict.ConfigDict) -> list[Rule]:
    curriculum, data, pool = config.curriculum, config.data, pool_of(config)
    by_ratio = pool.by_ratio
    return [
        (
            ("curriculum.injection_ratio", "data.batch_size"),
            not by_ratio or math.floor(curriculum.injection_ratio * data.batch_size + 1e-9) >= 1,
            "ratio * batch size is below 1: no state would ever be injected; raise either, or set curriculum.pool=none",
        ),
        (
            ("curriculum.injection_mode", "curriculum.injection_ratio"),
            not by_ratio or curriculum.injection_mode == "add" or curriculum.injection_ratio < 1,
            "every dataset prompt would be replaced and no new failure found; lower the ratio or use injection_mode=add",
        ),
        (
            ("curriculum.rollout_n",),
            not by_ratio or curriculum.rollout_n != 1,
            "a group of one has no advantage; expected 0 (rollout.n) or at least 2",
        ),
        (
            ("data.max_prompt_length", "rollout.max_model_len", "curriculum.min_remaining_tokens"),
            not pool.asks_teacher or data.max_prompt_length < config.rollout.max_model_len - curriculum.min_remaining_tokens,
            "the longest prompt leaves no room for a prefix and curriculum.min_remaining_tokens; raise rollout.max_model_len",
        ),
        (
            ("curriculum.failures", "data.train"),
            curriculum.failures == "all" or all(name.partition(":")[0] in STEP_CHECKED for name in data.train),
            f"longest_prefix needs a grader that checks steps ({', '.join(STEP_CHECKED)}); use curriculum.failures=all",
        ),
        (
            ("curriculum.pool", "objective.teacher_loss"),
            not by_ratio or pool.keeps_suffixes or config.objective.teacher_loss == "null",
            "states of this pool come without the teacher's continuation: there are no teacher tokens; set "
            "objective.teacher_loss=null, or curriculum.pool=forest",
        ),
        (
            ("curriculum.cut", "objective.teacher_loss"),
            curriculum.cut == "teacher" or config.objective.teacher_loss == "null",
            "elsewhere than where student and teacher part, the teacher's suffix does not continue the state; set "
            "objective.teacher_loss=null, or curriculum.cut=teacher",
        ),
        *suffix_sft_rules(config),
    ]


def start_rules(config: config_dict.ConfigDict) -> list[Rule]:
    curriculum = config.curriculum
    return [
        (
            ("curriculum.start_from", "curriculum.pool"),
            not curriculum.start_from or curriculum.pool == "forest",
            "only a forest can be begun with; set curriculum.pool=forest, or leave curriculum.start_from empty",
        ),
    ]


def suffix_sft_rules(config: config_dict.ConfigDict) -> list[Rule]:
    curriculum, o, off = config.curriculum, config.objective, config.curriculum.suffix_sft == "off"
    return [
        (
            ("curriculum.suffix_sft", "curriculum.pool"),
            off or curriculum.pool == "forest",
            "only the forest keeps suffixes to train on; set curriculum.pool=forest, or curriculum.suffix_sft=off",
        ),
        (
            ("curriculum.suffix_sft", "objective.teacher_update"),
            off or o.teacher_update == "post_ppo",
            "suffixes are trained on in steps of their own; set objective.teacher_update=post_ppo with teacher_loss=sft and "
            "teacher_reduction=separate_stream_mean, or curriculum.suffix_sft=off",
        ),
        (
            ("objective.teacher_loss", "curriculum.suffix_sft"),
            o.teacher_loss != "sft" or curriculum.pool != "forest" or not off,
            "nothing would be trained on the teacher's tokens; set curriculum.suffix_sft=epoch_local or post_step",
        ),
    ]
