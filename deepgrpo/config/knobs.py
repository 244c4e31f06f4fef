"""Environment variables of the original DEEP-GRPO scripts, and the keys that do their work here (docs/knobs.md explains each).

Nothing here reads them as settings: a run is described by its configuration alone. One that is set is answered by a warning that
names its key, so that nobody believes it had an effect.
"""

from collections.abc import Mapping

KEYS = {
    "ACTOR_OPTIMIZER_OFFLOAD": "learner.mesh",
    "ACTOR_PARAM_OFFLOAD": "learner.mesh",
    "GPU_MEMORY_UTILIZATION": "vllm.gpu_memory_utilization",
    "INJECTION_RATIO": "curriculum.injection_ratio",
    "LOG_PROB_MICRO_BATCH_SIZE_PER_GPU": "learner.micro_batch_tokens",
    "LUFFY_GAMMA": "objective.luffy_gamma",
    "MAX_MODEL_LEN": "rollout.max_model_len",
    "MAX_PROMPT_LENGTH": "data.max_prompt_length",
    "MIN_PREFIX_MATCH_RATIO": "teacher.min_prefix_match_ratio",
    "MIN_PREFIX_MATCH_TOKENS": "teacher.min_prefix_match_tokens",
    "MIN_SUFFIX_LEN": "teacher.min_suffix_len",
    "MODEL": "model.path",
    "OPENAI_BASE_URL": "teacher.base_url",
    "OUTPUT_DIR": "run_dir",
    "PAIRED_EVAL_ENABLED": "diagnostics.paired_every",
    "PPO_MICRO_BATCH_SIZE_PER_GPU": "learner.micro_batch_tokens",
    "PPO_MINI_BATCH_SIZE": "optim.mini_batch_prompts",
    "PREFIX_DEBUG_DUMP_ENABLED": "diagnostics.dump_every",
    "PREFIX_DEBUG_DUMP_FREQ": "diagnostics.dump_every",
    "PREFIX_DEBUG_DUMP_MAX_PREFIXES": "diagnostics.dump_prefixes",
    "PREFIX_ROLLOUT_N": "curriculum.rollout_n",
    "PREFIX_TEACHER_CONTINUATION_ENABLED": "curriculum.teacher_rows",
    "REWARD_THRESHOLD": "rewards.threshold",
    "ROLLOUT_N": "rollout.n",
    "RUN_NAME": "name",
    "SAVE_BEST_CHECKPOINT": "checkpoint.save_best",
    "SAVE_FREQ": "checkpoint.every",
    "SNIS_BETA": "objective.snis_beta",
    "SUFFIX_SFT_ENABLED": "curriculum.suffix_sft",
    "SUFFIX_SFT_SCHEDULE": "curriculum.suffix_sft",
    "TEACHER_ALLOW_PARTIAL_BATCH": "optim.teacher.allow_partial",
    "TEACHER_ENABLE_THINKING": "teacher.enable_thinking",
    "TEACHER_LOSS_COEF": "objective.teacher_coef",
    "TEACHER_LOSS_REDUCTION": "objective.teacher_reduction",
    "TEACHER_LOSS_TYPE": "objective.teacher_loss",
    "TEACHER_MAX_CONCURRENT": "teacher.max_concurrent",
    "TEACHER_MINI_BATCH_SIZE": "optim.teacher.mini_batch_rows",
    "TEACHER_MODEL_NAME": "teacher.model",
    "TEACHER_SFT_LR": "optim.teacher.lr",
    "TEACHER_UPDATE_MODE": "objective.teacher_update",
    "TEST_FREQ": "validation.every",
    "TOTAL_EPOCHS": "train.epochs",
    "TRAIN_BATCH_SIZE": "data.batch_size",
    "VAL_FILES": "data.validation",
}


def warnings(environment: Mapping[str, str]) -> list[str]:
    """Returns one line for each known knob that is set in the environment."""
    return [
        f"environment variable {name}={environment[name]} has no effect; write --config.{key}=VALUE (docs/knobs.md)"
        for name, key in KEYS.items()
        if name in environment
    ]
