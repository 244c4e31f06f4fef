"""The native rollout engine: continuous batching over a key-value cache, in process, in JAX.

A prompt is prefilled once; its keys and values are copied into a slot for each of its samples. All slots decode
`decode_steps` tokens a compiled call; those that end are refilled from the queue before the next one. The last prompt token is
not prefilled but decoded, so that every token of a response, the first included, is sampled by one piece of code.

A sample's tokens are a function of (weights, prompt, sampling, seed): its key is `fold_in(key(seed), token index)` and no row
reads another. Shapes (slots, cache length) change with the load, and with them the order of float sums: log-probs may differ in
their last bits between loads, and so, very rarely, may a token that lay on the edge of its interval.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer, abstract_params, decode_layers, empty_caches, unstack_layers
from deepgrpo.rollout import sampling as sampling_lib
from deepgrpo.rollout.engine import Feed, OnDone, Request, Sampling, check_ids
from deepgrpo.rollout.sampling import Restriction
from deepgrpo.rollout.scheduler import Sample, Scheduler, Slots, length_buckets, slot_buckets, smallest
from deepgrpo.types import Completion

#### Where the arrays live: on one device, or on the learner's mesh

# Decoding reads every weight for every token. On a mesh, weights therefore stay split along `tensor` only, gathered once a
# publish, and the slots are spread over the axes along which the learner replicates or shards parameters.

DECODE_STEPS = 8  # tokens a slot decodes between two looks of the scheduler
TENSOR_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Layout:
    """mesh: None for one device. slot_axes: mesh axes that divide the slots. heads_axis: the one that divides K, or None."""

    mesh: Mesh | None = None
    slot_axes: tuple[str, ...] = ()
    heads_axis: str | None = None

    @classmethod
    def of(cls, params: Any, config: ModelConfig, slots: int) -> "Layout":
        """The layout for a tree of parameters: its mesh, if any leaf lives on several devices."""
        shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
        spread = next((s for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1), None)
        if spread is None:
            return cls()
        shape = spread.mesh.shape
        chosen: tuple[str, ...] = ()
        for axis in spread.mesh.axis_names:
            if axis != TENSOR_AXIS and slots % (math.prod(shape[a] for a in chosen) * shape[axis]) == 0:
                chosen += (axis,)
        splits_heads = TENSOR_AXIS in shape and config.num_kv_heads % shape[TENSOR_AXIS] == 0
        return cls(spread.mesh, chosen, TENSOR_AXIS if splits_heads else None)

    @property
    def slot_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.slot_axes) if self.mesh else 1

    def weights(self, params: Any) -> Any:
        """Shardings of the engine's stacked copy of `params`: theirs, without all axes but `tensor`. None on one device."""
        if self.mesh is None:
            return None

        def one(leaf: jax.Array) -> NamedSharding:
            spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
            return NamedSharding(self.mesh, P(*(TENSOR_AXIS if names_tensor(entry) else None for entry in spec)))

        return jax.tree.map(one, params)

    def constrain(self, caches: tuple, split_slots: bool = True) -> tuple:
        """Fixes the sharding of caches [B, K, ...] inside a compiled function: every call gives and takes the same one."""
        if self.mesh is None:
            return caches
        slots = self.slot_axes if split_slots and self.slot_axes else None
        return jax.lax.with_sharding_constraint(caches, NamedSharding(self.mesh, P(slots, self.heads_axis)))


def names_tensor(entry: Any) -> bool:
    return TENSOR_AXIS in (entry if isinstance(entry, tuple) else (entry,))


#### Compiled functions

Caches = tuple[tuple[jax.Array, jax.Array], ...]  # L pairs (k [B, K, H, S], v [B, K, S, H])

jax.tree_util.register_dataclass(Slots)


