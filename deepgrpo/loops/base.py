"""What every loop is given, and its contract: prompts in, scored groups out, in the order of the prompts."""

import dataclasses
from typing import Any

from deepgrpo.rewards.service import GradingService
from deepgrpo.rollout.engine import Engine, Sampling


@dataclasses.dataclass(frozen=True)
class Setting:
    """The parties of a loop.

    tokenizer: private to the thread that runs the loop. seed: the run's.
    grading_deadline: seconds that a whole call may wait for verdicts.
    """

    engine: Engine
    grading: GradingService
    tokenizer: Any
    sampling: Sampling
    seed: int
    grading_deadline: float


def with_sampling(setting: Setting, **changes) -> Setting:
    """The same parties under another sampled distribution (validation)."""
    return dataclasses.replace(setting, sampling=dataclasses.replace(setting.sampling, **changes))
