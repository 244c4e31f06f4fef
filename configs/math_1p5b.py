"""The released MATH runs: Qwen2.5-Math-1.5B, prefix forest, four arms of the teacher's tokens.

    hf download Qwen/Qwen2.5-Math-1.5B --local-dir models/Qwen2.5-Math-1.5B
    vllm serve Qwen/Qwen3.5-27B-GPTQ-Int4 --port 8001 --max-model-len 32768       (the teacher, on another GPU)
    OPENAI_API_KEY=EMPTY python -m deepgrpo.train --config=configs/math_1p5b.py           the null arm: no teacher tokens
    OPENAI_API_KEY=EMPTY python -m deepgrpo.train --config=configs/math_1p5b.py:luffy     or :snis, :sft

Hardware: one GPU with 80 GB besides the teacher's. Time and result: not run. The original reports for null
(accuracy %, greedy): AIME24 23.3, AMC 54.2, MATH500 77.0, Minerva 29.0, OlympiadBench 37.0, average 44.1; before training 33.1.
Of luffy, snis and sft it reports no consistent gain over null.
"""

import ml_collections

from configs import common

BENCHMARKS = ("aime24", "minerva", "amc", "olympiad_bench")


def get_config(arm: str = "null") -> ml_collections.ConfigDict:
    config = common.get_config()  # whose defaults are what the released scripts have in common
    config.name = f"qwen2.5-math-1.5b-forest-{arm}"
    config.requires_accelerator = True
    config.model.path = "models/Qwen2.5-Math-1.5B"
    config.model.origin = "Qwen/Qwen2.5-Math-1.5B"
    config.data.train = ("math:data/math_lvl3to5_8k_train.jsonl",)
    config.data.validation = ("math:data/math500.jsonl", *(f"{name}:data/{name}.jsonl" for name in BENCHMARKS))
    config.data.template = "math_boxed"  # the question and "Let's think step by step ...", through the model's chat template
    config.data.origin = "take math_lvl3to5_8k and the evaluation suite of the Dr. GRPO repository (understand-r1-zero)"
    config.data.allow_overlap = True  # as released: 1 problem of MATH500 and 6 of OlympiadBench are training problems too
    config.data.max_prompt_length = 1024
    config.rollout.max_model_len = 4096
    config.curriculum.injection_ratio = 0.25  # 32 states on top of 128 prompts: 1280 rollouts a step
    config.optim.teacher.lr = 1e-6  # of the arm sft
    config.learner.buckets = (512, 1024, 2048, 4096)
    common.edit(config, common.TEACHER_ARMS, arm)
    return config
