"""Dr. GRPO's evaluation: five sets, its own template, 3,000 new tokens, answers that are cut off graded like others.

    python -m deepgrpo.evaluate --config=configs/eval_drgrpo.py --model=models/Qwen2.5-Math-1.5B
    python -m deepgrpo.evaluate --config=configs/eval_drgrpo.py:sampled --checkpoint=runs/my-run --config.rollout.engine=vllm

`:sampled` draws 16 answers a problem at temperature 1 (avg@16, pass@k, maj@k): AIME24 has 30 problems, so one is 3.3 points.
Hardware: one GPU with 24 GB. Time and result: not run on Qwen2.5-Math-1.5B. Dr. GRPO reports for Oat-Zero-1.5B (accuracy %,
greedy): AIME24 20.0, AMC 53.0, MATH500 74.2, Minerva 25.7, OlympiadBench 37.6, average 42.1; by the graders
of the last column.
"""

import ml_collections

from configs import math_1p5b


def get_config(answers: str = "greedy") -> ml_collections.ConfigDict:
    config = math_1p5b.get_config()  # for the sets, the model and its context of 4,096 tokens
    config.name = "eval-drgrpo"
    config.data.template = "qwen_math"  # the instruction in the system message alone
    config.data.max_prompt_length = 4095  # nothing is filtered out
    config.curriculum.pool = "none"
    config.evaluation.max_new_tokens, config.evaluation.truncated = 3000, "graded"
    config.evaluation.second_grader = "compat_full"  # the rule behind the published numbers, in a column of its own
    if answers == "sampled":
        config.name += "-sampled"
        config.evaluation.n, config.evaluation.temperature = 16, 1.0
    elif answers != "greedy":
        raise ValueError(f"no answers {answers!r}; expected greedy or sampled")
    return config
