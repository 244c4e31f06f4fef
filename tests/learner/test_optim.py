"""AdamW, clipping and the schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner.optim import Optim, adamw, init_adam, learning_rate
from tests.conftest import golden_cases

OPTIM = Optim(lr=1e-2, schedule="constant", warmup_steps=0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, grad_clip=1.0)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"adamw_with_clip"}))
def test_golden(case):
    inputs, expected = case["inputs"], case["expected"]
    b1, b2 = inputs["betas"]
    o = dataclasses.replace(
        OPTIM, b1=b1, b2=b2, eps=inputs["eps"], weight_decay=inputs["weight_decay"], grad_clip=inputs["max_grad_norm"]
    )
    with jax.enable_x64(True):
        params = {"w": jnp.asarray(inputs["p0"], jnp.float64)}
        adam = init_adam(params)
        for grad, after, norm in zip(inputs["grads"], expected["params_after_each"], expected["grad_norms"], strict=True):
            params, adam, actual_norm = adamw(params, adam, {"w": jnp.asarray(grad, jnp.float64)}, inputs["lr"], o)
            np.testing.assert_allclose(params["w"], after, **case["tolerance"])
            np.testing.assert_allclose(actual_norm, norm, **case["tolerance"])


def test_against_float64_numpy():
    rng = np.random.default_rng(0)
    p, m, v = rng.normal(size=5), np.zeros(5), np.zeros(5)
    params = {"w": jnp.asarray(p, jnp.float32)}
    adam = init_adam(params)
    for t in range(1, 4):
        g = rng.normal(size=5) * 10.0 ** (2 - t)
        params, adam, _ = adamw(params, adam, {"w": jnp.asarray(g, jnp.float32)}, 0.1, OPTIM)
        g = g * min(1.0, 1.0 / (np.linalg.norm(g) + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(params["w"], p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    params = {"w": jnp.ones(2)}
    adam = init_adam(params)
    new, state, norm = adamw(params, adam, {"w": jnp.asarray([1.0, bad])}, 0.1, OPTIM)
    assert not np.isfinite(norm) and new["w"].tolist() == [1, 1] and state["count"] == 0 and not state["mu"]["w"].any()


def test_a_step_can_be_skipped():
    params = {"w": jnp.ones(2)}
    for skip in (False, True):
        new, state, norm = adamw(params, init_adam(params), {"w": jnp.ones(2)}, 0.1, OPTIM, skip=jnp.bool_(skip))
        assert (new["w"].tolist() == [1, 1]) == skip == (int(state["count"]) == 0) and np.isfinite(norm)


def test_schedules():
    warm = dataclasses.replace(OPTIM, lr=1.0, warmup_steps=3)
    assert [learning_rate(warm, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = dataclasses.replace(warm, schedule="cosine", warmup_steps=0)
    np.testing.assert_allclose([learning_rate(cosine, step, 4) for step in (0, 2, 4, 9)], [1.0, 0.5, 0.0, 0.0], atol=1e-12)
    with pytest.raises(ValueError, match="optim.schedule is 'linear'"):
        dataclasses.replace(OPTIM, schedule="linear")
