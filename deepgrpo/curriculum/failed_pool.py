"""Failed rollouts that wait for the teacher: the queue of the curricula whose corrections go into another pool.

Two ways to choose whom the teacher gets next. Bounded: at random among the newest ones. Priority: round robin over the states
that the rollouts started from, the freshest state first, of each its newest failure.

A failure that was handed out stays known until it is settled: a run that is resumed hands it out again.

Not thread-safe: the curriculum that owns it holds one lock over all its pools, so that a failure leaves one pool and its
correction enters the other in one piece.
"""

import bisect
import dataclasses
import itertools
import logging
from collections.abc import Sequence

import numpy as np

from deepgrpo.curriculum.base import Failure
from deepgrpo.curriculum.forest_order import SortedKeys
from deepgrpo.curriculum.forest_records import NEVER, own_ids, tree_key
from deepgrpo.curriculum.header import saved_counts
from deepgrpo.curriculum.saved_rows import Saved
from deepgrpo.types import Ids, Problem

log = logging.getLogger(__name__)


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


def _number(failed: FailedRollout) -> int:
    return failed.event


class FailedPool:
    """The queue. Events are numbered in order of arrival; an unknown number is a no-op."""

    def __init__(
        self,
        *,
        max_size: int = 10000,
        max_age: int = 5,
        priority: bool = False,
        max_per_state: int = 0,
        max_waiting: int = 0,
        fair: bool = False,
    ):
        """Args:
          max_size: bounded: newest failures kept. max_age: bounded: steps after which an insertion drops a failure.
          priority: round robin over states, as above. `max_size` and `max_age` are not looked at then.
          max_per_state: priority: newest failures kept a state. max_waiting: priority: kept in all, the oldest dropped first.
            0: no bound (the reference).
          fair: priority: of states that failed in the same step the one that was served least recently is next, whatever is taken
            at once; False: the first of each call is the first to come (the reference).

        Raises:
          ValueError: a bound is negative.
        """
        bounds = {"max_size": max_size, "max_age": max_age, "max_per_state": max_per_state, "max_waiting": max_waiting}
        if wrong := [f"{name} must be >= 0, got {value}" for name, value in bounds.items() if value < 0]:
            raise ValueError(f"pool of failed rollouts: {'; '.join(wrong)}")
        self._priority = priority
        self._waiting = _RoundRobin(max_per_state, max_waiting, fair) if priority else _Bounded(max_size, max_age)
        self._in_flight: dict[int, FailedRollout] = {}
        self._counts = dict.fromkeys(("enqueued", "dispatched", "settled", "dropped_capacity", "dropped_age"), 0)

    def __len__(self) -> int:
        """Number of failures that wait."""
        return len(self._waiting)

    @property
    def dispatched(self) -> int:
        """Failures handed out so far: numbers the random draws of a step (`weighted.generator`)."""
        return self._counts["dispatched"]

    def add(self, failures: Sequence[FailedRollout], step: int) -> int:
        """Takes in failures of `step`; returns how many wait. Bounded: also without any, it drops those past their age."""
        for failed in failures:
            number = self._counts["enqueued"]
            self._counts["enqueued"] += 1
            ids = own_ids(failed.state_ids), own_ids(failed.response_ids)
            self._waiting.append(FailedRollout(failed.problem, failed.group_id, *ids, step, number))
        for reason, dropped in self._waiting.evict(step).items():
            self._counts[reason] += dropped
        return len(self._waiting)

    def take(self, n: int, random: np.random.Generator) -> list[FailedRollout]:
        """Removes and returns at most `n` failures.

        Bounded: a random subset, newest first. Priority: lap by lap; a lap visits the states in the order of their newest
        failure's step, latest first, ties in order of the states' arrival.

        Raises:
          ValueError: `n` is negative, in bounded mode.
        """
        return self._waiting.take(n, random)

    def dispatch(self, n: int, random: np.random.Generator) -> list[Failure]:
        """Like `take`, but each failure stays in flight until it is settled or put back."""
        taken = self.take(n, random)
        self._in_flight |= {failed.event: failed for failed in taken}
        self._counts["dispatched"] += len(taken)
        return [Failure(f.event, f.problem, f.state_ids, f.response_ids, f.step) for f in taken]

    def settle(self, event: int) -> FailedRollout | None:
        """Forgets a failure in flight, and returns it."""
        failed = self._in_flight.pop(event, None)
        self._counts["settled"] += failed is not None
        return failed

    def requeue(self, event: int) -> None:
        """Puts a failure in flight back to its place by arrival."""
        if (failed := self._in_flight.pop(event, None)) is not None:
            self._waiting.put_back(failed)

    def contents(self) -> list[list[FailedRollout]]:
        """What waits, oldest first: in priority mode one list a state, else a single list."""
        return self._waiting.contents()

    def metrics(self) -> dict[str, float]:
        sizes = {"size": len(self._waiting), "in_flight": len(self._in_flight)} | self._counts
        if self._priority:
            depths = [len(stack) for stack in self.contents()]
            sizes |= {"unique_keys": len(depths), "max_deque_depth": max(depths, default=0)}
        return {f"failed_pool/{name}": float(value) for name, value in sizes.items()}

    def saved(self) -> Saved:
        """Everything that `load` needs. Entries never change, so the files can be written after the lock is released."""
        in_flight = sorted(self._in_flight.values(), key=_number)
        rows = [*itertools.chain.from_iterable(self.contents()), *in_flight]
        return Saved(rows, self._counts | {"priority": int(self._priority), "in_flight": len(in_flight)})

    def load(self, saved: Saved) -> None:
        """Replaces the content; what was in flight waits again. What the other mode saved is not taken over, with a warning."""
        numbers = saved_counts(saved.numbers, dict.fromkeys((*self._counts, "priority", "in_flight"), 0))
        priority, in_flight = bool(numbers.pop("priority")), numbers.pop("in_flight")
        events = [failed.event for failed in saved.rows]
        if in_flight > len(events) or len(set(events)) < len(events) or max(events, default=-1) >= numbers["enqueued"]:
            raise ValueError(
                "failed_pool.json: a failure comes twice, the next number is in use, or more are in flight than there are"
            )
        self._waiting.clear()
        self._in_flight = {}
        self._counts = numbers
        if priority != self._priority:
            names = ("bounded", "priority")
            message = "%d failed rollouts were saved in %s mode, this pool is in %s mode: they are left out"
            log.warning(message, len(saved.rows), names[priority], names[self._priority])
            return
        waiting = len(saved.rows) - in_flight
        for failed in saved.rows[:waiting]:
            self._waiting.append(failed)
        for failed in saved.rows[waiting:]:
            self._waiting.put_back(failed)


