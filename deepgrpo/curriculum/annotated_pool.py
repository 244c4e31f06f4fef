"""Corrected failures that wait to be branched from: each is taken once (teacher suffixes as a pool of their own).

Not thread-safe: the curriculum that owns it holds one lock over all its pools, so that a failure leaves one pool and its
correction enters the other in one piece.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from deepgrpo.curriculum.header import saved_counts
from deepgrpo.curriculum.saved_rows import Saved
from deepgrpo.curriculum.weighted import sample
from deepgrpo.types import Ids, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class AnnotatedEntry:
    """One corrected failure.

    group_id: of the rollouts that it was one of. step: at which the correction came. reward: of the corrected answer.
    state_ids: int32[len], what the rollouts started from. prefix_ids: int32[len], what student and teacher share.
    suffix_ids: int32[len], the teacher's tokens after it, closed by a stop id.
    failed_suffix_ids: int32[len], what the student had written instead.
    """

    problem: Problem
    group_id: str
    state_ids: Ids
    prefix_ids: Ids
    suffix_ids: Ids | None
    reward: float
    failed_suffix_ids: Ids
    step: int


class AnnotatedPool:
    """The newest `max_size` entries, in order of arrival."""

    def __init__(self, max_size: int = 10000):
        """Raises:
        ValueError: `max_size` is not positive.
        """
        if max_size <= 0:
            raise ValueError(f"curriculum.annotated_pool_max_size must be positive, got {max_size}")
        self._max_size = max_size
        self._entries: list[AnnotatedEntry] = []
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[AnnotatedEntry]) -> int:
        """Appends entries, then drops the oldest ones above the bound; returns the pool's size.

        Raises:
          ValueError: an entry has no teacher suffix. Those before it stay, and nothing is dropped.
        """
        for entry in entries:
            if entry.suffix_ids is None:
                raise ValueError(
                    f"an entry of the annotated pool needs a teacher suffix, but that of problem {entry.problem.index} "
                    f"({entry.problem.data_source!r}) has none"
                )
            self._entries.append(entry)
        excess = max(len(self._entries) - self._max_size, 0)
        del self._entries[:excess]
        self._dropped += excess
        return len(self._entries)

    def has_enough(self, threshold: int) -> bool:
        return len(self._entries) >= threshold

    def contents(self) -> list[AnnotatedEntry]:
        return list(self._entries)

    def take(self, n: int, strategy: str, random: np.random.Generator) -> list[AnnotatedEntry]:
        """Removes and returns min(n, size) entries: "stratified" over the groups that they come from, or "uniform".

        Raises:
          ValueError: unknown strategy (not looked at while the pool is empty).
        """
        if not self._entries:
            return []
        chosen = sample([entry.group_id for entry in self._entries], n, strategy, random)
        taken = [self._entries[i] for i in chosen]
        gone = set(chosen)
        self._entries = [entry for i, entry in enumerate(self._entries) if i not in gone]
        return taken

    def metrics(self) -> dict[str, float]:
        counts = {"size": len(self._entries), "dropped_capacity": self._dropped}
        if self._entries:
            counts["unique_trees"] = len({entry.group_id for entry in self._entries})
        return {f"teacher_pool/{name}": float(value) for name, value in counts.items()}

    def saved(self) -> Saved:
        """Everything that `load` needs. Entries never change, so the files can be written after the lock is released."""
        return Saved(list(self._entries), {"dropped_capacity": self._dropped})

    def load(self, saved: Saved) -> None:
        self._entries = list(saved.rows)
        self._dropped = saved_counts(saved.numbers, {"dropped_capacity": 0})["dropped_capacity"]
