"""Failed rollouts that wait for the teacher: the queue of the curricula whose corrections go into another pool.

Two ways to choose whom the teacher gets next. Bounded: at random among the newest ones. Priority: round robin over the states
that the rollouts started from, the freshest state first, of each its newest failure.

A failure that was handed out stays known until it is settled: a run that is resumed hands it out again. Not thread-safe: the
curriculum that owns it holds one lock over all its pools, so that a failure leaves one pool and its correction enters the other
in one piece.
"""

import abc
import bisect
import dataclasses
import heapq
import itertools
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.base import FAILURES, NEVER, Correction, Curriculum, Failure, frozen_ids, generator, named, tree_key
from deepgrpo.curriculum.saved import Saved, saved_counts
from deepgrpo.types import Group, Ids, Problem

log = logging.getLogger(__name__)

MAX_SIZE = 10000  # bounded: newest failures kept
MAX_AGE = 5  # bounded: steps after which a failure is dropped
_number = operator.attrgetter("event")


@dataclasses.dataclass(frozen=True, eq=False)
class FailedRollout:
    """One failed rollout.

    group_id: of the rollouts that it was one of. state_ids: int32[len], what it started from (prompt and locked prefix).
    response_ids: int32[len], what the student sampled. step: at which it was added; event: its number; tick: when the teacher was
    last given one of its state before it. The pool sets these three.
    """

    problem: Problem
    group_id: str
    state_ids: Ids
    response_ids: Ids
    step: int = NEVER
    event: int = NEVER
    tick: int = 0


class FailedPool:
    """The queue. Failures are numbered in order of arrival; an unknown number is a no-op."""

    def __init__(
        self,
        *,
        priority: bool = False,
        max_size: int = MAX_SIZE,
        max_age: int = MAX_AGE,
        max_per_state: int = 0,
        fair: bool = False,
    ):
        """Args:
        priority: round robin over states, as above. max_size: newest failures kept in all; 0 in priority mode: no bound.
        max_age: bounded: steps after which an insertion drops a failure.
        max_per_state: priority: newest failures kept of a state; 0: no bound (the reference).
        fair: priority: of states that failed in the same step the one that was served least recently is next, whatever is taken
          at once; False: the first of each call is the first to come (the reference).
        """
        self.priority, self.fair = priority, fair
        self.max_size, self.max_age, self.max_per_state = max_size, max_age, max_per_state
        self.counts = dict.fromkeys(("enqueued", "dispatched", "settled", "dropped_capacity", "dropped_age"), 0)
        self._clear()

    def _clear(self) -> None:
        self.stacks: dict[bytes, list[FailedRollout]] = {}  # by state, in bounded mode one for all; ascending by event, not empty
        self.ticks: dict[bytes, int] = {}  # when a state that is waiting was last served; none: not yet
        self.in_flight: dict[int, FailedRollout] = {}
        self._tick = 0

    def __len__(self) -> int:
        """Number of failures that wait."""
        return sum(map(len, self.stacks.values()))

    def add(self, failures: Sequence[FailedRollout], step: int) -> int:
        """Takes in failures of `step`; returns how many wait. Bounded: also without any, it drops those past their age."""
        for failed in failures:
            ids = {"state_ids": frozen_ids(failed.state_ids), "response_ids": frozen_ids(failed.response_ids)}
            self._put(dataclasses.replace(failed, **ids, step=step, event=self.counts["enqueued"]))
            self.counts["enqueued"] += 1
        if not self.priority:  # steps may go backwards: a failure of a later step is not old
            self._drop([failed for failed in self._waiting() if step - failed.step > self.max_age], "dropped_age")
        elif self.max_per_state:
            for stack in list(self.stacks.values()):
                self._drop(stack[: -self.max_per_state], "dropped_capacity")
        if self.max_size or not self.priority:
            excess = max(len(self) - self.max_size, 0)
            self._drop(sorted(self._waiting(), key=_number)[:excess] if excess else [], "dropped_capacity")
        return len(self)

    def take(self, n: int, random: np.random.Generator) -> list[FailedRollout]:
        """Removes and returns at most `n` failures.

        Bounded: a random subset, newest first. Priority: lap by lap; a lap visits the states in the order of their newest
        failure's step, latest first, ties in order of the states' arrival.

        Raises:
          ValueError: `n` is negative, in bounded mode.
        """
        if not self.priority:
            if n < 0:
                raise ValueError(f"the number of failed rollouts to take must be >= 0, got {n}")
            waiting = list(self._waiting())
            chosen = random.choice(len(waiting), size=min(n, len(waiting)), replace=False)
            taken = [waiting[i] for i in sorted(chosen.tolist(), reverse=True)]
            self._drop(taken)
            return taken
        taken: list[FailedRollout] = []
        while self.stacks and len(taken) < n:
            lap = heapq.nsmallest(n - len(taken), self.stacks, key=self._turn)  # its order stands, though newest steps change
            taken += map(self._pop, lap)
        return taken

    def dispatch(self, n: int, random: np.random.Generator) -> list[Failure]:
        """Like `take`, but each failure stays in flight until it is settled or put back."""
        taken = self.take(n, random)
        self.in_flight |= {failed.event: failed for failed in taken}
        self.counts["dispatched"] += len(taken)
        return [Failure(f.event, f.problem, f.state_ids, f.response_ids, f.step) for f in taken]

    def settle(self, event: int) -> None:
        """Forgets a failure in flight."""
        self.counts["settled"] += self.in_flight.pop(event, None) is not None

    def requeue(self, event: int) -> None:
        """Puts a failure in flight back to its place by arrival."""
        if (failed := self.in_flight.pop(event, None)) is not None:
            self._put(failed)

    def contents(self) -> list[list[FailedRollout]]:
        """What waits, oldest first: in priority mode one list per state, else a single list."""
        return [list(stack) for stack in self.stacks.values()] or [[] for _ in range(not self.priority)]

    def metrics(self) -> dict[str, float]:
        sizes = {"size": len(self), "in_flight": len(self.in_flight)} | self.counts
        if self.priority:
            depths = [len(stack) for stack in self.stacks.values()]
            sizes |= {"unique_keys": len(depths), "max_deque_depth": max(depths, default=0)}
        return named("failed_pool", sizes)

    def saved(self) -> Saved:
        """Everything that `load` needs. Entries never change, so the files can be written after the lock is released."""
        rows = []
        for key, stack in self.stacks.items():
            rows += [*stack[:-1], dataclasses.replace(stack[-1], tick=self.ticks.get(key, 0))]
        in_flight = sorted(self.in_flight.values(), key=_number)
        return Saved([*rows, *in_flight], self.counts | {"priority": int(self.priority)})

    def load(self, saved: Saved) -> None:
        """Replaces the content; what was in flight waits again. What the other mode saved is not taken over, with a warning."""
        numbers = saved_counts(saved.numbers, self.counts | {"priority": 0})
        events = [failed.event for failed in saved.rows]
        if len(set(events)) < len(events) or max(events, default=-1) >= numbers["enqueued"]:
            raise ValueError("failed_pool.json: a failure comes twice, or the next number is in use")
        self._clear()
        priority, self.counts = bool(numbers.pop("priority")), numbers
        if priority != self.priority:
            names = ("bounded", "priority")
            message = "%d failed rollouts were saved in %s mode, this pool is in %s mode: they are left out"
            log.warning(message, len(saved.rows), names[priority], names[self.priority])
            return
        for failed in saved.rows:
            self._put(failed)

    def _waiting(self) -> list[FailedRollout]:
        return list(itertools.chain.from_iterable(self.stacks.values()))

    def _key(self, failed: FailedRollout) -> bytes:
        return tree_key(failed.state_ids) if self.priority else b""

    def _turn(self, key: bytes) -> tuple[int, int]:
        return -self.stacks[key][-1].step, self.ticks.get(key, 0)

    def _put(self, failed: FailedRollout) -> None:
        key = self._key(failed)
        bisect.insort(self.stacks.setdefault(key, []), dataclasses.replace(failed, tick=0), key=_number)
        self.ticks[key] = max(self.ticks.get(key, 0), failed.tick)
        self._tick = max(self._tick, failed.tick)

    def _pop(self, key: bytes) -> FailedRollout:
        """Serves a state."""
        failed = dataclasses.replace(self.stacks[key].pop(), tick=self.ticks.pop(key, 0))
        if not self.stacks[key]:
            del self.stacks[key]
        elif self.fair:
            self._tick += 1
            self.ticks[key] = self._tick
        return failed

    def _drop(self, failures: Sequence[FailedRollout], reason: str | None = None) -> None:
        gone = {failed.event for failed in failures}
        for key in {self._key(failed) for failed in failures}:
            self.stacks[key] = [failed for failed in self.stacks[key] if failed.event not in gone]
            if not self.stacks[key]:
                del self.stacks[key]
                self.ticks.pop(key, None)
        if reason is not None:
            self.counts[reason] += len(gone)


