"""Sampling on the device against float64 NumPy written by sorting, and the frequencies of what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.rollout import sampling
from deepgrpo.rollout.engine import check_sampling
from deepgrpo.rollout.sampling import Restriction
from tests.rollout import tiny

KINDS = [(1.0, 1.0, -1), (0.7, 1.0, 7), (1.3, 0.8, -1), (1.0, 0.6, 12), (1.0, 1e-6, -1), (1.0, 1.0, 1)]
draw = jax.jit(sampling.sample, static_argnums=5)


def sample(logits, seeds, settings, num_real_ids):
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    scalars = np.float32(settings.temperature), np.int32(settings.top_k), np.float32(settings.top_p)
    ids, logps = draw(jnp.asarray(logits, jnp.float32), keys, *scalars, Restriction.of(settings, num_real_ids))
    return np.asarray(ids), np.asarray(logps)


@pytest.mark.parametrize("temperature, top_p, top_k", KINDS)
@pytest.mark.parametrize("V, real", [(1, 1), (37, 30), (1000, 1000)])
def test_ids_and_logps_follow_the_restricted_distribution(temperature, top_p, top_k, V, real):
    logits = np.random.default_rng(V).normal(0, 3, (64, V)).astype(np.float32)
    settings = tiny.plain(temperature=temperature, top_p=top_p, top_k=top_k)
    ids, logps = sample(logits, range(64), settings, real)
    expected = np.array([tiny.restricted_logps(row, settings, real)[i] for row, i in zip(logits, ids, strict=True)])
    assert np.isfinite(expected).all(), "an id outside the restricted set was drawn"
    np.testing.assert_allclose(logps, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature, top_p, top_k", KINDS[:4])
def test_frequencies_follow_the_distribution(temperature, top_p, top_k):
    draws, real = 20_000, 19
    logits = np.random.default_rng(3).normal(0, 0.7, 23).astype(np.float32)
    settings = tiny.plain(temperature=temperature, top_p=top_p, top_k=top_k)
    ids, _ = sample(np.broadcast_to(logits, (draws, 23)), range(draws), settings, real)
    expected = draws * np.exp(tiny.restricted_logps(logits, settings, real))
    counts = np.bincount(ids, minlength=23)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert freedom >= 2
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def test_a_row_depends_on_its_own_key_and_logits_alone():
    logits = np.random.default_rng(5).normal(0, 2, (8, 50))
    ids, _ = sample(logits, range(8), tiny.plain(), 50)
    again, _ = sample(logits[::-1], range(8)[::-1], tiny.plain(), 50)
    np.testing.assert_array_equal(ids, again[::-1])


def test_greedy_is_the_first_maximum_of_the_real_ids():
    logits = np.zeros((2, 40), np.float32)
    logits[0, [11, 30]], logits[1, 39] = 5, 9  # 39 is phantom
    ids, logps = sample(logits, [0, 0], tiny.plain(temperature=0.0), 39)
    assert ids.tolist() == [11, 0]
    np.testing.assert_allclose(logps, [5 - np.log(37 + 2 * np.exp(5)), -np.log(39)], rtol=1e-6)


def test_ties_with_the_last_kept_are_kept():
    logits = np.array([[3.0, 1, 1, 1, 0]] * 2000, np.float32)
    ids, _ = sample(logits, range(2000), tiny.plain(top_k=2), 5)
    assert set(ids.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_threshold_is_the_exact_kth_value(scale):
    values = np.random.default_rng(1).normal(0, scale, (5, 6, 8)).astype(np.float32)
    got = sampling.threshold(jnp.asarray(values), jnp.ones_like(values), jnp.full(5, 9.0))
    np.testing.assert_array_equal(got, np.sort(values.reshape(5, -1))[:, -9])


@pytest.mark.parametrize(
    "field, value", [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 1.5), ("top_k", 0), ("max_model_len", 0)]
)
def test_a_parameter_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"Sampling.{field}"):
        check_sampling(tiny.plain(**{field: value}))
