"""DEEP-GRPO's evaluation: greedy in a context of 4,096 tokens, answers that it cuts off score 0.

    python -m deepgrpo.evaluate --config=configs/eval_seed.py --checkpoint=runs/my-run                        the five MATH sets
    python -m deepgrpo.evaluate --config=configs/eval_seed.py:gsm8k --checkpoint=runs/my-run --config.seed=1  GSM8K, 1,024 tokens

Same prompts and limits as the validation of configs/math_1p5b.py and configs/gsm8k_0p5b.py.
Hardware: one GPU with 24 GB. Time and result: not run on Qwen2.5-Math-1.5B. The original reports (accuracy %; AIME24, AMC,
MATH500, Minerva, OlympiadBench, average): before training 16.7, 43.4, 61.8, 15.1, 28.4, 33.1; after 23.3, 54.2, 77.0, 29.0, 37.0,
44.1, on a checkpoint that was chosen by this very average.
"""

import ml_collections

from configs import gsm8k_0p5b, math_1p5b

TASKS = {"math": math_1p5b, "gsm8k": gsm8k_0p5b}


def get_config(task: str = "math") -> ml_collections.ConfigDict:
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; expected {' or '.join(TASKS)}")
    config = TASKS[task].get_config()
    config.name = f"eval-seed-{task}"
    config.curriculum.pool = "none"
    config.evaluation.truncated = "zero"
    config.evaluation.second_grader = "compat_fast"  # the rule behind the published numbers, in a column of its own
    return config
