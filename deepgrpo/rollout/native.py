"""The native rollout engine: continuous batching over a key-value cache, in process, in JAX.

A prompt is prefilled once; its keys and values are copied into a slot for each of its samples. All slots decode
`decode_steps` tokens a compiled call; those that end are refilled from the queue before the next one. The last prompt token is
not prefilled but decoded, so that every token of a response, the first included, is sampled by one piece of code.

A sample's tokens are a function of (weights, prompt, sampling, seed): its key is `fold_in(key(seed), token index)` and no row
reads another. Shapes (slots, cache length) change with the load, and with them the order of float sums: log-probs may differ in
their last bits between loads, and so, very rarely, may a token that lay on the edge of its interval.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params
from deepgrpo.rollout import sampling as sampling_lib
from deepgrpo.rollout.engine import OnDone, Request, Sampling, check_ids
from deepgrpo.rollout.native_batch import Batch
from deepgrpo.rollout.native_layout import Layout
from deepgrpo.rollout.native_programs import Programs
from deepgrpo.rollout.sampling import Restriction
from deepgrpo.rollout.scheduler import Sample, Scheduler
from deepgrpo.types import Completion


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
        decode_steps: int,
        version: int = 0,
        prefill_tokens: int = 1024,
    ):
        if not 1 <= num_real_ids <= config.vocab_size:
            raise ValueError(f"num_real_ids must be in [1, {config.vocab_size}] (the embedding's rows), got {num_real_ids}")
        for name, value in (("slots", slots), ("decode_steps", decode_steps), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
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
            "engine/slot_occupancy": self._counters["sampled_tokens"] / decoded if decoded else 0.0,
        }

    def generate(self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None) -> list[list[Completion]]:
        """Samples all requests; see `engine.Engine`. `on_done` runs in this thread, while the device decodes the next tokens.

        Raises:
          ValueError: a request or a sampling parameter is out of range; names it.
          FloatingPointError: the policy gave a log-prob that is not finite.
        """
        self._require_open()
        if self._params is None:
            raise RuntimeError("this NativeEngine has no weights: its last publish failed; publish again")
        sampling_lib.check(sampling)
        ids = self.num_real_ids, self.config.holes
        check_ids(requests, sampling, *ids)
        scheduler = Scheduler(requests, sampling)
        completions: list[list[Completion | None]] = [[None] * len(request.seeds) for request in requests]

        version = self.version

        def deliver(samples: list[Sample]) -> None:
            for sample in samples:
                completion = sample.completion(scheduler.stop_ids, version, *ids)
                completions[sample.request][sample.index] = completion
                if on_done is not None:
                    on_done(sample.request, sample.index, completion)

        restriction = Restriction.of(sampling, self.num_real_ids)
        batch = Batch(self._programs, self._params, scheduler, sampling, restriction, self.slots, self.prefill_tokens)
        ended = scheduler.without_room
        while scheduler.unfinished:
            decoded = batch.dispatch()
            deliver(ended)  # while the device works
            ended = batch.collect(decoded)
        deliver(ended)
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
