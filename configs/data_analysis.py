"""The original's data-analysis agent: questions about tables in a workspace, answered by running code.

    python -m deepgrpo.prepare datatask --source PATH --out data/datatask
    python -m deepgrpo.train --config=configs/data_analysis.py --config.judge.base_url=http://HOST:8002/v1

Each rollout has a copy of its row's workspace; code runs in the sandbox; a language model marks reports (`judge`). A state inside
a conversation is restored by executing its blocks again. Hardware: 8 GPUs of 80 GB, the teacher's and the judge's. Not run here:
`python -m deepgrpo.plan` says what it needs.
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    config = common.get_config()
    config.name = "data_analysis"
    config.requires_accelerator = True
    config.model.path = "models/DeepAnalyze-8B"
    config.model.origin = "RUC-DataLab/DeepAnalyze-8B"
    config.data.train, config.data.validation = ("verl:data/datatask/train.parquet",), ("verl:data/datatask/test.parquet",)
    config.data.origin = "python -m deepgrpo.prepare datatask --source PATH --out data/datatask"
    config.data.max_prompt_length, config.rollout.max_model_len = 2048, 8192
    config.data.validation_limit = 256
    config.loop, config.agent.environment = "agent", "code"
    config.agent.max_turns, config.agent.observation_tokens = 12, 1024
    config.agent.tool_seconds, config.agent.tool_workers = 60.0, 32
    config.rollout.engine = "vllm"
    config.judge.base_url, config.judge.model = "http://127.0.0.1:8002/v1", "judge"
    config.learner.buckets = (2048, 4096, 8192)
    return config
