"""What every loop is given, and its contract: prompts in, scored groups out, in the order of the prompts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from deepgrpo.rewards.service import GradingService
from deepgrpo.rollout.engine import Engine, Sampling
from deepgrpo.types import Group, Prompt


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """What a loop rolls out with.

    tokenizer: private to the thread that runs the loop. seed: the run's.
    grading_deadline: seconds that a whole call may wait for verdicts.
    """

    engine: Engine
    grading: GradingService
    tokenizer: Any
    sampling: Sampling
    seed: int
    grading_deadline: float


Loop = Callable[[RolloutContext, Sequence[Prompt], int, str], list[Group]]  # (context, prompts, step, purpose)


def with_sampling(context: RolloutContext, **changes) -> RolloutContext:
    """The same context under another sampled distribution (validation)."""
    return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **changes))
