"""From training rows of any length to a few static shapes: packed rows with segment ids, grouped into micro-batches.

The responses of a prompt share one copy of it: pieces of rows are packed, and a packed row's *context* names the tokens of
other packed rows, in its own micro-batch and batch shard, whose keys and values it looks at besides its own.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepgrpo.learner.objective import NO_LOSS
from deepgrpo.learner.rows import Row


class Segment(NamedTuple):
    """Tokens [start, stop) of a row's input (prompt and response without its last token).

    sees: number of the group whose prefix comes before `start`, -1: none. holds: number of the group whose prefix this is, -1: it
    is a row's own, and predicts its response.
    """

    row: int
    start: int
    stop: int
    sees: int = -1
    holds: int = -1


@dataclasses.dataclass(frozen=True)
class PromptGroup:
    """Pieces that see one prefix. number: of the group; prefix: the shared piece, None for a row by itself."""

    number: int
    prefix: Segment | None
    pieces: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        return sum(length(piece) for piece in self.pieces) + (0 if self.prefix is None else length(self.prefix))


def length(piece: Segment) -> int:
    return piece.stop - piece.start


def row_length(row: Row) -> int:
    """Tokens that a row needs in the network: the last response token is only predicted, never an input."""
    return len(row.prompt_ids) + len(row.response_ids) - 1


def whole(i: int, row: Row) -> Segment:
    return Segment(i, 0, row_length(row))


def groups(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of the rows with equal prompts, in order of first appearance."""
    members: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.prompt_ids.tobytes(), []).append(i)
    return list(members.values())


def prompt_groups(rows: Sequence[Row], siblings: Sequence[Sequence[int]], context: int) -> list[PromptGroup]:
    """The pieces of every group.

    The last prompt token is never shared: it predicts the first response token, and each row predicts its own. A prompt of more
    than `context` + 1 tokens is shared up to there.

    Args:
      siblings: from `groups`. context: tokens of prefixes that a packed row can see; 0: nothing is shared.
    """
    out = []
    for number, members in enumerate(siblings):
        shared = min(len(rows[members[0]].prompt_ids) - 1, context)
        if len(members) < 2 or shared < 1:
            out += [PromptGroup(number, None, (whole(i, rows[i]),)) for i in members]
        else:
            pieces = tuple(Segment(i, shared, row_length(rows[i]), sees=number) for i in members)
            out.append(PromptGroup(number, Segment(members[0], 0, shared, holds=number), pieces))
    return out


def longest(parts: Sequence[PromptGroup]) -> int:
    return max(length(piece) for part in parts for piece in (*part.pieces, part.prefix) if piece is not None)


class Bin:
    """R packed rows of T tokens, filled piece by piece; each sees at most C tokens of prefixes.

    siblings_apart: no packed row sees one prefix twice. spread: a prefix goes to the emptiest row, not to the first with room.
    """

    def __init__(self, R: int, T: int, C: int, siblings_apart: bool = False, spread: bool = False):
        self.rows: list[list[Segment]] = [[] for _ in range(R)]
        self.room, self.context = [T] * R, [C] * R
        self.seen: list[set[int]] = [set() for _ in range(R)]
        self.held: set[int] = set()
        self.siblings_apart, self.spread = siblings_apart, spread

    def _first(self, size: int) -> int | None:
        return next((r for r, room in enumerate(self.room) if room >= size), None)

    def _first_seeing(self, size: int, group: int, prefix: int) -> int | None:
        for r, room in enumerate(self.room):
            if room >= size:
                if group not in self.seen[r]:
                    if self.context[r] >= prefix:
                        return r
                elif not self.siblings_apart:
                    return r
        return None

    def _put(self, r: int, piece: Segment) -> None:
        self.rows[r].append(piece)
        self.room[r] -= length(piece)

    def add(self, piece: Segment, prefix: Segment | None) -> bool:
        """Places a piece in the first row with room, and its prefix if that is not here yet; False: they do not fit."""
        if prefix is None:
            r = self._first(length(piece))
            if r is not None:
                self._put(r, piece)
            return r is not None
        group, shared = piece.sees, length(prefix)
        home = None
        if group not in self.held:
            home = max(range(len(self.room)), key=self.room.__getitem__) if self.spread else self._first(shared)
            if home is None or self.room[home] < shared:
                return False
            self.room[home] -= shared
        r = self._first_seeing(length(piece), group, shared)
        if home is not None:
            self.room[home] += shared
        if r is None:
            return False
        if home is not None:
            self._put(home, prefix)
            self.held.add(group)
        self._put(r, piece)
        if group not in self.seen[r]:
            self.seen[r].add(group)
            self.context[r] -= shared
        return True


