"""The demo with a tool: a lookup chain whose values only the environment knows, on the CPU, without anything to download.

    python -m deepgrpo.warm_start --config=configs/lookup_chain.py
    python -m deepgrpo.train --config=configs/lookup_chain.py --config.name=forest
    python -m deepgrpo.train --config=configs/lookup_chain.py:plain --config.name=plain

The student asks for a value with `?` or invents one after `:`; a guess is right once in a hundred. The warm start leaves it
asking one time in five, so that a whole chain of ten succeeds about once in six million tries and plain GRPO has no gradient.
States of the forest lie inside the conversation, with what the environment had said so far.
Hardware: 2 CPU cores. Time: warm start 1 minute, an arm 3 to 4 CPU minutes.
Result (3 seeds, greedy, 128 held-out questions, 500,000 student tokens): plain 0.000; forest 1.000 in each seed, from step 10 on.
"""

import ml_collections

from configs import carry_chain, common
from deepgrpo.data import lookup_chain

ARMS = {  # name: edits by dotted key
    "forest": {},
    "plain": {"curriculum.pool": "none"},
}


def warm_start() -> ml_collections.ConfigDict:
    """The student's recipe (deepgrpo/warm_start.py); its hash names the student's folder."""
    recipe = carry_chain.warm_start()
    recipe.task = lookup_chain.NAME
    recipe.clean.steps = 300
    recipe.sloppy.forget = 0.8  # probability that a value is invented in place of asked for
    return recipe


def get_config(arm: str = "") -> ml_collections.ConfigDict:
    config = carry_chain.get_config()
    config.name = f"lookup_chain-{arm}" if arm else "lookup_chain"
    config.loop, config.agent.environment = "agent", "lookup"
    config.agent.max_turns, config.agent.observation_tokens = 12, 8
    config.model.origin = "python -m deepgrpo.warm_start --config=configs/lookup_chain.py"
    config.data.train, config.data.validation = ("lookup_chain:train:16",), ("lookup_chain:heldout:128",)
    config.teacher.oracle = "lookup_chain"
    config.rollout.max_model_len, config.learner.buckets = 96, (96,)  # a right answer needs 92
    config.learner.micro_batch_tokens = 128 * 96
    common.edit(config, ARMS, arm or "forest")
    config.model.path = f".cache/lookup_chain-{lookup_chain.fingerprint(warm_start().to_dict())}"
    return config
