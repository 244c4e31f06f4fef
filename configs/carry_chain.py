"""The demo: plain GRPO against GRPO with the prefix forest, on a task whose student succeeds once in 300,000 tries.

    python -m deepgrpo.warm_start --config=configs/carry_chain.py                                makes the student, once
    python -m deepgrpo.train --config=configs/carry_chain.py --config.name=forest
    python -m deepgrpo.train --config=configs/carry_chain.py --config.name=plain --config.curriculum.pool=none

Both arms sample the same number of student tokens (train.student_tokens); nothing else differs. The teacher is the rule-based
one, asked over HTTP. `launch/demo.sh` runs all of it and plots both curves. `configs/carry_chain.py:ARM` runs an ablation:
`:plain`, `:luffy`, `:cut_random` and so on; `python -m configs.ablations` sorts them by the question that they answer.
Hardware: 2 CPU cores. Time: warm start 1 minute, plain 20 s, forest 1 minute the first time (half of it compilation).
Result (3 seeds, greedy, 128 held-out questions, 500,000 student tokens): plain 0.000 in each; forest 0.661, 95 % interval
[0.648, 0.672] of the mean, lowest seed 0.648. Every group of the plain arm fails as a whole, so it never gets a gradient.
"""

import ml_collections

from configs import common
from deepgrpo.data import carry_chain

section = ml_collections.ConfigDict

BRANCHING = {
    "teacher.enabled": False,
    "curriculum.injection_mode": "add",
    "objective.teacher_reduction": "separate_stream_mean",
    "branches.tokens_per_node": 9,  # a line of a solution
}
SUFFIX_STEPS = common.TEACHER_ARMS["sft"] | {"optim.teacher.mini_batch_rows": 8}  # of 16 problems, hence at most 16 trees

ARMS = {  # name: edits by dotted key
    "forest": {},
    "plain": {"curriculum.pool": "none"},
    "plain_4x": {"curriculum.pool": "none", "train.student_tokens": 2_000_000},
    "plain_rloo": {"curriculum.pool": "none", "objective.advantage": "rloo"},
    "plain_dynamic": {"curriculum.pool": "none", "rollout.dynamic_sampling": 2},
    # the teacher's tokens
    "luffy": common.TEACHER_ARMS["luffy"],
    "snis": common.TEACHER_ARMS["snis"],
    "sft": SUFFIX_STEPS,
    "sft_post_step": SUFFIX_STEPS | {"curriculum.suffix_sft": "post_step"},
    # where a state ends
    "cut_own": {"curriculum.cut": "own"},
    "cut_random": {"curriculum.cut": "random"},
    "cut_solution": {"curriculum.cut": "solution"},
    # how much is injected
    "ratio_6": {"curriculum.injection_ratio": 0.0625},
    "ratio_12": {"curriculum.injection_ratio": 0.125},
    "ratio_25": {"curriculum.injection_ratio": 0.25},
    "ratio_50": {"curriculum.injection_ratio": 0.5},
    "n_4": {"curriculum.rollout_n": 4},
    "n_16": {"curriculum.rollout_n": 16},
    # which corrections are accepted
    "match_10": {"teacher.min_prefix_match_tokens": 10},
    "match_50": {"teacher.min_prefix_match_tokens": 50},
    "suffix_50": {"teacher.min_suffix_len": 50},
    # how good the teacher is
    "teacher_errs": {"teacher.oracle_error_rate": 0.5},
    "teacher_wrong": {"teacher.oracle_error_rate": 1.0},
    # how states are kept
    "chain": {"curriculum.pool": "chain"},
    "flat": {"curriculum.pool": "flat"},
    "branches_inline": BRANCHING | {"curriculum.pool": "branches_inline"},
    "branches": BRANCHING | {"curriculum.pool": "branches"},
    "suffixes": BRANCHING
    | {"teacher.enabled": True, "curriculum.pool": "suffixes", "objective.teacher_loss": "luffy", "branches.batch_threshold": 16},
    "treerl": {"loop": "treerl", "curriculum.pool": "none", "treerl": (2, 2, 1, 2)},  # 10 responses a prompt
    "retire_2": {"curriculum.retire_after": 2},
    # what is looked at
    "pass_at_k": {"evaluation.n": 256, "evaluation.temperature": 1.0},
    "ahead": {"rollout.max_staleness": 1, "objective.tis_cap": 2.0},
    "dumps": {"telemetry.rollouts_every": 1},
}


def warm_start() -> ml_collections.ConfigDict:
    """The student's recipe (deepgrpo/warm_start.py); its hash names the student's folder."""
    recipe = section()
    recipe.seed = 0  # of weights and text
    recipe.batch_size = 16  # solutions a step; a solution is 106 tokens with its prompt
    recipe.b2 = 0.98  # of Adam, for what is not a matrix
    recipe.grad_clip = 1.0  # global norm
    recipe.required_clean = 0.9  # share of held-out chains that must be right before any sloppy text

    recipe.model = section()
    recipe.model.num_layers = 2  # the least that finds an operand by its letter
    recipe.model.width = 128
    recipe.model.num_heads = 4
    recipe.model.num_kv_heads = 2
    recipe.model.head_size = 32  # the smallest that vLLM's attention kernels take
    recipe.model.mlp_width = 256

    recipe.clean = section()
    recipe.clean.steps = 500
    recipe.clean.lr = 2e-2  # peak
    recipe.clean.forget = 0.0  # probability that a needed carry is forgotten

    recipe.sloppy = section()
    recipe.sloppy.steps = 150  # enough for about the same rate in every situation, too few to unlearn how to carry
    recipe.sloppy.lr = 3e-3  # peak
    recipe.sloppy.forget = 0.75  # the student ends near it: a whole chain then succeeds about once in 300,000 tries
    return recipe


def get_config(arm: str = "") -> ml_collections.ConfigDict:
    config = common.get_config()
    config.name = f"carry_chain-{arm}" if arm else "carry_chain"
    config.train.student_tokens, config.train.epochs = 500_000, 1000
    config.model.path = f".cache/carry_chain-{carry_chain.fingerprint(warm_start().to_dict())}"
    config.model.origin = "python -m deepgrpo.warm_start --config=configs/carry_chain.py"
    config.model.dtype, config.model.remat = "float32", "none"
    config.data.train, config.data.validation = ("carry_chain:train:16",), ("carry_chain:heldout:128",)
    config.data.batch_size = config.optim.mini_batch_prompts = 16  # one optimizer step a training step
    config.data.max_prompt_length, config.rollout.max_model_len = 32, 112  # a right answer needs 106
    config.rollout.n, config.rollout.slots = 8, 128
    config.curriculum.injection_ratio, config.curriculum.injection_mode = 0.75, "replace"  # equal groups a step in both arms
    config.curriculum.failures, config.curriculum.min_remaining_tokens = "longest_prefix", 8
    config.teacher.base_url, config.teacher.synchronous = "oracle", True
    config.teacher.attempts = 1  # the rule answers the same every time
    config.teacher.min_prefix_match_tokens, config.teacher.min_prefix_match_ratio, config.teacher.min_suffix_len = 1, 0.0, 1
    config.objective.kl_coef = 0.0
    config.optim.lr, config.optim.b2, config.optim.weight_decay = 5e-4, 0.99, 0.0
    config.learner.buckets, config.learner.micro_batch_tokens, config.learner.logprob_block = (112,), 128 * 112, 4096
    config.validation.every = 10
    config.checkpoint.every, config.telemetry.rollouts_every = 0, 0
    common.edit(config, ARMS, arm or "forest")
    return config
