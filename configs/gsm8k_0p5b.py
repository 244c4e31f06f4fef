"""The released GSM8K runs: Qwen2.5-0.5B-Instruct, prefix forest, four arms of the teacher's tokens.

    hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct
    vllm serve Qwen/Qwen3.5-27B-GPTQ-Int4 --port 8001 --max-model-len 32768       (the teacher, on another GPU)
    OPENAI_API_KEY=EMPTY python -m deepgrpo.train --config=configs/gsm8k_0p5b.py          the null arm: no teacher tokens
    OPENAI_API_KEY=EMPTY python -m deepgrpo.train --config=configs/gsm8k_0p5b.py:luffy    or :snis, :sft

Hardware: the original used two GPUs besides the teacher's; one with 80 GB should do. Time and result: not run. The
original gives no table of these four; in its earlier repository plain GRPO (n=8) and the pivot method reached a greedy test
accuracy of 64.0 and 66.4 % (best mean of 20 validations in a row), 42.7 to 44.7 % before training. About 0.16 % of the trained
tokens are the teacher's, and no arm is consistently better than null.
"""

import ml_collections

from configs import common


def get_config(arm: str = "null") -> ml_collections.ConfigDict:
    config = common.get_config()  # whose defaults are what the released scripts have in common
    config.name = f"qwen2.5-0.5b-gsm8k-forest-{arm}"
    config.requires_accelerator = True
    config.model.path = "models/Qwen2.5-0.5B-Instruct"
    config.model.origin = "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.train = ("gsm8k:data/gsm8k_train.jsonl",)
    config.data.validation = ("gsm8k:data/gsm8k_test.jsonl",)
    config.data.template = "gsm8k"  # the question and "Let's think step by step ...", through the model's chat template
    config.data.origin = "save train.jsonl and test.jsonl of the grade-school-math repository under these names"
    config.data.max_prompt_length = 512
    config.rollout.max_model_len = 1024
    config.curriculum.injection_ratio = 0.125  # 16 states on top of 128 prompts: 1152 rollouts a step
    config.optim.teacher.lr = 1e-6  # of the arm sft
    config.learner.buckets = (256, 512, 768, 1024)
    common.edit(config, common.TEACHER_ARMS, arm)
    return config
