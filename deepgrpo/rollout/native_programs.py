"""The native engine's compiled functions: prepare weights, prefill prompts, place them in slots, decode, reshape the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer, decode_layers, empty_caches, unstack_layers
from deepgrpo.rollout.native_layout import Layout
from deepgrpo.rollout.sampling import Restriction, sample
from deepgrpo.rollout.scheduler import Slots

Caches = tuple[tuple[jax.Array, jax.Array], ...]  # L pairs (k [B, K, H, S], v [B, K, S, H])

jax.tree_util.register_dataclass(Slots)


class Programs:
    """Functions jitted for one model and layout. `compilations` counts the shapes that were traced, of all of them."""

    def __init__(self, config: ModelConfig, dtype: Any, layout: Layout, decode_steps: int):
        self.config, self.dtype, self.layout, self.decode_steps = config, dtype, layout, decode_steps
        self.model = Transformer(config, dtype)
        self.compilations = 0
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

        def copy(params):
            params = jax.tree_util.tree_map_with_path(self._cast, params)
            if shardings is not None:
                params = jax.lax.with_sharding_constraint(params, shardings)
            return unstack_layers(params, self.config.num_layers)

        return jax.jit(copy)(params)

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
            ids, logp = sample(logits, keys, temperature, top_k, top_p, restriction)
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