class QueuedCurriculum(Curriculum, abc.ABC):
    """What the curricula share whose failures wait in a `FailedPool`, and whose corrections enter another pool.

    A subclass sets `failed` and says what `corrected` makes of a correction, and how it is `add`ed.
    """

    asks_teacher = True
    failed: FailedPool

    def __init__(self, config: ml_collections.ConfigDict, failed: FailedPool):
        super().__init__(config)
        self.failed = failed

    @abc.abstractmethod
    def corrected(self, failed: FailedRollout, correction: Correction, step: int) -> Any:
        """The entry that a correction becomes; raises if it cannot be taken in, while the failure is still known."""

    @abc.abstractmethod
    def add(self, entry: Any) -> None:
        """Takes in an entry. Called under the lock."""

    def failures_of(self, group: Group) -> list[FailedRollout]:
        prompt = group.prompt
        return [
            FailedRollout(prompt.problem, prompt.group_id, prompt.marked_ids, r.completion.marked_ids)
            for r in self.to_teacher(group)
        ]

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        with self.lock:
            return self.failed.dispatch(max_items, generator(self.seed, step, FAILURES, self.failed.counts["dispatched"]))

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Returns "added", "failed" (no correction: the failure is forgotten) or "stale" (the failure is not in flight)."""
        with self.lock:
            if (failed := self.failed.in_flight.get(failure.failure_id)) is None:
                return "stale"
            entry = None if correction is None else self.corrected(failed, correction, step)
            self.failed.settle(failure.failure_id)
            if entry is None:
                return "failed"
            self.add(entry)
            return "added"

    def requeue(self, failure: Failure) -> None:
        with self.lock:
            self.failed.requeue(failure.failure_id)

    def pending(self) -> int:
        with self.lock:
            return len(self.failed)

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        return {"failed_pool": self.failed.saved()}, {}

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        self.failed.load(tables["failed_pool"])
