"""Three steps of DEEP-GRPO on real weights, SmolLM2-135M-Instruct, on a CPU: a check that everything works, not an experiment.

    python launch/make_smollm2.py --out models/SmolLM2-135M-Instruct
    python -m deepgrpo.train --config=configs/smollm2.py            sums of three numbers, rule-based teacher
    python -m deepgrpo.train --config=configs/smollm2.py:gsm8k      GSM8K questions, teacher that knows the solutions

Both teachers are served over HTTP by the run itself; --config.teacher.base_url=URL asks another.
Hardware: 2 CPU cores. Measured: sums 125 CPU s, rewards 0.56, 0.25, 0.42, mixed groups in each step, injected states from step 2.
GSM8K 165 CPU s: all 52 rollouts fail (31 are cut off), so nothing is updated; the teacher finds two states.
"""

import ml_collections

from configs import common


def get_config(task: str = "arithmetic") -> ml_collections.ConfigDict:
    config = common.get_config()
    config.name, config.train.steps = f"smollm2-{task}", 3
    config.model.path, config.model.dtype = "models/SmolLM2-135M-Instruct", "float32"
    config.model.origin = "python launch/make_smollm2.py --out models/SmolLM2-135M-Instruct"
    config.data.batch_size = config.optim.mini_batch_prompts = 4
    config.rollout.n, config.rollout.slots = 4, 24
    config.curriculum.injection_ratio, config.curriculum.min_remaining_tokens = 0.5, 8
    config.teacher.base_url, config.teacher.synchronous = "oracle", True  # the second step already has states to inject
    config.teacher.min_prefix_match_tokens, config.teacher.min_suffix_len = 2, 2
    config.objective.kl_coef = 0.0  # saves the reference's memory and its pass
    config.validation.every, config.data.validation_limit = 3, 8
    config.checkpoint.every, config.telemetry.rollouts_every = 0, 1
    if task == "arithmetic":
        config.data.train, config.data.validation = ("arithmetic:train:256:1",), ("arithmetic:heldout:64:1",)
        config.data.template, config.teacher.oracle = "few_shot_arithmetic", "arithmetic"
        config.data.max_prompt_length, config.rollout.max_model_len = 128, 192
    elif task == "gsm8k":
        config.data.train, config.data.validation = ("gsm8k:data/gsm8k_train.jsonl",), ("gsm8k:data/gsm8k_test.jsonl",)
        config.data.template = "gsm8k"
        config.data.origin = "save train.jsonl and test.jsonl of the grade-school-math repository under these names"
        config.data.max_prompt_length, config.rollout.max_model_len = 256, 384
        config.teacher.oracle = "solutions:data/gsm8k_train.jsonl"
    else:
        raise ValueError(f"no task {task!r}; expected arithmetic or gsm8k")
    config.learner.buckets = (config.rollout.max_model_len,)
    config.learner.micro_batch_tokens, config.learner.logprob_block = 4 * config.rollout.max_model_len, 256
    return config