class _Bounded:
    """The newest failures in order of arrival, each for so many steps."""

    def __init__(self, max_size: int, max_age: int):
        self._max_size, self._max_age = max_size, max_age
        self._entries: list[FailedRollout] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, failed: FailedRollout) -> None:
        self._entries.append(failed)

    def evict(self, step: int) -> dict[str, int]:
        """Steps may go backwards: a failure of a later step is not old."""
        fresh = [failed for failed in self._entries if step - failed.step <= self._max_age]
        kept = fresh[max(len(fresh) - self._max_size, 0) :]
        dropped = {"dropped_age": len(self._entries) - len(fresh), "dropped_capacity": len(fresh) - len(kept)}
        self._entries = kept
        return dropped

    def put_back(self, failed: FailedRollout) -> None:
        bisect.insort(self._entries, failed, key=_number)

    def take(self, n: int, random: np.random.Generator) -> list[FailedRollout]:
        if n < 0:
            raise ValueError(f"the number of failed rollouts to take must be >= 0, got {n}")
        chosen = random.choice(len(self._entries), size=min(n, len(self._entries)), replace=False)
        return [self._entries.pop(i) for i in sorted(chosen.tolist(), reverse=True)]

    def contents(self) -> list[list[FailedRollout]]:
        return [list(self._entries)]

    def clear(self) -> None:
        self._entries = []


class _RoundRobin:
    """A stack of failures a state; the states in the order in which they are served."""

    def __init__(self, max_per_state: int, max_waiting: int, fair: bool):
        self._max_per_state, self._max_waiting, self._fair = max_per_state, max_waiting, fair
        self._next = self._tick = 0
        self.clear()

    def clear(self) -> None:
        self._stacks: dict[bytes, list[FailedRollout]] = {}  # ascending by event; never empty
        self._ranks: dict[bytes, int] = {}  # of a stack: order of creation
        self._order = SortedKeys()  # (-step of the newest, tick, rank, key) of each stack
        self._arrivals = SortedKeys()  # (event, key) of each failure

    def __len__(self) -> int:
        return len(self._arrivals)

    def append(self, failed: FailedRollout) -> None:
        self.put_back(failed)  # the newest of all: it comes to lie on top

    def put_back(self, failed: FailedRollout) -> None:
        key = tree_key(failed.state_ids)
        self._tick = max(self._tick, failed.tick)
        if key in self._stacks:
            self._order.remove(self._place(key))
            bisect.insort(self._stacks[key], failed, key=_number)
        else:
            self._stacks[key], self._ranks[key] = [failed], self._next
            self._next += 1
        self._order.add(self._place(key))
        self._arrivals.add((failed.event, key))

    def evict(self, step: int) -> dict[str, int]:
        before = len(self)
        if self._max_per_state:
            for key, stack in self._stacks.items():
                while len(stack) > self._max_per_state:
                    self._remove(key, 0)
        while self._max_waiting and len(self) > self._max_waiting:
            _, key = next(iter(self._arrivals))
            self._remove(key, 0)
        return {"dropped_capacity": before - len(self)}

    def take(self, n: int, random: np.random.Generator) -> list[FailedRollout]:
        taken: list[FailedRollout] = []
        while self._stacks and len(taken) < n:
            lap = list(itertools.islice(self._order, n - len(taken)))  # its order stands, though takings change newest steps
            taken += [self._remove(key, -1) for *_, key in lap]
        return taken

    def contents(self) -> list[list[FailedRollout]]:
        return [list(stack) for stack in self._stacks.values()]

    def _place(self, key: bytes) -> tuple[int, int, int, bytes]:
        stack = self._stacks[key]
        return -stack[-1].step, max(failed.tick for failed in stack), self._ranks[key], key

    def _remove(self, key: bytes, position: int) -> FailedRollout:
        self._order.remove(self._place(key))
        stack = self._stacks[key]
        failed = stack.pop(position)
        self._arrivals.remove((failed.event, key))
        if not stack:
            del self._stacks[key], self._ranks[key]
            return failed
        if self._fair and position == -1:
            self._tick += 1
            stack[-1] = dataclasses.replace(stack[-1], tick=self._tick)
        self._order.add(self._place(key))
        return failed
