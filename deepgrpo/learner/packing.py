"""From training rows of any length to a few static shapes: packed rows with segment ids, grouped into micro-batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepgrpo.learner.objective import NO_LOSS
from deepgrpo.learner.rows import Row

# Arrays [A, B, T] of a batch. `SLOTS` fills those of scored tokens: what an array holds for a row, or for each of its tokens.
INT_ARRAYS = ("tokens", "positions", "segments", "index", "targets", "source", "sample")
FLOAT_ARRAYS = ("advantages", "teacher_coef", "rollout_logp", "row_share")
EMPTY = {"source": NO_LOSS, "rollout_logp": np.nan}  # of slots without a scored token; 0 elsewhere
SLOTS: dict[str, Callable[[Row], Any]] = {
    "targets": lambda row: row.response_ids,
    "source": lambda row: row.source,
    "advantages": lambda row: row.advantage,
    "teacher_coef": lambda row: row.teacher_coef,
    "row_share": lambda row: 1.0 / len(row.response_ids),
    "rollout_logp": lambda row: np.nan if row.rollout_logps is None else row.rollout_logps,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of a batch: A micro-batches of B packed rows of T tokens."""

    A: int
    B: int
    T: int


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one mini-batch as arrays.

    arrays, each [A, B, T]:
      tokens, positions, segments: int32, the network's input; segments count from 1 in each packed row, 0 is padding.
      index: int32, for each scored token the column of the position that predicts it; scored tokens come first.
      targets: int32, the scored token. source: int32, its stream or NO_LOSS. sample: int32, number of its row among those of its
        packed row, from 1; 0 where there is none.
      advantages, teacher_coef: float32. row_share: float32, 1 / (scored tokens of its row).
      rollout_logp: float32, NaN where the engine's is not known.
    used: number of micro-batches that hold anything; they come first, and the rest is never computed.
    slots: for each row of the mini-batch (a, b, start): its scored tokens are [a, b, start : start + R].
    tokens: tokens of the network's input without padding.
    """

    arrays: dict[str, np.ndarray]
    used: int
    slots: tuple[tuple[int, int, int], ...]
    tokens: int


def row_length(row: Row) -> int:
    """Tokens that a row needs in the network: the last response token is only predicted, never an input."""
    return len(row.prompt_ids) + len(row.response_ids) - 1


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing: indices of `lengths` in bins of at most `capacity`. Deterministic; equal lengths keep their order."""
    bins: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = np.flatnonzero(room[: len(bins)] >= lengths[i])
        if fits.size:
            chosen = int(fits[0])
        else:
            chosen = len(bins)
            bins.append([])
            room[chosen] = capacity
        bins[chosen].append(i)
        room[chosen] -= lengths[i]
    return bins


def bucket(longest: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `longest` tokens.

    Raises:
      ValueError: none does.
    """
    fitting = [size for size in buckets if size >= longest]
    if not fitting:
        raise ValueError(
            f"a row of {longest} tokens does not fit learner.buckets {tuple(buckets)}: the largest must be at least"
            f" rollout.max_model_len"
        )
    return min(fitting)


def choose_shape(packed_rows: Sequence[int], T: int, micro_batch_tokens: int, shards: int) -> Shape:
    """One shape for all mini-batches of a step, so that the step compiles once; a function of its arguments alone, so that a
    resumed run computes in the same shapes.

    B is the limit that micro_batch_tokens sets, or the smaller of its halves that is enough; with several micro-batches the
    limit or its half, whichever pads less. A is a power of two: unused micro-batches cost nothing.

    Args:
      packed_rows: number of packed rows of each mini-batch.
      micro_batch_tokens: upper bound of B * T, but B is at least `shards` and always a multiple of it.
    """
    most = -(-max(packed_rows) // shards)  # packed rows a shard
    B = max(1, micro_batch_tokens // T // shards)
    while B > 1 and -(-B // 2) >= most:
        B = -(-B // 2)
    half = -(-B // 2)
    if most > B and -(-most // half) * half < -(-most // B) * B:
        B = half
    return Shape(A=1 << (-(-most // B) - 1).bit_length(), B=B * shards, T=T)


def build(rows: Sequence[Row], bins: Sequence[Sequence[int]], shape: Shape) -> Batch:
    """Lays out `rows` as `bins` say (indices into rows, one bin a packed row)."""
    A, B, T = shape.A, shape.B, shape.T
    arrays = {name: np.full((A, B, T), EMPTY.get(name, 0), np.int32) for name in INT_ARRAYS}
    arrays |= {name: np.full((A, B, T), EMPTY.get(name, 0), np.float32) for name in FLOAT_ARRAYS}
    slots: list[tuple[int, int, int]] = [(0, 0, 0)] * len(rows)
    total = 0
    for n, members in enumerate(bins):
        a, b = divmod(n, B)
        start = scored = 0
        for segment, i in enumerate(members, 1):
            row, length = rows[i], row_length(rows[i])
            inputs, outputs = slice(start, start + length), slice(scored, scored + len(row.response_ids))
            arrays["tokens"][a, b, inputs] = np.concatenate([row.prompt_ids, row.response_ids[:-1]])
            arrays["positions"][a, b, inputs] = np.arange(length)
            arrays["segments"][a, b, inputs] = segment
            arrays["index"][a, b, outputs] = np.arange(start + len(row.prompt_ids) - 1, start + length)
            arrays["sample"][a, b, outputs] = segment
            for name, values in SLOTS.items():
                arrays[name][a, b, outputs] = values(row)
            slots[i] = (a, b, scored)
            start, scored = start + length, scored + len(row.response_ids)
        total += start
    return Batch(arrays, -(-len(bins) // B), tuple(slots), total)


def layout(mini_batches: Sequence[Sequence[Row]], buckets: Sequence[int], micro_batch_tokens: int, shards: int) -> list[Batch]:
    """Packs the mini-batches of a step, all in one shape. Every row must have a prompt and a response token."""
    T = bucket(max(row_length(row) for rows in mini_batches for row in rows), buckets)
    packed = [pack([row_length(row) for row in rows], T) for rows in mini_batches]
    shape = choose_shape([len(bins) for bins in packed], T, micro_batch_tokens, shards)
    return [build(rows, bins, shape) for rows, bins in zip(mini_batches, packed, strict=True)]
