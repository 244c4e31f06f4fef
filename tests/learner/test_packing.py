"""Rows become arrays without losing, moving or mixing a token."""

import dataclasses

import numpy as np
import pytest

from deepgrpo.learner import packing
from deepgrpo.learner.objective import MAIN, NO_LOSS
from deepgrpo.learner.packing import Shape, row_length
from deepgrpo.learner.rows import Row
from deepgrpo.types import as_ids
from tests.learner import tiny

SHARED = tiny.sibling_rows()


def lay(rows: list[Row], buckets=(24,), tokens=144, shards=1, share=True, **keys) -> packing.Batch:
    return packing.layout([rows], packing.shapes(buckets, tokens, shards, len(rows), share), shards, **keys)[0]


def seen(batch: packing.Batch, a: int, b: int, column: int, shards: int) -> list[tuple[int, int]]:
    """(token, position) of all that one position of packed row [a, b] attends to, in the order of positions."""
    x = {name: array[a] for name, array in batch.arrays.items()}
    R = batch.shape.B // shards
    own = np.flatnonzero(x["segments"][b, : column + 1] == x["segments"][b, column])
    found = [(x["tokens"][b, t], x["positions"][b, t]) for t in own]
    if batch.shape.C and x["prefixes"][b, column]:
        for n in x["context"][b, x["context_segments"][b] == x["prefixes"][b, column]]:
            r, t = divmod(int(n), batch.shape.T)
            found.append((x["tokens"][b // R * R + r, t], x["positions"][b // R * R + r, t]))
    return sorted(((int(token), int(position)) for token, position in found), key=lambda pair: pair[1])


def check(batch: packing.Batch, rows: list[Row], shards: int) -> None:
    """Every scored slot holds its row's values, and its position sees exactly the row's tokens before it."""
    x = batch.arrays
    for row, (a, b, start) in zip(rows, batch.slots, strict=True):
        scored = slice(start, start + len(row.response_ids))
        np.testing.assert_array_equal(x["targets"][a, b, scored], row.response_ids)
        np.testing.assert_array_equal(x["rollout_logp"][a, b, scored], row.rollout_logps)
        assert np.all(x["source"][a, b, scored] == MAIN) and np.all(x["advantages"][a, b, scored] == np.float32(row.advantage))
        assert len(set(x["sample"][a, b, scored])) == 1 and x["sample"][a, b, start] > 0
        ids = [*row.prompt_ids, *row.response_ids]
        for j in (0, len(row.response_ids) - 1):
            before = ids[: len(row.prompt_ids) + j]
            assert seen(batch, a, b, x["index"][a, b, start + j], shards) == [(int(t), n) for n, t in enumerate(before)]
    assert np.sum(x["source"] != NO_LOSS) == sum(len(row.response_ids) for row in rows)
    assert np.sum(x["segments"] > 0) == batch.tokens == sum(map(row_length, rows)) - batch.spared


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tokens", [24, 144, 1000])
def test_every_position_sees_its_rows_past(tokens, share, shards):
    for rows in (SHARED, tiny.make_rows(13)):
        batch = lay(rows, (24, 48), tokens, shards, share)
        check(batch, rows, shards)
        assert batch.shape.B % shards == 0 and (share or batch.spared == 0)


def test_prefixes_are_shared_where_they_save_a_micro_batch():
    batch = lay(SHARED, (24,), 144)
    assert (batch.used, lay(SHARED, (24,), 144, share=False).used) == (1, 2) and batch.spared > 50


def test_a_group_that_does_not_fit_goes_on_with_a_further_copy_of_its_prefix():
    prompt = as_ids(np.arange(11))
    rows = [dataclasses.replace(row, prompt_ids=prompt) for row in tiny.make_rows(8, seed=1, length=8)]
    batch = lay(rows, (22,), 44)  # 2 rows of 22 a micro-batch: prefix 10 and one response beside it, two responses in the other
    check(batch, rows, 1)
    copies = np.sum((batch.arrays["positions"] == 0) & (batch.arrays["segments"] > 0))
    assert batch.used == 3 == copies and batch.spared == (8 - 3) * 10


def test_a_prompt_longer_than_the_context_is_shared_as_far_as_it_reaches():
    prompt = as_ids(np.arange(20) % 30)
    rows = [dataclasses.replace(row, prompt_ids=prompt) for row in tiny.make_rows(6, seed=1, length=4)]
    batch = lay(rows, (24,), 96)
    check(batch, rows, 1)
    assert batch.shape.C == 12 and batch.spared == (6 - batch.used) * 12


def test_siblings_may_be_kept_apart():
    prompts = [as_ids(np.arange(6) + g) for g in range(3)]
    rows = [dataclasses.replace(row, prompt_ids=prompts[i % 3]) for i, row in enumerate(tiny.make_rows(9, seed=1, length=8))]
    batch = lay(rows, (24,), 72, siblings_apart=True)
    check(batch, rows, 1)
    prefixes, segments = batch.arrays["prefixes"], batch.arrays["segments"]
    assert batch.used == 2 and batch.spared > 0 and np.all((prefixes == 0) | (prefixes == segments))


def test_an_end_token_that_is_also_the_padding_id_is_trained():
    (row,) = tiny.make_rows(1)
    row = dataclasses.replace(row, response_ids=as_ids([5, 0]), rollout_logps=np.zeros(2, np.float32))  # arrays are padded with 0
    batch = lay([row])
    assert batch.arrays["targets"][0, 0, :2].tolist() == [5, 0]
    assert batch.arrays["source"][0, 0, :3].tolist() == [MAIN, MAIN, NO_LOSS]


def test_shapes_are_known_from_the_config():
    assert packing.shapes((64, 32), 1024, 1, 96, True) == [Shape(3, 32, 32, 16), Shape(6, 16, 64, 32)]
    assert packing.shapes((64,), 64, 8, 96, False) == [Shape(12, 8, 64, 0)]
    shapes = packing.shapes((24, 48), 144, 2, 40, True)
    for n in (1, 7, 40):
        batch = packing.layout([tiny.make_rows(n)], shapes, 2)[0]
        sizes = {name: (array.shape, array.dtype.type) for name, array in batch.arrays.items()}
        assert batch.shape in shapes and batch.shape == Shape.of(batch.arrays) and sizes == packing.array_shapes(batch.shape)
    many = packing.layout([tiny.make_rows(300)], shapes, 2)[0].shape  # more rows than announced: more micro-batches
    assert many.A in (2 * shapes[0].A, 4 * shapes[0].A, 8 * shapes[0].A) and dataclasses.replace(many, A=shapes[0].A) in shapes
    with pytest.raises(ValueError, match=r"row of 46 tokens does not fit learner.buckets \(24, 32\)"):
        lay(tiny.make_rows(1, length=40), (24, 32))


def test_layout_does_not_depend_on_chance_and_pads_little():
    rng = np.random.default_rng(0)
    rows = []
    for g in range(32):  # lengths as of MATH: prompts of about 120 tokens, responses of about 500
        prompt = as_ids(rng.integers(0, 99, int(np.clip(rng.lognormal(4.8, 0.4), 40, 500))))
        for _ in range(8):
            response = as_ids(rng.integers(0, 99, int(np.clip(rng.lognormal(6.2, 0.6), 50, 3500))))
            rows.append(Row(prompt, response, 1.0, MAIN, 0.0, None, f"g{g}", g, False, 1.0))
    batches = [lay(rows, (512, 1024, 2048, 4096), 16384) for _ in range(2)]
    assert all(np.array_equal(array, batches[1].arrays[name], equal_nan=True) for name, array in batches[0].arrays.items())
    batch = batches[0]
    assert batch.tokens > 0.95 * (batch.used - 1) * batch.shape.B * batch.shape.T  # all micro-batches but the last are full
    assert batch.spared > 0.8 * 7 / 8 * sum(len(row.prompt_ids) for row in rows)