def place(
    parts: Sequence[PromptGroup], R: int, T: int, C: int, lookahead: float, siblings_apart: bool, spread: bool
) -> list[Bin]:
    """Fills cells with prompt groups. Deterministic.

    Large groups first; each cell takes, first-fit-decreasing, from as many groups as would fill 1 + lookahead of it, and what is
    left of them goes to the next. Rows by themselves come last, into the first hole anywhere. Every piece must fit T.

    Args:
      siblings_apart, spread: see `Bin`.
    """
    waiting = [(part, sorted(part.pieces, key=lambda piece: -length(piece))) for part in parts if part.prefix is not None]
    waiting.sort(key=lambda entry: -entry[0].tokens)
    cells = []
    while waiting:
        cell, pool, tokens = Bin(R, T, C, siblings_apart, spread), [], 0
        while waiting and tokens < R * T * (1.0 + lookahead):
            pool.append(waiting.pop(0))
            tokens += sum(map(length, pool[-1][1])) + length(pool[-1][0].prefix)
        order = sorted((-length(piece), n, i) for n, (_, pieces) in enumerate(pool) for i, piece in enumerate(pieces))
        placed = {(n, i) for _, n, i in order if cell.add(pool[n][1][i], pool[n][0].prefix)}
        rest = [(part, [p for i, p in enumerate(pieces) if (n, i) not in placed]) for n, (part, pieces) in enumerate(pool)]
        waiting = [entry for entry in rest if entry[1]] + waiting
        cells.append(cell)
    add_whole([part.pieces[0] for part in parts if part.prefix is None], cells, R, T, C)
    return cells


