"""The flat pool as the training loop's curriculum: groups that fail as a whole go to the teacher, shared prefixes become states.

Rules: `flat_pool` (which states are drawn), `failed_pool` (whom the teacher gets next). Here: which groups of a step feed what.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.base import Correction, Curriculum, Failure, State
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.feedback import (
    check_failures,
    check_step,
    failures_for_teacher,
    injection_metrics,
    judged_groups,
    wanted_failures,
)
from deepgrpo.curriculum.flat_pool import FlatEntry, FlatPool
from deepgrpo.curriculum.header import as_saved, read_header, write_header
from deepgrpo.curriculum.saved_rows import read_saved, write_saved
from deepgrpo.curriculum.weighted import FAILURES, STATES, generator
from deepgrpo.learner.minibatch import injection_count
from deepgrpo.types import Group, as_ids

POOL, VERSION = "flat", 1
MAX_SIZE = 10000  # newest states kept


class FlatCurriculum(Curriculum):
    """`base.Curriculum` on a `FlatPool` fed from a `FailedPool`. One lock guards both."""

    def __init__(
        self,
        pool: FlatPool,
        failed: FailedPool,
        *,
        seed: int,
        threshold: float,
        failures: str = "all",
        injection_ratio: float = 0.25,
        strict_reference: bool = False,
    ):
        """Args:
        threshold: success is reward > threshold. failures: see `feedback.failures_for_teacher`.
        injection_ratio, strict_reference: see `minibatch.injection_count`.
        """
        check_failures(failures)
        self.pool, self.failed = pool, failed
        self._seed, self._threshold, self._failures = seed, threshold, failures
        self._ratio, self._strict = injection_ratio, strict_reference
        self._lock = threading.Lock()

    def wanted(self, batch_size: int) -> int:
        with self._lock:
            return injection_count(batch_size, self._ratio, len(self.pool), self._strict)

    def sample(self, n: int, step: int) -> list[State]:
        """Draws states; fewer than `n` where the pool's cap leaves fewer."""
        check_step(step)
        with self._lock:
            entries = self.pool.sample(n, generator(self._seed, step, STATES))
        return [State(ids=entry.state_ids, problem=entry.problem, node=entry.handle) for entry in entries]

    def look_up(self, node: int) -> Mapping[str, Any]:
        with self._lock:
            entry = self.pool.get(node)
        return {} if entry is None else {"created_step": entry.created_step}

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Notes what became of the injected states; the failures of groups without any success go to the teacher.

        Rollouts without a verdict count neither way; a group with too few (`Group.judged`) is left out.
        """
        check_step(step)
        judged = judged_groups(groups, self._threshold)
        escaped = [k_succ > 0 for group, k_succ, _ in judged if group.prompt.injected]
        failed = [entry for group, k_succ, _ in judged if not k_succ for entry in self._entries(group)]
        recorded = 0
        with self._lock:
            self.failed.add(failed, step)
            for group, k_succ, k_total in judged:
                if group.prompt.injected:
                    recorded += self.pool.record_usage(group.prompt.node, k_succ, k_total, step) is not None
        metrics = {"failed_gated_to_teacher": float(len(failed)), "recorded_entries": float(recorded)}
        if escaped:
            metrics["escape_rate_groups"] = sum(escaped) / len(escaped)
        return injection_metrics(groups, judged) | {f"synthetic_inject/{name}": value for name, value in metrics.items()}

    def _entries(self, group: Group) -> list[FailedRollout]:
        rollouts = failures_for_teacher(group, self._threshold, self._failures)
        prompt = group.prompt
        return [FailedRollout(prompt.problem, prompt.group_id, prompt.ids, r.completion.ids) for r in rollouts]

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        with self._lock:
            return self.failed.dispatch(max_items, generator(self._seed, step, FAILURES, self.failed.dispatched))

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Returns "added", "failed" (no correction: the failure is forgotten) or "stale" (the failure is not in flight)."""
        # What cannot be taken in raises here, while the failure is still known.
        state_ids = None if correction is None else as_ids(np.concatenate([failure.state_ids, correction.prefix_ids]))
        with self._lock:
            if self.failed.settle(failure.event) is None:
                return "stale"
            if correction is None:
                return "failed"
            self.pool.add(failure.problem, state_ids, prior(len(correction.prefix_ids), len(correction.suffix_ids)), step)
            return "added"

    def requeue(self, failure: Failure) -> None:
        with self._lock:
            self.failed.requeue(failure.event)

    def pending(self) -> int:
        with self._lock:
            return len(self.failed)

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            return self.pool.metrics() | self.failed.metrics()

    def state(self, folder: str) -> None:
        with self._lock:
            pool, failed = self.pool.saved(), self.failed.saved()
        write_saved(folder, "flat_pool", pool)
        write_saved(folder, "failed_pool", failed)
        write_header(folder, POOL, VERSION, {})

    def restore(self, folder: str) -> None:
        read_header(folder, POOL, VERSION)
        pool, failed = read_saved(folder, "flat_pool", FlatEntry), read_saved(folder, "failed_pool", FailedRollout)
        with as_saved(folder), self._lock:
            self.pool.load(pool)
            self.failed.load(failed)


def prior(prefix: int, suffix: int) -> float:
    """Success rate to assume of a state: the share of the corrected answer's tokens that its prefix has (the parent's was 0)."""
    return prefix / (prefix + suffix) if prefix + suffix else 0.5


def create(config: ml_collections.ConfigDict) -> FlatCurriculum:
    """Builds the curriculum from the whole configuration."""
    curriculum = config.curriculum
    return FlatCurriculum(
        FlatPool(max_size=MAX_SIZE),
        FailedPool(
            priority=True,
            max_per_state=curriculum.max_events_per_parent,
            max_waiting=curriculum.max_events,
            fair=not config.strict_reference,
        ),
        seed=config.seed,
        threshold=config.rewards.threshold,
        failures=wanted_failures(config),
        injection_ratio=curriculum.injection_ratio,
        strict_reference=config.strict_reference,
    )
