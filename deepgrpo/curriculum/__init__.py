"""Which states to roll out: pools of hard states behind one interface (`base`).

A new pool is one module with a subclass of `base.Curriculum`, and one entry in `POOLS`; docs/method.md shows one.
"""

import importlib
from typing import Any

_HERE = "deepgrpo.curriculum"
POOLS = {  # curriculum.pool: module and class; imported only when asked for, so that reading a configuration stays quick
    "none": f"{_HERE}.base:Curriculum",
    "forest": f"{_HERE}.forest:Forest",
    "chain": f"{_HERE}.chain:ChainPool",
    "flat": f"{_HERE}.flat:FlatPool",
    "branches_inline": f"{_HERE}.branches:InlineBranches",
    "branches": f"{_HERE}.branches:BufferedBranches",
    "suffixes": f"{_HERE}.suffixes:SuffixPool",
}


def pool_class(name: str) -> Any:
    """Returns the class of a pool, whose attributes say what the pool can do (`base.Curriculum` lists them)."""
    module, _, attribute = POOLS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def create(config: Any) -> Any:
    """Builds the pool that `curriculum.pool` names from the whole configuration."""
    return pool_class(config.curriculum.pool)(config)


def replaces_prompts(config: Any) -> bool:
    """Whether hard states take the places of dataset prompts, so that a step may draw fewer than a batch of these."""
    return config.curriculum.pool != "none" and config.curriculum.injection_mode == "replace"
