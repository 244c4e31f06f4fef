"""Log-probs of scored tokens, in blocks."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner.logprob import blocked_logps, target_logps
from deepgrpo.learner.packing import Shape
from tests.conftest import golden_cases
from tests.learner import tiny


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"response_logprob"}))
def test_golden(case):
    inputs, expected = case["inputs"], case["expected"]
    P, R = inputs["prompt_len"], inputs["response_len"]
    with jax.enable_x64(True):
        logits = jnp.asarray(inputs["logits"], jnp.float64)[:, P - 1 : P + R - 1]
        targets = jnp.asarray(inputs["input_ids"])[:, P : P + R]
        logp, entropy = target_logps(logits, targets, inputs["temperature"], logits.shape[-1], True)
    np.testing.assert_allclose(logp, expected["log_prob"], **case["tolerance"])
    np.testing.assert_allclose(entropy, expected["entropy"], **case["tolerance"])


def test_blocks_equal_dense_in_value_and_gradient():
    """B 3, R 10 in blocks of 4 (padded to 12; the third block is skipped), 7 real ids of 9, temperature 0.7."""
    rng = np.random.default_rng(0)
    hidden, weight = jnp.asarray(rng.normal(size=(3, 10, 5)), jnp.float32), jnp.asarray(rng.normal(size=(5, 9)), jnp.float32)
    targets, scored = jnp.asarray(rng.integers(0, 7, (3, 10))), jnp.arange(10)[None] < jnp.asarray([[8], [3], [5]])

    def blocked(hidden, weight):
        logps_of = lambda h, t: target_logps(h @ weight, t, 0.7, 7, True)  # noqa: E731
        parts = blocked_logps(logps_of, hidden, targets, scored, 4)
        return [jnp.where(scored, x, 0.0) for x in parts]

    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64) / 0.7
    p = np.exp(logits[..., :7])
    p /= p.sum(-1, keepdims=True)
    logp, entropy = jax.jit(blocked)(hidden, weight)
    expected = np.log(np.take_along_axis(p, np.asarray(targets)[..., None], -1))[..., 0]
    np.testing.assert_allclose(logp, np.where(scored, expected, 0.0), atol=1e-5)
    np.testing.assert_allclose(entropy, np.where(scored, -(p * np.log(p)).sum(-1), 0.0), atol=1e-5)
    grads = jax.jit(jax.grad(lambda h, w: blocked(h, w)[0].sum() + 0.0 * blocked(h, w)[1].sum(), argnums=(0, 1)))(hidden, weight)
    d_logits = (np.eye(9)[np.asarray(targets)] - np.pad(p, [(0, 0), (0, 0), (0, 2)])) * np.asarray(scored)[..., None] / 0.7
    np.testing.assert_allclose(grads[0], d_logits @ np.asarray(weight).T, atol=1e-5)
    np.testing.assert_allclose(grads[1], np.einsum("brd,brv->dv", hidden, d_logits), atol=1e-5)


def test_no_array_of_tokens_times_vocabulary_in_the_compiled_step():
    V, block = 151_936, 64
    config = tiny.model_config(vocab_size=V, num_layers=1, tie_embeddings=True)
    learner = tiny.make_learner(config=config, learner__logprob_block=block, learner__buckets=(256,))
    temporaries = {}
    for B in (2, 8):
        compiled = learner.programs.lower("train_step", Shape(A=2, B=B, T=256, C=128)).compile()
        shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
        assert max(math.prod(shape) for shape in shapes if V in shape) <= block * V
        temporaries[B] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries[8] - temporaries[2] < 0.05 * (8 - 2) * 256 * V * 4


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
