"""The decoder: packing, caching and rematerialisation do not change what it computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer, decode_layers, empty_caches, unstack_layers

QWEN2 = ModelConfig("qwen2", 50, 3, 24, 4, 2, 6, 40, 1e4, 1e-6, True, True, False, 64)
QWEN3 = dataclasses.replace(QWEN2, model_type="qwen3", qkv_bias=False, qk_norm=True, tie_embeddings=False)
ONES = jnp.ones((1, 1), jnp.int32)


@functools.cache
def model_and_params(config):
    model, rng = Transformer(config, jnp.float32), np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ONES, ONES, ONES)["params"]
    near = {"scale": 1.0, "bias": 0.0, "kernel": 0.0, "embedding": 0.0}  # biases and scales must matter too
    return model, jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(near[path[-1].key] + 0.2 * rng.normal(size=leaf.shape), jnp.float32), shapes
    )


def logits(model, params, *inputs):
    return np.asarray(full_forward(model, params, *inputs))


@functools.partial(jax.jit, static_argnums=0)
def full_forward(model, params, tokens, positions, segments):
    hidden, cache = model.apply({"params": params}, tokens, positions, segments)
    assert cache is None
    return model.apply({"params": params}, hidden, method="logits")


def sequence(length, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 50, (1, length))
    return tokens, np.arange(length)[None], np.ones((1, length), np.int32)


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_packed_rows_equal_separate_ones(config):
    model, params = model_and_params(config)
    one, two = sequence(5, 1), sequence(5, 2)
    padding = np.zeros((1, 3), np.int32)
    packed = [np.concatenate(parts, axis=1) for parts in zip(one, two, strict=True)]
    packed[2][0, 5:] = 2
    packed = [np.concatenate([part, padding], axis=1) for part in packed]
    got = logits(model, params, *packed)
    np.testing.assert_allclose(got[:, :5], logits(model, params, *one), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[:, 5:10], logits(model, params, *two), rtol=0, atol=1e-5)


def test_later_tokens_do_not_reach_earlier_ones():
    model, params = model_and_params(QWEN2)
    tokens, positions, segments = sequence(8)
    changed = tokens.copy()
    changed[0, -1] = (changed[0, -1] + 1) % 50
    before, after = (logits(model, params, t, positions, segments) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert np.abs(before[:, -1] - after[:, -1]).max() > 1e-3


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_decoding_token_by_token_equals_one_forward(config):
    model, params = model_and_params(config)
    tokens, positions, segments = sequence(9)
    expected = logits(model, params, tokens, positions, segments)
    layers = unstack_layers(params, config.num_layers)
    caches = empty_caches(config, 1, 12, jnp.float32)
    k, v = (jnp.stack([cache[i] for cache in caches]) for i in (0, 1))

    @jax.jit
    def layered(tokens, positions, caches):
        x, caches = decode_layers(model, layers, tokens, positions, caches)
        return model.apply({"params": params}, x, method="finish"), caches

    @jax.jit
    def scanned(tokens, positions, cache):
        hidden, cache = model.apply({"params": params}, tokens, positions, cache=cache)
        return model.apply({"params": params}, hidden, method="logits"), cache

    for part in (slice(0, 4), *(slice(t, t + 1) for t in range(4, 9))):  # a prefill, then single tokens
        got, caches = layered(tokens[:, part], positions[:, part], caches)
        np.testing.assert_allclose(got, expected[:, part], rtol=0, atol=1e-5)
        got, (k, v) = scanned(tokens[:, part], positions[:, part], (k, v))
        np.testing.assert_allclose(got, expected[:, part], rtol=0, atol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat):
    model, params = model_and_params(QWEN2)
    inputs = sequence(6)

    def gradient(remat):
        loss = lambda p: model.clone(remat=remat).apply({"params": p}, *inputs)[0].sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    for a, b in zip(jax.tree.leaves(gradient("none")), jax.tree.leaves(gradient(remat)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_unstacked_layers_share_no_buffer():
    _, params = model_and_params(QWEN2)
    copied = jax.tree.map(jnp.copy, params)
    layers = jax.jit(functools.partial(unstack_layers, num_layers=QWEN2.num_layers))(copied)
    jax.tree.map(lambda leaf: leaf.delete(), copied)
    np.testing.assert_array_equal(layers["embed_tokens"]["embedding"], params["embed_tokens"]["embedding"])
    np.testing.assert_array_equal(
        layers["layers"][2]["mlp"]["up_proj"]["kernel"], params["layers"]["mlp"]["up_proj"]["kernel"][2]
    )