class Programs:
    """Functions jitted for one model and layout. `compilations` counts the shapes that were traced, of all of them."""

    def __init__(self, config: ModelConfig, dtype: Any, layout: Layout, decode_steps: int):
        self.config, self.dtype, self.layout, self.decode_steps = config, dtype, layout, decode_steps
        self.model = Transformer(config, dtype)
        self.compilations = 0
        self.copy = jax.jit(self._copy, static_argnames="shardings")
        self.prefill = jax.jit(self._prefill)
        self.insert = jax.jit(self._insert, donate_argnames="caches")
        self.resize = jax.jit(self._resize, static_argnames="length")
        self.empty = jax.jit(self._empty, static_argnames=("batch", "length"))
        self.decode = jax.jit(self._decode, donate_argnames="caches", static_argnames="restriction")

    def prepare(self, params: dict) -> dict:
        """The engine's own copy of the learner's parameters: layers unstacked, cast as the modules cast them at use.

        Every leaf is a fresh buffer: the learner may donate or delete its own afterwards. Norm scales stay float32.
        """
        shardings = self.layout.weights(params)
        return self.copy(params, None if shardings is None else tuple(jax.tree.leaves(shardings)))

    def _copy(self, params: dict, shardings: tuple[NamedSharding, ...] | None) -> dict:
        tree = jax.tree.structure(params)
        params = jax.tree_util.tree_map_with_path(self._cast, params)
        if shardings is not None:
            params = jax.lax.with_sharding_constraint(params, jax.tree.unflatten(tree, shardings))
        return unstack_layers(params, self.config.num_layers)

    def _cast(self, path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32 if path[-1].key == "scale" else self.dtype)

    # Each function's first line runs only while it is traced, once a shape: that is what counts compilations.

    def _prefill(self, params: dict, tokens: jax.Array, positions: jax.Array) -> Caches:
        """Keys and values of prompts. tokens, positions: int32[B, T]; padding has position T. Returns caches with S = T."""
        self.compilations += 1
        caches = empty_caches(self.config, *tokens.shape, self.dtype)
        _, caches = decode_layers(self.model, params, tokens, positions, caches)
        return self.layout.constrain(caches, split_slots=False)

    def _insert(self, caches: Caches, prompts: Caches, rows: jax.Array, fresh: jax.Array) -> Caches:
        """Copies prompt `rows[b]` into slot b where `fresh[b]`. rows: int32[B]. fresh: bool[B]. Prompts are no longer than S."""
        self.compilations += 1

        def place(cache: jax.Array, prompt: jax.Array) -> jax.Array:
            region = tuple(slice(0, size) for size in (cache.shape[0], *prompt.shape[1:]))
            chosen = jnp.where(fresh[:, None, None, None], jnp.take(prompt, rows, axis=0), cache[region])
            return cache.at[region].set(chosen)

        return self.layout.constrain(jax.tree.map(place, caches, prompts))

    def _resize(self, caches: Caches, rows: jax.Array, length: int) -> Caches:
        """Slots `rows` int32[B'] of the caches, with S = length: longer ones are cut, shorter ones padded."""
        self.compilations += 1

        def fit(cache: jax.Array, axis: int) -> jax.Array:
            cache = jax.lax.slice_in_dim(cache, 0, min(length, cache.shape[axis]), axis=axis)
            padding = [(0, length - cache.shape[axis] if i == axis else 0) for i in range(cache.ndim)]
            return jnp.pad(jnp.take(cache, rows, axis=0), padding)

        return self.layout.constrain(tuple((fit(k, 3), fit(v, 2)) for k, v in caches))

    def _empty(self, batch: int, length: int) -> Caches:
        self.compilations += 1
        return self.layout.constrain(empty_caches(self.config, batch, length, self.dtype))

    def _decode(self, params, caches: Caches, slots: Slots, stop_ids, temperature, top_k, top_p, restriction: Restriction):
        """Decodes up to `decode_steps` tokens in every active slot, until all have ended.

        Args:
          stop_ids: int32[n]. temperature, top_p: float32. top_k: int32.

        Returns:
          caches; tokens int32[steps, B]; logps float32[steps, B]; counts int32[B], how many of them each slot's sample got.
        """
        self.compilations += 1
        top = {"params": {name: leaf for name, leaf in params.items() if name != "layers"}}
        fold_in = jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))

        def going(state) -> jax.Array:
            step, _, slots, *_ = state
            return (step < self.decode_steps) & slots.active.any()

        def one(state):
            step, caches, slots, tokens, logps, counts = state
            x, caches = decode_layers(self.model, params, slots.tokens[:, None], slots.positions[:, None], caches)
            logits = self.model.apply(top, x[:, 0], method="finish")
            keys = fold_in(slots.seeds, slots.indices)
            ids, logp = sampling_lib.sample(logits, keys, temperature, top_k, top_p, restriction)
            # The id just sampled has position + 1, so prompt and response now count position + 2 tokens.
            ended = (ids[:, None] == stop_ids).any(axis=1) | (slots.positions + 2 >= slots.ends)
            advance = slots.active.astype(jnp.int32)
            slots = Slots(
                tokens=jnp.where(slots.active, ids, slots.tokens),
                positions=slots.positions + advance,
                ends=slots.ends,
                indices=slots.indices + advance,
                seeds=slots.seeds,
                active=slots.active & ~ended,
            )
            return (
                step + 1,
                self.layout.constrain(caches),
                slots,
                tokens.at[step].set(ids),
                logps.at[step].set(logp),
                counts + advance,
            )

        shape = (self.decode_steps, len(slots.tokens))
        nothing = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape[1:], jnp.int32))
        _, caches, _, *decoded = jax.lax.while_loop(going, one, (jnp.int32(0), caches, slots, *nothing))
        return caches, *decoded


