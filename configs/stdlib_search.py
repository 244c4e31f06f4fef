"""Three steps of a search agent on real weights and real text: SmolLM2-135M-Instruct over the documentation of Python's library.

    python launch/make_smollm2.py --out models/SmolLM2-135M-Instruct
    python -m deepgrpo.train --config=configs/stdlib_search.py

A check that everything works, not an experiment: so small a model seldom searches. Nothing is downloaded but the model.
Hardware: 2 CPU cores. Time: 3 minutes.
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    config = common.get_config()
    config.name, config.train.steps = "stdlib_search", 3
    config.model.path, config.model.dtype = "models/SmolLM2-135M-Instruct", "float32"
    config.model.origin = "python launch/make_smollm2.py --out models/SmolLM2-135M-Instruct"
    config.data.train, config.data.validation = ("stdlib:train:256",), ("stdlib:heldout:8",)
    config.data.batch_size = config.optim.mini_batch_prompts = 4
    config.data.max_prompt_length, config.rollout.max_model_len = 384, 768
    config.loop, config.agent.environment, config.agent.corpus = "agent", "search", "stdlib"
    config.agent.max_turns, config.agent.turn_tokens, config.agent.observation_tokens = 4, 96, 160
    config.rollout.n, config.rollout.slots = 4, 16
    config.rewards.threshold = 0.2  # a wrong answer in valid structure earns so much
    config.curriculum.pool, config.teacher.enabled = "none", False
    config.objective.kl_coef = 0.0  # saves the reference's memory and its pass
    config.learner.buckets = (config.rollout.max_model_len,)
    config.learner.micro_batch_tokens, config.learner.logprob_block = 4 * config.rollout.max_model_len, 256
    config.validation.every, config.checkpoint.every, config.telemetry.rollouts_every = 3, 0, 1
    return config
