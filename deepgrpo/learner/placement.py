"""Where training rows go: pieces of rows in packed rows, the siblings of a prompt beside one copy of it. Host only, no arrays.

A *cell* is what one batch shard computes of one micro-batch: R packed rows of T tokens. A packed row may look at tokens of its
own cell only, so a prefix and the responses that see it share a cell; a group that does not fit goes on in the next one, with
a further copy of its prefix.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepgrpo.learner.rows import Row


class Piece(NamedTuple):
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
class Cluster:
    """Pieces that see one prefix. number: of the group; prefix: the shared piece, None for a row by itself."""

    number: int
    prefix: Piece | None
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        return sum(length(piece) for piece in self.pieces) + (0 if self.prefix is None else length(self.prefix))


def length(piece: Piece) -> int:
    return piece.stop - piece.start


def row_length(row: Row) -> int:
    """Tokens that a row needs in the network: the last response token is only predicted, never an input."""
    return len(row.prompt_ids) + len(row.response_ids) - 1


def whole(i: int, row: Row) -> Piece:
    return Piece(i, 0, row_length(row))


def groups(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of the rows with equal prompts, in order of first appearance."""
    members: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.prompt_ids.tobytes(), []).append(i)
    return list(members.values())


def clusters(rows: Sequence[Row], siblings: Sequence[Sequence[int]], context: int) -> list[Cluster]:
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
            out += [Cluster(number, None, (whole(i, rows[i]),)) for i in members]
        else:
            pieces = tuple(Piece(i, shared, row_length(rows[i]), sees=number) for i in members)
            out.append(Cluster(number, Piece(members[0], 0, shared, holds=number), pieces))
    return out


def longest(parts: Sequence[Cluster]) -> int:
    return max(length(piece) for part in parts for piece in (*part.pieces, part.prefix) if piece is not None)


class Cell:
    """R packed rows of T tokens, filled piece by piece; each sees at most C tokens of prefixes.

    siblings_apart: no packed row sees one prefix twice. spread: a prefix goes to the emptiest row, not to the first with room.
    """

    def __init__(self, R: int, T: int, C: int, siblings_apart: bool = False, spread: bool = False):
        self.rows: list[list[Piece]] = [[] for _ in range(R)]
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

    def _put(self, r: int, piece: Piece) -> None:
        self.rows[r].append(piece)
        self.room[r] -= length(piece)

    def add(self, piece: Piece, prefix: Piece | None) -> bool:
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


def place(parts: Sequence[Cluster], R: int, T: int, C: int, lookahead: float, siblings_apart: bool, spread: bool) -> list[Cell]:
    """Fills cells with clusters. Deterministic.

    Large clusters first; each cell takes, first-fit-decreasing, from as many clusters as would fill 1 + lookahead of it, and what
    is left of them goes to the next. Rows by themselves come last, into the first hole anywhere. Every piece must fit T.

    Args:
      siblings_apart, spread: see `Cell`.
    """
    waiting = [(part, sorted(part.pieces, key=lambda piece: -length(piece))) for part in parts if part.prefix is not None]
    waiting.sort(key=lambda entry: -entry[0].tokens)
    cells = []
    while waiting:
        cell, pool, tokens = Cell(R, T, C, siblings_apart, spread), [], 0
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


def add_whole(pieces: Sequence[Piece], cells: list[Cell], R: int, T: int, C: int) -> None:
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
            cells.append(Cell(R, T, C))
            room[n : n + R] = T
        cells[n // R]._put(n % R, piece)
        room[n] -= length(piece)