#### One call of `generate`

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
        alone = sampling.stops.ids(restriction.num_real_ids) if sampling.stops else ()
        stop_ids = np.array(sorted({*sampling.stop_ids, *alone}) or [-1], np.int32)
        scalars = np.float32(sampling.temperature), np.int32(sampling.top_k), np.float32(sampling.top_p)
        self.sampling_args = (stop_ids, *scalars, restriction)

    def dispatch(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Refills the slots and decodes; returns what `collect` takes, before it is computed."""
        sources = None
        size = smallest(self.sizes, self.scheduler.unfinished)
        if size != len(self.scheduler.rows):
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


class NativeEngine:
    """Implements `engine.Engine`.

    Args:
      params: the learner's tree (layers stacked); copied, never kept.
      dtype: of weights, activations and cache; the learner's, so that log-probs agree.
      num_real_ids: ids at and above have no token and are never sampled.
      slots: sequences decoded at once. decode_steps: tokens between two looks of the scheduler.
      prefill_tokens: padded prompt tokens of one prefill call.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        dtype: Any,
        num_real_ids: int,
        slots: int,
        decode_steps: int = DECODE_STEPS,
        version: int = 0,
        prefill_tokens: int = 1024,
    ):
        self.config, self.dtype, self.num_real_ids = config, jnp.dtype(dtype), num_real_ids
        self.slots, self.decode_steps, self.prefill_tokens = slots, decode_steps, prefill_tokens
        self._programs: Programs | None = None
        self._params: Any = None
        self._closed = False
        self._counters = collections.Counter()
        self.publish(params, version)

    def publish(self, params: Any, version: int) -> None:
        """Copies `params` in the engine's dtype and layout; afterwards the caller may donate or delete its arrays.

        Raises:
          ValueError: the tree is not this model's; names the first leaf that differs.
        """
        self._require_open()
        check_params(params, self.config)
        layout = Layout.of(params, self.config, self.slots)
        if self._programs is None or self._programs.layout != layout:
            self._programs = Programs(self.config, self.dtype, layout, self.decode_steps)
        self._params = None  # the old copy goes first, so that two never exist at once
        self._params = jax.block_until_ready(self._programs.prepare(params))
        self.version = version

    def close(self) -> None:
        self._closed, self._params, self._programs = True, None, None

    def metrics(self) -> Mapping[str, float]:
        """Cumulative counters. Occupancy is sampled tokens over tokens that the slots had room for."""
        self._require_open()
        decoded = self._counters["decoded_slot_steps"]
        return {
            "engine/compilations": float(self._programs.compilations),
            "engine/prefill_tokens": float(self._counters["prefill_tokens"]),
            "engine/sampled_tokens": float(self._counters["sampled_tokens"]),
            "engine/dropped_tokens": float(self._counters["dropped_tokens"]),
            "engine/slot_occupancy": self._counters["sampled_tokens"] / decoded if decoded else 0.0,
        }

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None, feed: Feed | None = None
    ) -> list[list[Completion]]:
        """Samples all requests; see `engine.Engine`. `on_done` runs in this thread, while the device decodes the next tokens.

        Raises:
          ValueError: a request or a sampling parameter is out of range; names it.
          FloatingPointError: the policy gave a log-prob that is not finite.
        """
        self._require_open()
        if self._params is None:
            raise RuntimeError("this NativeEngine has no weights: its last publish failed; publish again")
        ids = self.num_real_ids, self.config.holes
        scheduler, version = Scheduler(sampling), self.version
        completions: list[list[Completion | None]] = []

        def admit(requests: Sequence[Request]) -> list[Sample]:
            check_ids(requests, sampling, *ids)
            first = len(completions)
            completions.extend([None] * len(request.seeds) for request in requests)
            return scheduler.add(requests, first)

        def deliver(samples: list[Sample]) -> None:
            for sample in samples:
                completion = sample.completion(sampling, version, *ids)
                self._counters["dropped_tokens"] += len(sample.ids) - len(completion.ids)
                completions[sample.request][sample.index] = completion
                if on_done is not None:
                    on_done(sample.request, sample.index, completion)

        ended = admit(requests)

        restriction = Restriction.of(sampling, self.num_real_ids)
        batch = Batch(self._programs, self._params, scheduler, sampling, restriction, self.slots, self.prefill_tokens)
        while True:
            if scheduler.unfinished:
                ended += admit(feed.take(wait=False)) if feed else []
                decoded = batch.dispatch()
                deliver(ended)  # while the device works
                ended = batch.collect(decoded)
                continue
            deliver(ended)
            further = feed.take(wait=True) if feed else []
            if not further:
                break
            ended = admit(further)
        self._counters.update(batch.counters)
        return completions

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this NativeEngine was closed; make a new one")


def check_params(params: Any, config: ModelConfig) -> None:
    """Raises ValueError, naming the leaf, unless `params` has the tree and the shapes of `config`'s decoder."""
    expected = abstract_params(config)
    shapes = {
        name: {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for name, tree in (("expected", expected), ("found", params))
    }
    for path in sorted(shapes["expected"].keys() | shapes["found"].keys()):
        want, got = (shapes[name].get(path, "nothing") for name in ("expected", "found"))
        if want != got:
            raise ValueError(f"parameter {path}: expected {want}, found {got}; not the tree of this {config.model_type} config")
