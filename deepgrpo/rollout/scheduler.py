"""Continuous batching on the host: which sample decodes in which slot, what each has so far, which static shapes that takes.

Pure Python and NumPy: the device sees only the arrays that `Scheduler.slots` returns.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from deepgrpo.rollout.engine import Request, Sampling, checked
from deepgrpo.types import Completion, Ids, as_ids


@dataclasses.dataclass(eq=False)
class Sample:
    """One response in the making.

    request, index: where its completion belongs. end: prompt plus response tokens at which it stops for `length`.
    """

    request: int
    index: int
    prompt: Ids
    seed: int
    end: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token, which is the one to feed next."""
        return len(self.prompt) + len(self.ids) - 1

    def finish_reason(self, sampling: Sampling, checked: int = 0) -> str | None:
        """`stop`, `length`, or None while it goes on. A stop id that takes the last place is a `stop`.

        checked: leading tokens that are known to end in no stop text.
        """
        if self.ids and (self.ids[-1] in sampling.stop_ids or (sampling.stops and sampling.stops.length(self.ids, checked))):
            return "stop"
        return "length" if len(self.prompt) + len(self.ids) >= self.end else None

    def completion(self, sampling: Sampling, version: int, bound: int, holes: Sequence[int] = ()) -> Completion:
        """bound, holes: see `engine.check_ids`."""
        room = self.end - len(self.prompt)
        if room <= 0:
            return Completion(as_ids([]), np.zeros(0, np.float32), "length", version)
        return checked(self.ids, self.logps, self.finish_reason(sampling), version, room, sampling, bound, holes)


@dataclasses.dataclass(frozen=True)
class Slots:
    """What the device needs to know of its B slots. tokens: the newest token, not yet in the cache, at `positions`.

    tokens, positions, ends: int32[B]. indices: int32[B], response tokens sampled so far. seeds: uint32[B]. active: bool[B].
    """

    tokens: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    indices: np.ndarray
    seeds: np.ndarray
    active: np.ndarray


class Scheduler:
    """Fills free slots from a queue, requests that came together in order of prompt length: shorter prompts have longer to go."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.waiting: collections.deque[Sample] = collections.deque()
        self.rows: list[Sample | None] = []

    def add(self, requests: Sequence[Request], first: int = 0) -> list[Sample]:
        """Queues the samples of requests that are numbered from `first`; returns those that have no room for a token."""
        samples = [
            Sample(i, j, request.prompt_ids, seed, budget(request, self.sampling))
            for i, request in enumerate(requests, first)
            for j, seed in enumerate(request.seeds)
        ]
        room = [s for s in samples if s.end > len(s.prompt)]
        self.waiting.extend(sorted(room, key=lambda s: (len(s.prompt), s.request, s.index)))
        return [s for s in samples if s.end <= len(s.prompt)]

    @property
    def active(self) -> int:
        return sum(row is not None for row in self.rows)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + self.active

    def resize(self, size: int) -> np.ndarray:
        """Makes it `size` slots, keeping active samples: int32[size], the old slot that each new one takes over."""
        kept = [i for i, row in enumerate(self.rows) if row is not None]
        free = [i for i, row in enumerate(self.rows) if row is None]
        sources = sorted((kept + free)[:size])
        self.rows = [self.rows[i] for i in sources] + [None] * (size - len(sources))
        return np.array(sources + [0] * (size - len(sources)), np.int32)

    def refill(self) -> list[tuple[int, Sample]]:
        """Moves waiting samples into free slots; returns (slot, sample) of each."""
        placed = []
        for slot, row in enumerate(self.rows):
            if row is None and self.waiting:
                self.rows[slot] = self.waiting.popleft()
                placed.append((slot, self.rows[slot]))
        return placed

    def upcoming(self, count: int, known: set[int]) -> list[Sample]:
        """One waiting sample of each of the next `count` requests that are not in `known`."""
        first: dict[int, Sample] = {}
        for sample in self.waiting:
            if len(first) == count:
                break
            if sample.request not in known:
                first.setdefault(sample.request, sample)
        return list(first.values())

    def reach(self, steps: int) -> int:
        """Cache positions that `steps` further tokens touch."""
        return max((min(row.position + steps, row.end - 1) for row in self.rows if row is not None), default=1)

    def slots(self) -> Slots:
        idle = (0, 0, 1, 0, 0, False)
        columns = zip(
            *(
                idle if s is None else (s.ids[-1] if s.ids else s.prompt[-1], s.position, s.end, len(s.ids), s.seed, True)
                for s in self.rows
            ),
            strict=True,
        )
        dtypes = (np.int32, np.int32, np.int32, np.int32, np.uint32, np.bool_)
        return Slots(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))

    def record(self, tokens: np.ndarray, logps: np.ndarray, counts: np.ndarray) -> list[Sample]:
        """Appends what the slots decoded and frees those that ended; returns the ended samples.

        Args:
          tokens: int32[steps, B]. logps: float32[steps, B]. counts: int32[B], how many of them belong to each slot's sample.

        Raises:
          FloatingPointError: a log-prob is not finite, so the weights or activations are not.
        """
        ended = []
        for slot, sample in enumerate(self.rows):
            if sample is None:
                continue
            count = counts[slot]
            fresh = logps[:count, slot]
            if not np.isfinite(fresh).all():
                raise FloatingPointError(
                    f"request {sample.request}, sample {sample.index}: log-prob {fresh[~np.isfinite(fresh)][0]} after "
                    f"{len(sample.ids)} response tokens, expected a finite number; the policy's weights or activations "
                    "overflowed or are NaN"
                )
            before = len(sample.ids)
            sample.ids.extend(tokens[:count, slot].tolist())
            sample.logps.extend(fresh.tolist())
            if sample.finish_reason(self.sampling, before):
                self.rows[slot] = None
                ended.append(sample)
        return ended


def budget(request: Request, sampling: Sampling) -> int:
    """Prompt plus response tokens that the request may have."""
    limits = [limit for limit in (request.max_tokens, sampling.max_new_tokens) if limit is not None]
    return min([sampling.max_model_len, *(len(request.prompt_ids) + limit for limit in limits)])


def length_buckets(max_model_len: int) -> tuple[int, ...]:
    """Cache and padded prompt lengths that are compiled: 1/8, 1/4, 1/2, 3/4 and all of the context, rounded up to 64s."""
    eighths = (1, 2, 4, 6, 8)
    return tuple(sorted({64 * -(-max_model_len * eighth // 512) for eighth in eighths}))


def slot_buckets(slots: int, multiple: int) -> tuple[int, ...]:
    """Numbers of slots that are compiled: all, a quarter, a sixteenth; at least 4, and multiples of `multiple`."""
    sizes = {slots} | {slots // d for d in (4, 16) if slots // d >= 4 and (slots // d) % multiple == 0}
    return tuple(sorted(sizes))


def smallest(buckets: Sequence[int], needed: int) -> int:
    """The first bucket that holds `needed`, or the last one."""
    return next((bucket for bucket in buckets if bucket >= needed), buckets[-1])
