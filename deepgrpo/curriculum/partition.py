"""Cuts a finished response into the segments between which a chain may be branched."""

import dataclasses
from collections.abc import Sequence

import ml_collections
import numpy as np

from deepgrpo.data.tokenizer import Tokenizer, load_tokenizer, vocabulary
from deepgrpo.types import Ids

METHODS = ("sp", "tp", "fp")
FULL_STOP = "."
WORD_STARTS = "Ġ▁Ċĉč \n\t\r"  # with which a vocabulary piece begins that has white space in front (byte-level BPE, SentencePiece)

Segment = tuple[int, int]  # half-open range of response positions


def sentences(ids: Ids, stop_ids: Sequence[int]) -> list[Segment]:
    """A segment ends after each token that is one of `stop_ids`; what follows the last one is a segment, too."""
    return between(len(ids), (np.flatnonzero(np.isin(ids, stop_ids)) + 1).tolist())


def windows(n: int, size: int) -> list[Segment]:
    """Segments of `size` tokens, the last one shorter."""
    return between(n, list(range(size, n, size)))


def equal_parts(n: int, parts: int) -> list[Segment]:
    """min(parts, n) segments whose sizes differ by at most one, larger ones first."""
    parts = max(min(parts, n), 1)
    sizes = [n // parts + (i < n % parts) for i in range(parts)]
    return between(n, np.cumsum(sizes).tolist())


def snapped(segments: Sequence[Segment], word_start: np.ndarray) -> list[Segment]:
    """Moves every inner boundary back to the start of the word that it would cut, where that leaves its segment some tokens.

    word_start: bool[len], of each response token: it begins with white space.
    """
    ends: list[int] = []
    for start, end in segments[:-1]:
        first = ends[-1] if ends else start
        words = np.flatnonzero(word_start[first + 1 : end + 1])
        ends.append(first + 1 + int(words[-1]) if len(words) else end)
    return between(segments[-1][1], ends)


def between(n: int, ends: Sequence[int]) -> list[Segment]:
    """The segments of [0, n) that end at `ends`, rising positions in (0, n], and the rest; a single (0, 0) for n = 0."""
    bounds = [0, *(end for end in ends if end < n), n]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """One way of cutting responses.

    method: sp: after each full stop; tp: every `tokens_per_node` tokens; fp: into `n_segments` equal parts.
    stop_ids: sp: the ids that count as a full stop. word_starts: bool[vocabulary], tp: ids that begin with white space, to which
    boundaries are moved back; None: they stay.
    """

    method: str
    tokens_per_node: int = 50
    n_segments: int = 5
    stop_ids: tuple[int, ...] = ()
    word_starts: np.ndarray | None = None

    def __post_init__(self):
        """Raises ValueError: an unknown method, or sizes that are not positive."""
        if self.method not in METHODS:
            raise ValueError(f"branches.segment_method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.tokens_per_node < 1 or self.n_segments < 1:
            raise ValueError(f"segments need tokens: tokens_per_node={self.tokens_per_node}, n_segments={self.n_segments}")

    def segments(self, ids: Ids) -> list[Segment]:
        """Contiguous segments that cover `ids`, int32[len]; a single (0, 0) without ids."""
        if self.method == "sp":
            return sentences(ids, self.stop_ids)
        if self.method == "fp":
            return equal_parts(len(ids), self.n_segments)
        found = windows(len(ids), self.tokens_per_node)
        return found if self.word_starts is None else snapped(found, self.word_starts[ids])


def full_stop_id(tokenizer: Tokenizer) -> int:
    """The id of the token that is exactly a full stop (not one with white space or another sign beside it).

    Raises:
      ValueError: this tokenizer has none.
    """
    stop = tokenizer.get_vocab().get(FULL_STOP)
    if stop is None:
        raise ValueError(
            "branches.segment_method=sp cuts after the token of a full stop, but this tokenizer has none; "
            "use branches.segment_method=tp or fp"
        )
    return int(stop)


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """bool[vocabulary]: the ids whose piece begins with white space."""
    pieces = tokenizer.convert_ids_to_tokens(range(vocabulary(tokenizer).bound))
    return np.array([bool(piece) and piece[0] in WORD_STARTS for piece in pieces])


def create(config: ml_collections.ConfigDict) -> Partition:
    """From the whole configuration; loads the tokenizer only where the method needs it."""
    keys = config.branches
    return Partition(
        keys.segment_method,
        keys.tokens_per_node,
        keys.n_segments,
        stop_ids=(full_stop_id(load_tokenizer(config.model.path)),) if keys.segment_method == "sp" else (),
    )
