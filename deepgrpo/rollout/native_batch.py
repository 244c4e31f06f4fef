"""One `generate` call of the native engine: the running batch, its cache, and the prompts prefilled for it."""

import collections

import jax
import numpy as np

from deepgrpo.rollout.engine import Sampling
from deepgrpo.rollout.native_programs import Caches, Programs
from deepgrpo.rollout.sampling import Restriction
from deepgrpo.rollout.scheduler import Sample, Scheduler, length_buckets, slot_buckets, smallest

Placed = tuple[int, Sample]  # (slot, sample)


class Batch:
    """Alternates `dispatch`, which queues the device's next piece of work and returns at once, and `collect`, which waits for it.

    The cache lives as long as this object: no key or value survives the call, hence none survives a change of weights.
    """

    def __init__(
        self,
        programs: Programs,
        params: dict,
        scheduler: Scheduler,
        sampling: Sampling,
        restriction: Restriction,
        slots: int,
        prefill_tokens: int,
    ):
        self.programs, self.params, self.scheduler = programs, params, scheduler
        self.lengths = length_buckets(sampling.max_model_len)
        self.sizes = slot_buckets(slots, programs.layout.slot_shards)
        self.prefill_tokens = prefill_tokens
        self.prompts: dict[int, tuple[Caches, int]] = {}  # request -> prefilled prompts and its row in them
        self.caches: Caches | None = None
        self.length = 0  # S of the caches
        self.counters = collections.Counter()
        stop_ids = np.array(sorted(sampling.stop_ids) or [-1], np.int32)
        scalars = np.float32(sampling.temperature), np.int32(sampling.top_k), np.float32(sampling.top_p)
        self.sampling_args = (stop_ids, *scalars, restriction)

    def dispatch(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Refills the slots and decodes; returns what `collect` takes, before it is computed."""
        sources = None
        size = smallest(self.sizes, self.scheduler.unfinished)
        if size != len(self.scheduler.rows):  # only ever shrinks: `unfinished` does
            sources = self.scheduler.resize(size)
        placed = self.scheduler.refill()
        self._prefill([sample for _, sample in placed])
        self._shape_cache(sources, placed)
        self._insert(placed)
        self.caches, *decoded = self.programs.decode(self.params, self.caches, self.scheduler.slots(), *self.sampling_args)
        return tuple(decoded)

    def collect(self, decoded: tuple[jax.Array, jax.Array, jax.Array]) -> list[Sample]:
        """Waits for the decoded tokens and hands them to their samples; returns those that ended."""
        tokens, logps, counts = jax.device_get(decoded)
        self.counters["sampled_tokens"] += int(counts.sum())
        self.counters["decoded_slot_steps"] += int(counts.max()) * len(counts)
        return self.scheduler.record(tokens, logps, counts)

    def _shape_cache(self, sources: np.ndarray | None, placed: list[Placed]) -> None:
        """Gives the cache the scheduler's slots and the smallest length that holds the coming tokens and the new prompts."""
        needed = self.scheduler.reach(self.programs.decode_steps)
        prompts = (self.prompts[sample.request][0] for _, sample in placed if sample.request in self.prompts)
        length = max(smallest(self.lengths, needed), *(cache_length(p) for p in prompts), 0)
        if length < self.length <= 2 * length:
            length = self.length  # shrink only where it pays for the copy
        size = len(self.scheduler.rows)
        if self.caches is None:
            self.caches = self.programs.empty(size, length)
        elif sources is not None or length != self.length:
            rows = np.arange(size, dtype=np.int32) if sources is None else sources
            self.caches = self.programs.resize(self.caches, rows, length)
        self.length = length

    def _prefill(self, placed: list[Sample]) -> None:
        """Prefills the placed samples' prompts, together with prompts that are next in the queue, each request's once.

        Prompts of one length bucket go together, as many as the largest power of four that they fill: no row is padding, and
        few batch sizes are compiled.
        """
        missing = {s.request: s for s in placed if s.request not in self.prompts and len(s.prompt) > 1}
        while missing:
            ahead = self.scheduler.upcoming(self.prefill_tokens // self.lengths[0], known=self.prompts.keys() | missing.keys())
            first = next(iter(missing.values()))
            T = smallest(self.lengths, len(first.prompt) - 1)
            alike = [s for s in (*missing.values(), *ahead) if smallest(self.lengths, len(s.prompt) - 1) == T]
            together = alike[: power_of_four(min(len(alike), self.prefill_tokens // T))]
            tokens = np.zeros((len(together), T), np.int32)
            positions = np.full((len(together), T), T, np.int32)  # T: padding, not written
            for row, sample in enumerate(together):
                known = len(sample.prompt) - 1  # the last token is decoded
                tokens[row, :known] = sample.prompt[:-1]
                positions[row, :known] = np.arange(known)
                self.counters["prefill_tokens"] += known
            caches = self.programs.prefill(self.params, tokens, positions)
            for row, sample in enumerate(together):
                self.prompts[sample.request] = caches, row
                missing.pop(sample.request, None)

    def _insert(self, placed: list[Placed]) -> None:
        """Copies prefilled prompts into the slots of the placed samples; forgets those that no waiting sample needs."""
        batches: dict[int, tuple[Caches, list[tuple[int, int]]]] = {}
        for slot, sample in placed:
            if sample.request in self.prompts:
                prompts, row = self.prompts[sample.request]
                batches.setdefault(id(prompts), (prompts, []))[1].append((slot, row))
        for prompts, moves in batches.values():
            rows = np.zeros(len(self.scheduler.rows), np.int32)
            fresh = np.zeros(len(self.scheduler.rows), np.bool_)
            for slot, row in moves:
                rows[slot], fresh[slot] = row, True
            self.caches = self.programs.insert(self.caches, prompts, rows, fresh)
        waiting = {sample.request for sample in self.scheduler.waiting}
        self.prompts = {request: prompt for request, prompt in self.prompts.items() if request in waiting}


def cache_length(caches: Caches) -> int:
    return caches[0][0].shape[-1]


def power_of_four(n: int) -> int:
    """The largest power of four that is at most max(n, 1)."""
    return 4 ** ((max(n, 1).bit_length() - 1) // 2)
