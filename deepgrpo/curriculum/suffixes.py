"""Teacher suffixes as a stream of their own: failures go to the teacher, and what it corrected is branched from once.

The queue to the teacher is `failed_pool`, what comes back waits in `annotated_pool`. Once that holds a batch, a step takes it:
each entry's shared prefix is continued by the student, beside the teacher's own suffix (`learner.attach`).
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.annotated_pool import AnnotatedEntry, AnnotatedPool
from deepgrpo.curriculum.base import Correction, Curriculum, Failure, State
from deepgrpo.curriculum.branches import STREAM, is_branch
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.feedback import check_failures, check_step, failures_for_teacher, wanted_failures
from deepgrpo.curriculum.header import as_saved, read_header, write_header
from deepgrpo.curriculum.saved_rows import read_saved, write_saved
from deepgrpo.curriculum.weighted import FAILURES, STATES, generator
from deepgrpo.types import Group, Ids, as_ids

POOL, VERSION = "suffixes", 1


class SuffixCurriculum(Curriculum):
    """`base.Curriculum` on a `FailedPool` and an `AnnotatedPool`. One lock guards both."""

    def __init__(
        self,
        failed: FailedPool,
        annotated: AnnotatedPool,
        *,
        seed: int,
        threshold: float,
        failures: str = "all",
        batch_threshold: int = 128,
        branches_per_entry: int = 4,
        strategy: str = "stratified",
    ):
        """Args:
        threshold: success is reward > threshold. failures: see `feedback.failures_for_teacher`.
        batch_threshold: entries that are taken at once. branches_per_entry: the student's continuations of each.
        strategy: see `AnnotatedPool.take`.
        """
        check_failures(failures)
        self.failed, self.annotated = failed, annotated
        self._seed, self._threshold, self._failures = seed, threshold, failures
        self._batch, self._n, self._strategy = batch_threshold, branches_per_entry, strategy
        self._taken: dict[tuple[int, int], AnnotatedEntry] = {}  # by (step, place): rolled out, not yet observed
        self._lock = threading.Lock()

    def wanted(self, batch_size: int) -> int:
        """A whole batch, or nothing."""
        with self._lock:
            return self._batch if self.annotated.has_enough(self._batch) else 0

    def sample(self, n: int, step: int) -> list[State]:
        """Removes entries from the pool; until `observe`, `continuation` knows them."""
        check_step(step)
        with self._lock:
            entries = self.annotated.take(n, self._strategy, generator(self._seed, step, STATES))
            taken = {(step, i): entry for i, entry in enumerate(entries)}
            self._taken |= taken
        return [
            State(as_ids(np.concatenate([entry.state_ids, entry.prefix_ids])), entry.problem, node, self._n, STREAM)
            for node, entry in taken.items()
        ]

    def continuation(self, node: Any) -> tuple[Ids, float] | None:
        with self._lock:
            entry = self._taken.get(node)
        return None if entry is None else (entry.suffix_ids, entry.reward)

    def look_up(self, node: Any) -> Mapping[str, Any]:
        with self._lock:
            entry = self._taken.get(node)
        if entry is None:
            return {}
        suffixes = {"suffix_ids": entry.suffix_ids, "failed_suffix_ids": entry.failed_suffix_ids, "reward": entry.reward}
        return {"created_step": entry.step, **suffixes}

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """The failures of the data set's groups go to the teacher; those of continuations do not. Entries taken are forgotten."""
        check_step(step)
        failed = [entry for group in groups if not is_branch(group) for entry in self._entries(group)]
        with self._lock:
            self.failed.add(failed, step)
            self._taken = {node: entry for node, entry in self._taken.items() if node[0] > step}
        counts = {"entries_sampled": sum(map(is_branch, groups)), "failed_collected": len(failed)}
        return {f"teacher/{name}": float(value) for name, value in counts.items()}

    def _entries(self, group: Group) -> list[FailedRollout]:
        rollouts = failures_for_teacher(group, self._threshold, self._failures)
        prompt = group.prompt
        return [FailedRollout(prompt.problem, prompt.group_id, prompt.ids, r.completion.ids) for r in rollouts]

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        with self._lock:
            return self.failed.dispatch(max_items, generator(self._seed, step, FAILURES, self.failed.dispatched))

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Returns "added", "failed" (no correction: the failure is forgotten) or "stale" (the failure is not in flight)."""
        with self._lock:
            if (failed := self.failed.settle(failure.event)) is None:
                return "stale"
            if correction is None:
                return "failed"
            entry = AnnotatedEntry(
                problem=failed.problem,
                group_id=failed.group_id,
                state_ids=failed.state_ids,
                prefix_ids=correction.prefix_ids,
                suffix_ids=correction.suffix_ids,
                reward=correction.reward,
                failed_suffix_ids=correction.failed_suffix_ids,
                step=step,
            )
            self.annotated.add([entry])
            return "added"

    def requeue(self, failure: Failure) -> None:
        with self._lock:
            self.failed.requeue(failure.event)

    def pending(self) -> int:
        with self._lock:
            return len(self.failed)

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            return self.annotated.metrics() | self.failed.metrics()

    def state(self, folder: str) -> None:
        with self._lock:
            annotated, failed = self.annotated.saved(), self.failed.saved()
        write_saved(folder, "annotated_pool", annotated)
        write_saved(folder, "failed_pool", failed)
        write_header(folder, POOL, VERSION, {})

    def restore(self, folder: str) -> None:
        read_header(folder, POOL, VERSION)
        annotated = read_saved(folder, "annotated_pool", AnnotatedEntry)
        failed = read_saved(folder, "failed_pool", FailedRollout)
        with as_saved(folder), self._lock:
            self.annotated.load(annotated)
            self.failed.load(failed)
            self._taken = {}


def create(config: ml_collections.ConfigDict) -> SuffixCurriculum:
    """Builds the curriculum from the whole configuration."""
    keys = config.branches
    return SuffixCurriculum(
        FailedPool(),
        AnnotatedPool(),
        seed=config.seed,
        threshold=config.rewards.threshold,
        failures=wanted_failures(config),
        batch_threshold=keys.batch_threshold,
        branches_per_entry=keys.branches_per_entry,
    )
