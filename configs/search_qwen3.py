"""The original's search agent: questions of several hops, answered with a search engine between tags.

    python -m deepgrpo.prepare hotpotqa --source PATH --out data/hotpotqa
    python -m deepgrpo.train --config=configs/search_qwen3.py --config.agent.retriever_url=http://127.0.0.1:8000/retrieve

The student is Qwen3-4B (any chat model will do: all turns stand in one message, so no template is rendered between them). A
retriever as of Search-R1 must answer; --config.agent.corpus=FOLDER searches JSONL files in memory instead. Corrections come from
a teacher; states lie inside conversations. Hardware: 8 GPUs of 80 GB and the teacher's. Not run here: `python -m deepgrpo.plan`
says what it needs.
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    config = common.get_config()
    config.name = "search_qwen3"
    config.requires_accelerator = True
    config.model.path = "models/Qwen3-4B"
    config.model.origin = "Qwen/Qwen3-4B"
    config.data.train, config.data.validation = ("verl:data/hotpotqa/train.parquet",), ("verl:data/hotpotqa/test.parquet",)
    config.data.origin = "python -m deepgrpo.prepare hotpotqa --source PATH --out data/hotpotqa"
    config.data.max_prompt_length, config.rollout.max_model_len = 1024, 4096
    config.data.validation_limit = 512
    config.loop, config.agent.environment = "agent", "search"
    config.agent.retriever_url = "http://127.0.0.1:8000/retrieve"
    config.agent.max_turns, config.agent.turn_tokens, config.agent.tool_workers = 8, 1024, 128
    config.rollout.engine = "vllm"
    config.rewards.threshold = 0.2  # a wrong answer earns up to 0.2 in training
    config.learner.buckets = (1024, 2048, 3072, 4096)
    return config
