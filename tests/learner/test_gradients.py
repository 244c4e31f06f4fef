"""The gradient of a mini-batch does not depend on how it is laid out, and equals the formula's. Meshes: test_shared_prefix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import packing, sharding, step
from deepgrpo.learner.rows import Row
from tests.learner import tiny

ROWS = tiny.make_rows(9)
TEACHERS = tiny.teacher_rows(2, coef=0.7)
TOKENS, SEGMENTS, SCORED = tiny.alone(ROWS + TEACHERS)
SEPARATE = dict(teacher_reduction="separate_stream_mean")
MODES = {  # of the objective; all but the first also see teacher rows
    "null": dict(kl_coef=0.1),
    "luffy": dict(kl_coef=0.1, teacher_loss="luffy"),
    "snis": dict(teacher_loss="snis", kl_type="k2"),
    "sft": dict(teacher_loss="sft", teacher_coef=0.5, **SEPARATE),
    "gspo": dict(ratio="sequence", aggregation="sequence_mean", sequence_clip_low=0.1, sequence_clip_high=0.1, **SEPARATE),
    "dr_grpo": dict(aggregation="dr_grpo", length_constant=20, entropy_coef=0.1, tis_cap=2.0, kl_coef=0.1),
}


@functools.cache
def old_and_reference() -> np.ndarray:
    """Made-up old and reference log-probs, near the policy's: some ratios are clipped, some are not; float[2, n, 24]."""
    now = jax.jit(lambda params: tiny.dense_logps(params, tiny.model_config(), TOKENS, SEGMENTS))(tiny.parameters())
    return np.asarray(now) + np.random.default_rng(0).normal(0, 0.3, (2, *now.shape))


@functools.cache
def compiled(mode: str):
    """A learner on one device and its jitted gradient function."""
    keys = {key: value for key, value in MODES[mode].items() if not key.startswith("sequence_clip")}
    learner = tiny.make_learner(**{f"objective__{key}": value for key, value in keys.items()})
    learner.objective = dataclasses.replace(
        learner.objective, **{key: MODES[mode][key] for key in MODES[mode].keys() - keys.keys()}
    )
    policy = step.Policy(learner.model, learner.mesh, learner.temperature, block=4)
    function = functools.partial(step.gradients, policy, learner.objective)
    return learner, jax.jit(function)


def gradient(rows: list[Row], T: int = 24, B: int = 12, mode: str = "null"):
    """(host gradients, sums) of one mini-batch of `rows` (some of ROWS and TEACHERS), through layout, packing and the compiled
    loop over micro-batches of B packed rows of T tokens."""
    learner, function = compiled(mode)
    (batch,) = packing.layout([rows], [packing.Shape(A=-(-12 // B), B=B, T=T)], 1)
    old, reference = np.zeros((2, *batch.arrays["tokens"].shape), np.float32)
    known = ROWS + TEACHERS
    for row, (a, b, start) in zip(rows, batch.slots, strict=True):
        span, n = slice(start, start + len(row.response_ids)), known.index(row)
        old[a, b, span], reference[a, b, span] = old_and_reference()[:, n, SCORED[n] > 0]
    arrays = jax.device_put(batch.arrays | {"old_logp": old, "ref_logp": reference}, sharding.micro_batches(learner.mesh))
    grads, sums, _ = function(learner.policy, arrays, np.bool_(False), np.int32(batch.used))
    return batch, jax.device_get(grads), jax.device_get(sums)


@functools.cache
def baseline():
    """One micro-batch on one device."""
    batch, grads, _ = gradient(ROWS)
    assert batch.used == 1
    return grads


def assert_close(grads, expected):
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-4), grads, expected)


def test_equals_the_formula_on_unpacked_rows():
    old, reference = old_and_reference()[:, : len(ROWS)]
    A, scored = np.array([row.advantage for row in ROWS])[:, None], SCORED[: len(ROWS)]

    def loss(params):
        logp = tiny.dense_logps(params, tiny.model_config(), TOKENS[: len(ROWS)], SEGMENTS[: len(ROWS)])
        ratio, x = jnp.exp(logp - old), reference - logp
        ppo = jnp.maximum(-A * ratio, -A * jnp.clip(ratio, 0.8, 1.28))
        ppo = jnp.where(A < 0, jnp.minimum(ppo, -A * 3.0), ppo)
        return jnp.sum((ppo + 0.1 * (jnp.exp(x) - x - 1.0)) * scored) / scored.sum()

    assert_close(baseline(), jax.jit(jax.grad(loss))(tiny.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_and_row_order_do_not_matter(mode):
    """Every loss: one micro-batch of all rows, and micro-batches of one packed row with the rows the other way round."""
    rows = ROWS if mode == "null" else ROWS + TEACHERS
    whole, expected, sums = gradient(rows, mode=mode)
    batch, grads, again = gradient(rows[::-1], B=1, mode=mode)
    assert whole.used == 1 and batch.used >= 4
    assert_close(grads, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), again, sums)
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(expected)) > 1e-4


def test_padding_does_not_matter():
    batch, grads, _ = gradient(ROWS, T=90, B=2)
    assert batch.tokens < 0.6 * batch.arrays["tokens"].size
    assert_close(grads, baseline())
