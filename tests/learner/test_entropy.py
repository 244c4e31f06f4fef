"""The entropy's gradient: exact where the objective asks for it, none elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner.logprob import blocked_logps, target_logps


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_the_entropy(temperature):
    """d H / d z_v = -p_v (log p_v + H) / temperature, by blocks, with phantom ids, in float64."""
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)))
        targets, scored = jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), bool)

        def entropy(z, gradient):
            def logps_of(logits, targets):
                return target_logps(logits, targets, temperature, 6, True, gradient)

            return blocked_logps(logps_of, z.astype(jnp.float32), targets, scored, 2)[1].sum()

        z = np.asarray(logits[..., :6]) / temperature
        logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
        H = -(np.exp(logp) * logp).sum(-1, keepdims=True)
        slope = -np.exp(logp) * (logp + H) / temperature
        gradient = np.asarray(jax.grad(entropy)(logits, True))
        np.testing.assert_allclose(entropy(logits, True), H.sum(), rtol=1e-5)
        np.testing.assert_allclose(gradient[..., :6], slope, atol=1e-6)
        assert not gradient[..., 6:].any() and not np.asarray(jax.grad(entropy)(logits, False)).any()
