"""Tokens that an environment wrote: the network reads them, and no loss, denominator or statistic sees them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import distributed, packing, step, training_rows
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.rows import Row
from deepgrpo.types import as_ids, marked
from tests.learner import tiny
from tests.learner.test_shared_prefix import lay, make_policy


def several_turns() -> list[Row]:
    """The sibling rows; about a third of each response's tokens were observed, without a log-prob, never the whole of it."""
    rng, rows = np.random.default_rng(2), []
    for row in tiny.sibling_rows():
        scored = rng.random(len(row.response_ids)) > 0.35
        scored[rng.integers(len(scored))] = True
        logps = np.where(scored, row.rollout_logps, np.nan).astype(np.float32)
        rows.append(dataclasses.replace(row, scored=scored, rollout_logps=logps))
    return rows


def turns(row: Row) -> list[Row]:
    """Each turn as a row of its own, whose prompt is all that came before it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.scored, [0]])))
    whole = np.concatenate([row.prompt_ids, row.response_ids])
    return [
        dataclasses.replace(
            row,
            prompt_ids=as_ids(whole[: len(row.prompt_ids) + begin]),
            response_ids=row.response_ids[begin:end],
            rollout_logps=row.rollout_logps[begin:end],
            scored=None,
        )
        for begin, end in edges.reshape(-1, 2)
    ]


ROWS = several_turns()


def update(rows, C=12):
    """(gradient sums, sums of the metrics) of an update on policy with a KL penalty and an entropy bonus."""
    p = make_policy((1, 1, 1))
    learner = tiny.make_learner(objective__kl_coef=0.1, objective__entropy_coef=0.1)
    batch, arrays = lay(rows, p, 24, 6, C)
    function = jax.jit(functools.partial(step.gradients, p, learner.objective))
    gradient, sums, _ = jax.device_get(function(learner.policy, arrays, np.bool_(True), np.int32(batch.used)))
    return gradient, sums


def close(a, b, scale=None):
    scale = scale or max(float(np.abs(x).max()) for x in jax.tree.leaves(b))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * max(1.0, scale)), a, b)


@pytest.mark.parametrize("C", [0, 12], ids=["alone", "shared prefixes"])
def test_a_row_of_several_turns_equals_its_turns_as_rows(C):
    for found, expected in zip(update(ROWS, C), update([turn for row in ROWS for turn in turns(row)], C), strict=True):
        close(found, expected)


def test_gradient_is_that_of_the_formula_over_the_scored_tokens():
    tokens, segments, scored = tiny.alone(ROWS)
    for i, row in enumerate(ROWS):
        scored[i, len(row.prompt_ids) :][: len(row.response_ids)] = row.scored
    advantages = np.array([row.advantage for row in ROWS])[:, None]

    def loss(params):
        logp = tiny.dense_logps(params, tiny.model_config(), tokens, segments)
        return -jnp.sum(advantages * logp * scored) / scored.sum()

    p, learner = make_policy((1, 1, 1)), tiny.make_learner(objective__kl_coef=0.0)
    batch, arrays = lay(ROWS, p, 24, 6)
    function = jax.jit(functools.partial(step.gradients, p, learner.objective))
    gradient, _, _ = function(learner.policy, arrays, np.bool_(True), np.int32(batch.used))
    close(jax.device_get(gradient), jax.device_get(jax.jit(jax.grad(loss))(tiny.parameters())))


def test_observed_tokens_are_inputs_and_never_targets():
    (batch,) = packing.layout([ROWS], packing.shapes((24,), 144, 1, len(ROWS), True), 1)
    for row, (a, b, start) in zip(ROWS, batch.slots, strict=True):
        place = (a, b, slice(start, start + row.num_scored))
        np.testing.assert_array_equal(batch.arrays["targets"][place], row.response_ids[row.scored])
        np.testing.assert_allclose(batch.arrays["row_share"][place], 1 / row.num_scored)
        np.testing.assert_array_equal(batch.arrays["rollout_logp"][place], row.rollout_logps[row.scored])
    assert (batch.arrays["source"] != packing.NO_LOSS).sum() == sum(row.num_scored for row in ROWS)
    assert not np.isnan(batch.arrays["rollout_logp"][batch.arrays["source"] != packing.NO_LOSS]).any()
    others = [dataclasses.replace(row, response_ids=np.where(row.scored, row.response_ids, 0)) for row in ROWS]
    (gradient, sums), (other, other_sums) = update(ROWS), update(others)
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True))
    np.testing.assert_array_equal(sums["tokens"], other_sums["tokens"])


def test_host_statistics_count_scored_tokens_alone():
    rows = [dataclasses.replace(row, advantage=np.where(row.scored, row.advantage, 1e9)) for row in ROWS]
    assert [row.mean_advantage for row in rows] == pytest.approx([row.advantage for row in ROWS])
    quiet = dataclasses.replace(rows[0], advantage=np.where(ROWS[0].scored, 0.0, 1.0))
    assert rows_lib.keep_rows([quiet, *rows[1:]]) == rows[1:]
    white = np.concatenate([row.of_scored(row.advantage) for row in rows_lib.whiten_rows(rows)])
    assert white.mean() == pytest.approx(0, abs=1e-12) and white.std(ddof=1) == pytest.approx(1)
    fields, arrays = distributed.encode_rows(ROWS + tiny.make_rows(2))
    for row, sent in zip(ROWS + tiny.make_rows(2), distributed.decode_rows(fields, arrays), strict=True):
        assert (sent.scored is None) == (row.scored is None) and sent.num_scored == row.num_scored


def test_a_row_without_a_scored_token_is_not_trained():
    learner = tiny.make_learner()
    silent = [dataclasses.replace(row, scored=np.zeros(len(row.response_ids), bool)) for row in ROWS[:4]]
    assert learner.start_update(silent, 1).metrics()["training/all_chains_empty_skip"] == 1.0


def test_a_teachers_row_trains_the_tokens_that_are_its_own():
    suffix = marked(as_ids([5, 6, 7, 8]), np.array([False, True, True, False]))
    row = training_rows.suffix_row(marked(as_ids([1, 2]), np.array([False, True])), suffix, 1.0, [2], "name")
    assert row.prompt_ids.tolist() == [1, 2] and row.response_ids.tolist() == [5, 6, 7, 8, 2]
    assert row.scored.tolist() == [True, False, False, True, True] and row.num_scored == 3
