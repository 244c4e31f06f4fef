"""A fused attention backend is used only where it gives what xla gives, forward and backward, on a packed row of the run."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.config import ConfigError
from deepgrpo.learner import backends, sharding
from deepgrpo.learner.packing import Shape
from deepgrpo.model import attention as module
from tests.learner import tiny

SHAPE = Shape(4, 2, 48, 24)


def settle(name="splash", mesh=(1, 1, 1), shape=SHAPE):
    mesh = sharding.make_mesh(mesh, jax.devices()[: int(np.prod(mesh))])
    return backends.settle(name, tiny.model_config(), mesh, jnp.float32, shape)


def test_the_case_has_what_a_step_has():
    """Segments, responses that see a shared prompt in another row or their own, and padding, in every shard."""
    mesh = sharding.make_mesh((1, 2, 1), jax.devices()[:2])
    _, weights, sight = backends.make_case(tiny.model_config(), mesh, jnp.float32, SHAPE, "xla")
    segments, prefixes = np.asarray(sight.segments), np.asarray(sight.context.prefixes)
    for shard in (slice(0, 2), slice(2, 4)):
        assert segments[shard].max() >= 2 and (prefixes[shard] > 0).any() and (segments[shard] == 0).any()
        assert np.asarray(sight.context.segments)[shard].any()
    assert not np.asarray(weights)[segments == 0].any()


@pytest.mark.parametrize(("mesh", "shape"), [((1, 1, 1), SHAPE), ((1, 2, 2), SHAPE), ((1, 1, 4), Shape(4, 2, 40))])
def test_a_backend_that_agrees_is_kept(mesh, shape, caplog):
    with caplog.at_level(logging.INFO):
        assert settle(mesh=mesh, shape=shape) == "splash"
    assert "splash agrees with xla on cpu" in caplog.text


def wrong(change):
    right = module.splash_attention

    def attention(q, k, v, segments, context_segments=None, placed=None):
        return change(right, q, k, v, segments, context_segments, placed)

    return attention


@jax.custom_vjp
def half_gradient(x):
    return x


half_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))

WRONG = {
    "ignores segments": lambda f, q, k, v, s, c, p: f(q, k, v, jnp.ones_like(s), c, p),
    "ignores the context": lambda f, q, k, v, s, c, p: f(q, k, v, s, jnp.zeros_like(c), p),
    "is right forward alone": lambda f, q, k, v, s, c, p: f(q, half_gradient(k), v, s, c, p),
    "gives NaN where nothing is": lambda f, q, k, v, s, c, p: jnp.where((s == 0)[..., None, None], jnp.nan, f(q, k, v, s, c, p)),
    "has another scale": lambda f, q, k, v, s, c, p: f(1.1 * q, k, v, s, c, p),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_backend_that_errs_is_replaced_with_a_warning(fault, monkeypatch, caplog):
    monkeypatch.setattr(module, "splash_attention", wrong(WRONG[fault]))
    assert settle() == "xla"
    (record,) = caplog.records
    assert "splash is wrong on cpu" in record.message and "[B, T] = [2, 48]" in record.message


def test_a_backend_that_cannot_run_here_is_replaced(caplog):
    """No cuDNN on this machine: JAX's own rule says so."""
    assert settle("cudnn") == "xla"
    assert "cudnn does not run on cpu (RuntimeError: cuDNN is not detected" in caplog.text


def test_a_device_that_does_not_compute_ends_the_run(monkeypatch):
    monkeypatch.setattr(module, "chunked_attention", lambda q, k, v, sight: q * jnp.nan)
    with pytest.raises(ConfigError, match="xla is not finite on cpu"):
        settle()


def test_xla_is_not_compared_with_itself(monkeypatch):
    monkeypatch.setattr(backends, "make_case", None)
    assert settle("xla") == settle("auto") == "xla"
    assert tiny.make_learner().model.placement.attention == "xla"
