"""A buffer of places at which responses can be branched: filled by every step, drawn from by later ones.

Not thread-safe: the curriculum that owns it holds a lock.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from deepgrpo.curriculum.forest_records import NEVER, own_ids
from deepgrpo.curriculum.header import saved_counts
from deepgrpo.curriculum.pivots import Pivot
from deepgrpo.curriculum.saved_rows import Saved
from deepgrpo.curriculum.weighted import sample
from deepgrpo.types import Ids, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class BranchPoint:
    """A place to branch, with what to continue there.

    state_ids: int32[len], prompt and the response up to there. group_id: of the rollouts that the response was one of.
    index, chain_length, kept: see `pivots.Pivot`. step: at which it was added, set by the buffer.
    """

    problem: Problem
    group_id: str
    state_ids: Ids
    index: int
    chain_length: int
    kept: int
    step: int = NEVER

    @property
    def pivot(self) -> Pivot:
        return Pivot(self.index, self.chain_length, self.kept)


class BranchBuffer:
    """The newest points in order of arrival, each for so many steps."""

    def __init__(self, *, max_model_len: int = 4096, max_size: int = 10000, max_age: int = 3, min_remaining_ratio: float = 0.1):
        """Args:
          max_size: newest points kept. max_age: steps after which an insertion drops a point.
          max_model_len, min_remaining_ratio: a point that leaves fewer tokens than this share of the context does not enter.

        Raises:
          ValueError: a bound is negative.
        """
        bounds = {"max_size": max_size, "max_age": max_age, "min_remaining_ratio": min_remaining_ratio}
        if wrong := [f"{name} must be >= 0, got {value}" for name, value in bounds.items() if value < 0]:
            raise ValueError(f"buffer of branch points: {'; '.join(wrong)}")
        self._max_size, self._max_age, self._max_model_len = max_size, max_age, max_model_len
        self._min_remaining = int(max_model_len * min_remaining_ratio)
        self._points: list[BranchPoint] = []
        self._counts = dict.fromkeys(("refused_room", "dropped_age", "dropped_capacity"), 0)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, points: Sequence[BranchPoint], step: int) -> int:
        """Takes in the points of a step that leave room, then drops the old ones, then the oldest above the bound; returns how
        many entered. Also without points it drops; nothing else does."""
        roomy = [point for point in points if self._max_model_len - len(point.state_ids) >= self._min_remaining]
        self._points += [dataclasses.replace(point, state_ids=own_ids(point.state_ids), step=step) for point in roomy]
        fresh = [point for point in self._points if step - point.step <= self._max_age]
        kept = fresh[max(len(fresh) - self._max_size, 0) :]
        self._counts["refused_room"] += len(points) - len(roomy)
        self._counts["dropped_age"] += len(self._points) - len(fresh)
        self._counts["dropped_capacity"] += len(fresh) - len(kept)
        self._points = kept
        return len(roomy)

    def sample(self, n: int, strategy: str, random: np.random.Generator) -> list[BranchPoint]:
        """Returns min(n, size) different points: "stratified" over the groups that they come from, or "uniform". They stay.

        Raises:
          ValueError: unknown strategy (not looked at while the buffer is empty).
        """
        if not self._points:
            return []
        chosen = sample([point.group_id for point in self._points], n, strategy, random)
        return [self._points[i] for i in chosen]

    def contents(self) -> list[BranchPoint]:
        return list(self._points)

    def metrics(self) -> dict[str, float]:
        """`buffer/*`."""
        values = {"size": len(self._points)} | self._counts
        if self._points:
            ratios = [point.pivot.ratio for point in self._points]
            values |= {
                "unique_trees": len({point.group_id for point in self._points}),
                "unique_steps": len({point.step for point in self._points}),
                "avg_position_ratio": sum(ratios) / len(ratios),
            }
        return {f"buffer/{name}": float(value) for name, value in values.items()}

    def saved(self) -> Saved:
        """Everything that `load` needs. Points never change, so the files can be written after the lock is released."""
        return Saved(list(self._points), dict(self._counts))

    def load(self, saved: Saved) -> None:
        self._points, self._counts = list(saved.rows), saved_counts(saved.numbers, dict.fromkeys(self._counts, 0))
