"""A prompt that rows share, computed once, gives what a prompt a row gives: values, gradients, independence, on every mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import packing, sharding, step
from deepgrpo.learner.rows import Row
from deepgrpo.model.transformer import Placement, Transformer
from deepgrpo.types import as_ids
from tests.learner import tiny

ROWS = tiny.sibling_rows()


@functools.cache
def dense():
    """Log-probs of all rows, float32[n, 24], each row by itself; and the gradient of a step on policy, from its formula."""
    tokens, segments, scored = tiny.alone(ROWS)
    advantages = np.array([row.advantage for row in ROWS])[:, None]

    def loss(params):
        logp = tiny.dense_logps(params, tiny.model_config(), tokens, segments)
        return -jnp.sum(advantages * logp * scored) / scored.sum(), logp

    (_, logp), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(tiny.parameters())
    return [x[s > 0] for x, s in zip(np.asarray(logp), scored, strict=True)], jax.device_get(gradient)


def make_policy(mesh, backend: str = "xla") -> step.Policy:
    mesh = sharding.make_mesh(mesh, jax.devices()[: int(np.prod(mesh))])
    model = Transformer(tiny.model_config(), jnp.float32, remat="full", placement=Placement(backend, sharding.rows(mesh)))
    return step.Policy(model, mesh, 1.0, block=4)


def lay(rows: list[Row], p: step.Policy, T: int, B: int, C: int = 12):
    """The batch, and its arrays on p's mesh."""
    apart = p.model.placement.attention == "splash"
    shards = sharding.batch_shards(p.mesh)
    (batch,) = packing.layout([rows], [packing.Shape(-(-20 // B), B, T, C)], shards, siblings_apart=apart)
    zeros = np.zeros(batch.arrays["tokens"].shape, np.float32)
    return batch, jax.device_put(batch.arrays | {"old_logp": zeros, "ref_logp": zeros}, sharding.micro_batches(p.mesh))


def of_rows(batch, rows, values) -> list[np.ndarray]:
    values = np.asarray(values)
    return [values[a, b, n : n + len(row.response_ids)] for row, (a, b, n) in zip(rows, batch.slots, strict=True)]


@pytest.mark.parametrize(
    "mesh,T,B,backend,spared",
    [
        ((1, 1, 1), 24, 6, "xla", 63),  # one micro-batch
        ((1, 1, 1), 24, 2, "xla", 53),  # groups go on in further micro-batches
        ((1, 1, 1), 48, 1, "xla", 50),  # a packed row sees its own prefixes
        ((1, 1, 1), 24, 5, "splash", 0),  # siblings apart
        ((1, 4, 2), 24, 8, "xla", 53),
        ((2, 4, 1), 24, 8, "xla", 48),  # a cell is one packed row
    ],
)
def test_equals_every_row_by_itself(mesh, T, B, backend, spared):
    p, learner = make_policy(mesh, backend), tiny.make_learner(mesh, objective__kl_coef=0.0)
    rows = ROWS if backend == "xla" else ROWS[:10:3] + ROWS[8:10]
    batch, arrays = lay(rows, p, T, B)
    function = jax.jit(functools.partial(step.gradients, p, learner.objective))
    gradient, _, logp = function(learner.policy, arrays, np.bool_(True), np.int32(batch.used))
    assert batch.spared >= spared
    expected, expected_gradient = dense()
    for row, values in zip(rows, of_rows(batch, rows, logp), strict=True):
        np.testing.assert_allclose(values, expected[ROWS.index(row)], rtol=0, atol=2e-6)
    if rows is ROWS:
        scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected_gradient))
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=3e-6 * scale)
        jax.tree.map(close, jax.device_get(gradient), expected_gradient)


@functools.cache
def scorer():
    p = make_policy((1, 1, 1))
    score = jax.jit(functools.partial(step.score, p))

    def run(rows: list[Row]) -> list[np.ndarray]:
        batch, arrays = lay(rows, p, 24, 6)
        assert batch.used == 1 and batch.spared > 50
        del arrays["old_logp"], arrays["ref_logp"]
        return of_rows(batch, rows, score(tiny.parameters(), arrays, np.int32(batch.used)))

    return run, run(ROWS)


def changed_rows(rows: list[Row]) -> set[int]:
    """Numbers of the rows whose log-probs are not those of ROWS, to the bit."""
    run, before = scorer()
    return {n for n, (a, b) in enumerate(zip(run(rows), before, strict=True)) if not np.array_equal(a, b)}


@pytest.mark.parametrize("n", [0, 3, 8, 12])
def test_a_response_moves_no_other_row_by_a_bit(n):
    assert changed_rows(ROWS) == set()
    first = as_ids([(ROWS[n].response_ids[0] + 1) % tiny.REAL_IDS, *ROWS[n].response_ids[1:]])
    assert changed_rows([dataclasses.replace(row, response_ids=first) if i == n else row for i, row in enumerate(ROWS)]) == {n}


@pytest.mark.parametrize("group", ["siblings0", "siblings1", "siblings3", "siblings5"])
def test_a_prompt_moves_its_own_group_alone(group):
    def other(row):
        return dataclasses.replace(row, prompt_ids=as_ids([(row.prompt_ids[0] + 1) % tiny.REAL_IDS, *row.prompt_ids[1:]]))

    rows = [other(row) if row.group_id == group else row for row in ROWS]
    assert changed_rows(rows) == {n for n, row in enumerate(ROWS) if row.group_id == group}


def test_the_order_of_rows_does_not_matter():
    run, before = scorer()
    order = np.random.default_rng(0).permutation(len(ROWS))
    for n, values in zip(order, run([ROWS[n] for n in order]), strict=True):
        np.testing.assert_allclose(values, before[n], rtol=0, atol=2e-6)


@pytest.mark.parametrize("mesh", [(2, 4, 1), (1, 4, 2)])
def test_devices_exchange_parameters_and_never_activations(mesh):
    """A context is gathered where its keys are, the head once and not once a block, and nothing is copied to be sharded anew."""
    B, T, config = 16, 40, tiny.model_config(width=32, mlp_width=72)
    learner = tiny.make_learner(mesh, config=config, objective__kl_coef=0.0)
    text = learner.programs.lower("train_step", packing.Shape(2, B, T, 20)).compile().as_text()
    gathered = [tuple(map(int, dims.split(","))) for dims in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)]
    assert len(gathered) >= 7 and all(
        len(dims) == 2 for dims in gathered
    )  # a layer's kernels, embedding, head; none is [B, T, ...]
    vocabulary = config.vocab_size // mesh[2]
    assert sum(vocabulary in dims for dims in gathered) == 2
