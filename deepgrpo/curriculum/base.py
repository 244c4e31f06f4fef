"""The interface of every curriculum: which states to roll out, what was learned from them, and work for the teacher.

The training loop calls `wanted`, `sample`, `expand`, `observe`, `metrics`, `state`, `restore` and never asks which curriculum it
has. The teacher's worker (another thread) calls `pending`, `dispatch`, `resolve`, `requeue`, `rest` and `withdraw`. Every method
is atomic.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from deepgrpo.types import Group, Ids, Problem, Prompt


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A state to roll out: original prompt ids followed by a locked prefix.

    ids: int32[len]. node: the curriculum's handle, handed back in `Prompt.node` by `observe`.
    n: rollouts to make; None: curriculum.rollout_n. stream: see `types.Prompt`.
    """

    ids: Ids
    problem: Problem
    node: Any
    n: int | None = None
    stream: str = "main"


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """One failed rollout on its way to the teacher.

    event: the curriculum's handle, handed back to `resolve`.
    state_ids: int32[len], the state that the rollout started from (prompt and locked prefix).
    response_ids: int32[len], what the student sampled.
    step: the step that produced it.
    """

    event: Any
    problem: Problem
    state_ids: Ids
    response_ids: Ids
    step: int


@dataclasses.dataclass(frozen=True, eq=False)
class Correction:
    """A verified correction of one failure.

    prefix_ids: int32[len], a literal slice of the failure's response ids (curriculum.cut=solution: of the teacher's solution):
      state_ids ++ prefix_ids is the new hard state.
    suffix_ids: int32[len], the teacher's tokens after it, closed by a stop id.
    reward: the grader's reward of the corrected answer.
    failed_suffix_ids: what the student had written instead.
    """

    prefix_ids: Ids
    suffix_ids: Ids
    reward: float
    failed_suffix_ids: Ids


class Curriculum:
    """A curriculum overrides what it needs; left as they are, the methods are those of one without states and teacher."""

    def wanted(self, batch_size: int) -> int:
        """Number of states that a step with `batch_size` dataset prompts is to get (at most those that are ready)."""
        return 0

    def sample(self, n: int, step: int) -> list[State]:
        """Returns at most `n` states for `step` and stamps them as used."""
        return []

    def expand(self, groups: Sequence[Group], step: int) -> list[Prompt]:
        """Further prompts to roll out in the same step, chosen from its groups so far; `observe` sees their groups too.

        Asked again with their groups among the others, until it returns none. A prompt with the group_id of a group so far adds
        rollouts to that group.
        """
        return []

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Takes in the scored groups of a step, dataset and injected; returns the step's metrics (full names)."""
        return {}

    def continuation(self, node: Any) -> tuple[Ids, float | None] | None:
        """The teacher's verified (suffix_ids, reward) of an injected state, None if there is none. Asked before `observe`."""
        return None

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        """Hands out at most `max_items` failures for the teacher; each stays in flight until `resolve`."""
        return []

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Takes in the teacher's result (None: no usable correction); returns the outcome's name."""
        raise ValueError(f"failure {failure.event} is not of this curriculum: it sends nothing to the teacher")

    def requeue(self, failure: Failure) -> None:
        """Puts a dispatched failure back, dispatchable again: nothing was learned about it. Unknown ones are ignored."""
        raise ValueError(f"failure {failure.event} is not of this curriculum: it sends nothing to the teacher")

    def rest(self, failure: Failure) -> None:
        """Notes that nobody works on a failure in flight for now, so that it does not keep others of its state waiting."""

    def withdraw(self, failure: Failure) -> bool:
        """Whether an answer to a failure in flight could not be used any more; if so, it is no longer in flight, and counted."""
        return False

    def pending(self) -> int:
        """Failures that `dispatch` could hand out now."""
        return 0

    def look_up(self, node: Any) -> Mapping[str, Any]:
        """What diagnostics can know of an injected state; empty if that is nothing. Where they are known: created_step,
        and the teacher's suffix_ids, failed_suffix_ids and reward; `forest_inspect.look_up` has more."""
        return {}

    def deepest(self, n: int) -> list[Any]:
        """Handles of the `n` deepest states, where states have a depth."""
        return []

    def metrics(self) -> Mapping[str, float]:
        """Current sizes and cumulative counters (full names). Reading changes nothing."""
        return {}

    def state(self, folder: str) -> None:
        """Writes everything that `restore` needs into `folder` (exists, empty), in self-describing files."""
        raise NotImplementedError(f"{type(self).__name__} has to say how it is saved")

    def restore(self, folder: str) -> None:
        """Replaces the content by that of `folder`. Failures that were in flight become dispatchable again.

        Raises:
          ValueError: the folder's format version or pool type is not this curriculum's; names both.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say how it is restored")
