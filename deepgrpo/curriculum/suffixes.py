"""Teacher suffixes as a stream of their own: failures go to the teacher, and what it corrected is branched from once.

The queue to the teacher is `failed_pool`, what comes back waits here. Once there is a batch, a step takes it: each entry's shared
prefix is continued by the student, beside the teacher's own suffix.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.base import STATES, STREAM, Buffer, Correction, State, check_step, generator, named
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout, QueuedCurriculum
from deepgrpo.curriculum.saved import Saved
from deepgrpo.types import Group, Ids, Problem, as_ids

MAX_SIZE = 10000  # newest corrected failures kept


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
    suffix_ids: Ids
    reward: float
    failed_suffix_ids: Ids
    step: int


class AnnotatedPool(Buffer):
    """Entries that are taken once."""

    prefix = "teacher_pool"

    def __init__(self, max_size: int = MAX_SIZE):
        super().__init__(max_size)

    def add(self, entries: Sequence[AnnotatedEntry]) -> int:
        """Appends entries, then drops the oldest ones above the bound; returns the pool's size.

        Raises:
          ValueError: an entry has no teacher suffix. Those before it stay, and nothing is dropped.
        """
        for entry in entries:
            if entry.suffix_ids is None:
                raise ValueError(f"problem {entry.problem.index} ({entry.problem.data_source!r}): a correction without a suffix")
            self.entries.append(entry)
        self.drop_oldest()
        return len(self)

    def take(self, n: int, random: np.random.Generator, strategy: str = "stratified") -> list[AnnotatedEntry]:
        """Removes and returns min(n, size) entries."""
        chosen = self.draw(n, random, strategy)
        taken, gone = [self.entries[i] for i in chosen], set(chosen)
        self.entries = [entry for i, entry in enumerate(self.entries) if i not in gone]
        return taken


class SuffixPool(QueuedCurriculum):
    """`base.Curriculum` on a `FailedPool` and an `AnnotatedPool`."""

    name, version = "suffixes", 2
    keeps_suffixes = branches = True
    records = {"failed_pool": FailedRollout, "annotated_pool": AnnotatedEntry}

    def __init__(self, config: ml_collections.ConfigDict):
        super().__init__(config, FailedPool())
        self.annotated = AnnotatedPool()
        # Entries that are taken at once, and the student's continuations of each.
        self.batch, self.branches_per_entry = self.branch_groups(config, 0)
        self.taken: dict[tuple[int, int], AnnotatedEntry] = {}  # by (step, place): rolled out, not yet observed

    @classmethod
    def branch_groups(cls, config: ml_collections.ConfigDict, failed: float) -> tuple[float, int]:
        return config.branches.batch_threshold, config.branches.branches_per_entry

    def num_to_inject(self, batch_size: int) -> int:
        """A whole batch, or nothing."""
        with self.lock:
            return self.batch if len(self.annotated) >= self.batch else 0

    def sample(self, n: int, step: int) -> list[State]:
        """Removes entries from the pool; until `observe`, `continuation` knows them."""
        check_step(step)
        with self.lock:
            entries = self.annotated.take(n, generator(self.seed, step, STATES))
            taken = {(step, i): entry for i, entry in enumerate(entries)}
            self.taken |= taken
        return [
            State(as_ids(np.concatenate([e.state_ids, e.prefix_ids])), e.problem, node, self.branches_per_entry, STREAM)
            for node, e in taken.items()
        ]

    def continuation(self, node: Any) -> tuple[Ids, float] | None:
        with self.lock:
            entry = self.taken.get(node)
        return None if entry is None else (entry.suffix_ids, entry.reward)

    def look_up(self, node: Any) -> Mapping[str, Any]:
        with self.lock:
            entry = self.taken.get(node)
        if entry is None:
            return {}
        suffixes = {"suffix_ids": entry.suffix_ids, "failed_suffix_ids": entry.failed_suffix_ids, "reward": entry.reward}
        return {"created_step": entry.step, **suffixes}

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The failures of the data set's groups go to the teacher; those of continuations do not. Entries taken are forgotten."""
        check_step(step)
        continued = [group for group in groups if group.prompt.stream == STREAM]
        failed = [entry for group in groups if group.prompt.stream != STREAM for entry in self.failures_of(group)]
        with self.lock:
            self.failed.add(failed, step)
            self.taken = {node: entry for node, entry in self.taken.items() if node[0] > step}
        return named("teacher", {"entries_sampled": len(continued), "failed_collected": len(failed)})

    def corrected(self, failed: FailedRollout, correction: Correction, step: int) -> AnnotatedEntry:
        fields = {field.name: getattr(correction, field.name) for field in dataclasses.fields(correction)}
        return AnnotatedEntry(failed.problem, failed.group_id, failed.state_ids, **fields, step=step)

    def add(self, entry: AnnotatedEntry) -> None:
        self.annotated.add([entry])

    def metrics(self) -> Mapping[str, float]:
        with self.lock:
            return self.annotated.metrics() | self.failed.metrics()

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        tables, fields = super().saved()
        return tables | {"annotated_pool": self.annotated.saved()}, fields

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        super().load(tables, fields)
        self.annotated.load(tables["annotated_pool"])
        self.taken = {}
