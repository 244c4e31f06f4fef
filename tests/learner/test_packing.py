"""Rows become arrays without losing, moving or mixing a token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import packing
from deepgrpo.learner.objective import MAIN, NO_LOSS
from deepgrpo.model.transformer import Transformer
from deepgrpo.types import as_ids
from tests.learner import tiny


def test_pack_is_first_fit_decreasing():
    assert packing.pack([3, 8, 5, 2, 5], 10) == [[1, 3], [2, 4], [0]]
    assert packing.pack([10, 1], 10) == [[0], [1]]
    assert packing.pack([], 10) == []


def test_every_row_can_be_read_back():
    rows = tiny.make_rows(13)
    (batch,) = packing.layout([rows], (24, 48), 72, shards=2)
    arrays = batch.arrays
    assert arrays["tokens"].shape[1] % 2 == 0 and batch.tokens == sum(map(packing.row_length, rows))
    for row, (a, b, start) in zip(rows, batch.slots, strict=True):
        scored = slice(start, start + len(row.response_ids))
        index = arrays["index"][a, b, scored]
        np.testing.assert_array_equal(arrays["targets"][a, b, scored], row.response_ids)
        np.testing.assert_array_equal(arrays["rollout_logp"][a, b, scored], row.rollout_logps)
        assert np.all(arrays["source"][a, b, scored] == MAIN) and np.all(
            arrays["advantages"][a, b, scored] == np.float32(row.advantage)
        )
        first = index[0] - len(row.prompt_ids) + 1
        span = slice(first, index[-1] + 1)
        np.testing.assert_array_equal(arrays["tokens"][a, b, span], np.concatenate([row.prompt_ids, row.response_ids[:-1]]))
        np.testing.assert_array_equal(arrays["positions"][a, b, span], np.arange(packing.row_length(row)))
        assert len(set(arrays["segments"][a, b, span])) == 1 and arrays["segments"][a, b, first] > 0
    assert np.sum(arrays["source"] != NO_LOSS) == sum(len(row.response_ids) for row in rows)
    assert np.sum(arrays["segments"] > 0) == batch.tokens


def test_an_end_token_that_is_also_the_padding_id_is_trained():
    (row,) = tiny.make_rows(1)
    row = dataclasses.replace(row, response_ids=as_ids([5, 0]), rollout_logps=np.zeros(2, np.float32))  # arrays are padded with 0
    (batch,) = packing.layout([[row]], (24,), 24, 1)
    assert batch.arrays["targets"][0, 0, :2].tolist() == [5, 0]
    assert batch.arrays["source"][0, 0, :3].tolist() == [MAIN, MAIN, NO_LOSS]


def test_shapes_are_few_and_a_function_of_the_rows():
    assert packing.choose_shape([3], 64, 1024, 1) == packing.Shape(1, 4, 64)
    assert packing.choose_shape([16], 64, 1024, 1) == packing.Shape(1, 16, 64)
    assert packing.choose_shape([40, 7], 64, 1024, 1) == packing.Shape(8, 8, 64)
    assert packing.choose_shape([5], 64, 64, 8) == packing.Shape(1, 8, 64)
    shapes = {packing.choose_shape([n], 64, 1024, 1) for n in range(1, 129)}
    assert len({(shape.B, shape.T) for shape in shapes}) == 5 and len(shapes) <= 12
    with pytest.raises(ValueError, match=r"row of 65 tokens does not fit learner.buckets \(32, 64\)"):
        packing.bucket(65, (32, 64))


def test_a_token_never_moves_the_hidden_state_of_another_segment():
    rows = [row for row in tiny.make_rows(8) if len(row.prompt_ids) > 1]
    (batch,) = packing.layout([rows], (48,), 48 * 8, 1)
    arrays = {name: batch.arrays[name][0].copy() for name in ("tokens", "positions", "segments")}
    assert arrays["segments"].max() > 1
    model, params = Transformer(tiny.model_config(), jnp.float32), tiny.parameters()
    run = jax.jit(lambda tokens: model.apply({"params": params}, tokens, arrays["positions"], arrays["segments"])[0])
    before = np.asarray(run(arrays["tokens"]))
    changed = (arrays["segments"] == 1) & (arrays["positions"] == 0)
    after = np.asarray(run(np.where(changed, arrays["tokens"] + 1, arrays["tokens"])))
    others = arrays["segments"] != 1
    np.testing.assert_array_equal(before[others], after[others])
    assert not np.array_equal(before, after)