def add_whole(pieces: Sequence[Segment], cells: list[Bin], R: int, T: int, C: int) -> None:
    """First-fit-decreasing of pieces that see no prefix, over the rows of all cells and then of new ones."""
    room = np.zeros((len(cells) + len(pieces)) * R, np.int64)
    if cells:
        room[: len(cells) * R] = np.concatenate([cell.room for cell in cells])
    for piece in sorted(pieces, key=lambda piece: -length(piece)):
        fits = np.flatnonzero(room[: len(cells) * R] >= length(piece))
        if fits.size:
            n = int(fits[0])
        else:
            n = len(cells) * R
            cells.append(Bin(R, T, C))
            room[n : n + R] = T
        cells[n // R]._put(n % R, piece)
        room[n] -= length(piece)


######################################################################################################################
#  Batches of arrays
######################################################################################################################

# Arrays [A, B, T] of a batch. `SLOTS` fills those of scored tokens: what an array holds for a row, or for each of its tokens.
INT_ARRAYS = ("tokens", "positions", "segments", "index", "targets", "source", "sample")
FLOAT_ARRAYS = ("advantages", "teacher_coef", "rollout_logp", "row_share")
EMPTY = {"source": NO_LOSS, "rollout_logp": np.nan}  # of slots without a scored token; 0 elsewhere
SLOTS: dict[str, Callable[[Row], Any]] = {
    "targets": lambda row: row.of_scored(row.response_ids),
    "source": lambda row: row.source,
    "advantages": lambda row: row.of_scored(row.advantage),
    "teacher_coef": lambda row: row.teacher_coef,
    "row_share": lambda row: 1.0 / row.num_scored,
    "rollout_logp": lambda row: np.nan if row.rollout_logps is None else row.of_scored(row.rollout_logps),
}
# A token's layers cost about as much as its attention to this many keys (8 to 10 times the width in usual decoders): only decides
# between buckets.
KEYS_PER_TOKEN = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of a batch: A micro-batches of B packed rows of T tokens, each of which sees C tokens of other rows."""

    A: int
    B: int
    T: int
    C: int = 0

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> "Shape":
        """The shape of a batch's arrays, on the host or on devices."""
        return cls(*arrays["tokens"].shape, C=arrays["context"].shape[-1] if "context" in arrays else 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one mini-batch as arrays.

    arrays, each [A, B, T] but for the last two:
      tokens, positions, segments: int32, the network's input; segments count from 1 in each packed row, 0 is padding.
      index: int32, for each scored token the column of the position that predicts it; scored tokens come first.
      targets: int32, the scored token. source: int32, its stream or NO_LOSS. sample: int32, number of its row among those of its
        packed row, from 1; 0 where there is none.
      advantages, teacher_coef: float32. row_share: float32, 1 / (scored tokens of its row).
      rollout_logp: float32, NaN where the engine's is not known.
      With C > 0 also, see `model.attention.Context`:
      prefixes: int32, number of the prefix that the token sees, 0: none.
      context: int32[A, B, C], tokens of the same cell (R packed rows, R = B / shards) as r * T + t.
      context_segments: int32[A, B, C], number of the prefix that the token belongs to, 0: nothing.
    shape: of the arrays. used: number of micro-batches that hold anything; they come first, and the rest is never computed.
    slots: for each row of the mini-batch (a, b, start): its scored tokens are [a, b, start : start + row.num_scored].
    tokens: tokens of the network's input without padding. spared: those that would be more if no prefix were shared.
    """

    arrays: dict[str, np.ndarray]
    shape: Shape
    used: int
    slots: tuple[tuple[int, int, int], ...]
    tokens: int
    spared: int


def shapes(buckets: Sequence[int], micro_batch_tokens: int, shards: int, rows: int, share_prefix: bool) -> list[Shape]:
    """The shapes of a run's batches, one for each bucket: all that can ever have to be compiled.

    Args:
      micro_batch_tokens: upper bound of B * T, but B is at least `shards` and always a multiple of it. A mini-batch of `rows`
        packed rows is cut into three micro-batches at least: less of a small one is padding.
      rows: the most rows of a mini-batch.
      share_prefix: whether a packed row can see C = T / 2 tokens of prefixes (even, as cuDNN wants it).
    """
    out = []
    for T in sorted(set(buckets)):
        B = shards * max(1, min(micro_batch_tokens // T // shards, -(-rows // (3 * shards))))
        out.append(Shape(A=-(-rows // B), B=B, T=T, C=2 * -(-T // 4) if share_prefix else 0))
    return out


def array_shapes(shape: Shape) -> dict[str, tuple[tuple[int, ...], type]]:
    """(shape, dtype) of each of a batch's arrays."""
    tokens, context = (shape.A, shape.B, shape.T), (shape.A, shape.B, shape.C)
    arrays = dict.fromkeys(INT_ARRAYS, (tokens, np.int32)) | dict.fromkeys(FLOAT_ARRAYS, (tokens, np.float32))
    if shape.C:
        arrays |= {"prefixes": (tokens, np.int32), "context": (context, np.int32), "context_segments": (context, np.int32)}
    return arrays


def layout(mini_batches: Sequence[Sequence[Row]], shapes: Sequence[Shape], shards: int, siblings_apart: bool = False):
    """Packs each mini-batch of a step in the shape that costs it least: list[Batch]. A function of its arguments alone, so that a
    resumed run computes in the same shapes. Every row must have a prompt and a scored token.

    Args:
      shapes: from `shapes`. siblings_apart: two responses to one prompt never share a packed row, see `attention.splash`.

    Raises:
      ValueError: no shape holds the longest row.
    """
    return [build(rows, *choose(rows, shapes, shards, siblings_apart), shards) for rows in mini_batches]


def choose(rows: Sequence[Row], shapes: Sequence[Shape], shards: int, siblings_apart: bool) -> tuple[list[Bin], Shape]:
    """The cheapest shape for a mini-batch and its cells, among those that hold its longest piece; of equals the first.

    A mini-batch of more rows than its shape was made for gets a shape of more micro-batches, which is compiled then.
    """
    siblings, lengths = groups(rows), [row_length(row) for row in rows]
    best = None
    for shape in shapes:
        per_micro_batch = shape.B * shape.T * (KEYS_PER_TOKEN + shape.C + shape.T)
        for cells in placings(rows, siblings, max(lengths), shape, shards, siblings_apart):
            used = -(-len(cells) // shards)
            if best is None or used * per_micro_batch < best[0]:
                best = used * per_micro_batch, cells, shape, used
    if best is None:
        raise ValueError(
            f"a row of {max(lengths)} tokens does not fit learner.buckets {tuple(shape.T for shape in shapes)}: the largest must"
            f" be at least rollout.max_model_len"
        )
    _, cells, shape, used = best
    while used > shape.A:
        shape = dataclasses.replace(shape, A=2 * shape.A)
    return cells, shape


def placings(rows: Sequence[Row], siblings, longest_row: int, shape: Shape, shards: int, siblings_apart: bool):
    """Ways to place the rows in cells of a shape: whole, and with shared prefixes."""
    R = shape.B // shards
    if longest_row <= shape.T:
        cells: list[Bin] = []
        add_whole([whole(i, row) for i, row in enumerate(rows)], cells, R, shape.T, shape.C)
        yield cells
    parts = prompt_groups(rows, siblings, shape.C)
    fits = longest(parts) <= shape.T if R > 1 else longest_row <= shape.T  # in one packed row prefix and response must fit both
    if fits and any(part.prefix is not None for part in parts):
        for lookahead, spread in itertools.product((0.0, 0.5), (False, True)):  # now one is better, now another
            yield place(parts, R, shape.T, shape.C, lookahead, siblings_apart, spread)


def build(rows: Sequence[Row], cells: Sequence[Bin], shape: Shape, shards: int) -> Batch:
    """Lays out `rows` as placed in `cells`: cell n is shard n % shards of micro-batch n // shards."""
    arrays = {name: np.zeros(size, dtype) for name, (size, dtype) in array_shapes(shape).items()}  # untouched pages cost nothing
    for name, value in EMPTY.items():
        arrays[name].fill(value)
    R = shape.B // shards
    slots: list[tuple[int, int, int]] = [(0, 0, 0)] * len(rows)
    total = 0
    for n, cell in enumerate(cells):
        a, shard = divmod(n, shards)
        packed = {name: array[a, shard * R : (shard + 1) * R] for name, array in arrays.items()}
        held = {}
        for r, pieces in enumerate(cell.rows):
            scored, columns = _fill_row({name: array[r] for name, array in packed.items()}, pieces, rows)
            for piece, start in zip((piece for piece in pieces if piece.holds < 0), scored, strict=True):
                slots[piece.row] = (a, shard * R + r, start)
            for piece, column in zip(pieces, columns, strict=True):
                if piece.holds >= 0:
                    held[piece.holds] = r * shape.T + column + np.arange(length(piece))
            total += sum(map(length, pieces))
        if shape.C:
            for r, pieces in enumerate(cell.rows):
                _fill_context({name: array[r] for name, array in packed.items()}, pieces, held)
    spared = sum(map(row_length, rows)) - total
    return Batch(arrays, shape, -(-len(cells) // shards), tuple(slots), total, spared)


def _fill_row(arrays: dict[str, np.ndarray], pieces, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Writes the pieces of one packed row; returns where the scored tokens of each but the prefixes begin, and the first column
    of each."""
    start = scored = 0
    begins, columns = [], []
    for segment, piece in enumerate(pieces, 1):
        row, size = rows[piece.row], length(piece)
        P, inputs = len(row.prompt_ids), slice(start, start + size)
        columns.append(start)
        arrays["positions"][inputs] = np.arange(piece.start, piece.stop)
        arrays["segments"][inputs] = segment
        if piece.holds >= 0:
            arrays["tokens"][inputs] = row.prompt_ids[piece.start : piece.stop]
        else:
            outputs = slice(scored, scored + row.num_scored)
            arrays["tokens"][start : start + P - piece.start] = row.prompt_ids[piece.start :]
            arrays["tokens"][start + P - piece.start : start + size] = row.response_ids[:-1]
            arrays["index"][outputs] = row.of_scored(np.arange(start + size - len(row.response_ids), start + size))
            arrays["sample"][outputs] = len(begins) + 1
            for name, values in SLOTS.items():
                arrays[name][outputs] = values(row)
            begins.append(scored)
            scored = outputs.stop
        start += size
    return begins, columns


def _fill_context(arrays: dict[str, np.ndarray], pieces, held: dict[int, np.ndarray]) -> None:
    """Writes what one packed row sees: each prefix once, numbered by the first segment that sees it."""
    start, column, numbers = 0, 0, {}
    for segment, piece in enumerate(pieces, 1):
        if piece.sees >= 0:
            if piece.sees not in numbers:
                numbers[piece.sees] = segment
                tokens = held[piece.sees]
                arrays["context"][start : start + len(tokens)] = tokens
                arrays["context_segments"][start : start + len(tokens)] = segment
                start += len(tokens)
            arrays["prefixes"][column : column + length(piece)] = numbers[piece.sees]
        column += length(piece)
