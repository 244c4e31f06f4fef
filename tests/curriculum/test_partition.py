"""Cutting responses into segments."""

import numpy as np
import pytest

from deepgrpo.curriculum import partition
from deepgrpo.curriculum.partition import Partition, snapped, windows
from deepgrpo.types import as_ids
from tests.conftest import golden_cases

METHODS = {"sentence": "sp", "token_count": "tp", "fixed_count": "fp"}


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"partition"}))
def test_golden(case):
    inputs = dict(case["inputs"])
    keys = {"tokens_per_segment": "tokens_per_node", "n_segments": "n_segments", "stop_token_ids": "stop_ids"}
    sizes = {ours: inputs[theirs] for theirs, ours in keys.items() if theirs in inputs}
    cut = Partition(METHODS[inputs["method"]], **sizes)
    assert [list(segment) for segment in cut.segments(as_ids(inputs["response_ids"]))] == case["expected"]["segments"]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 24])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_segments_cover_the_response_without_gaps(n, size):
    ids = as_ids(np.random.default_rng(n).integers(0, 3, n))
    for method in partition.METHODS:
        segments = Partition(method, size, size, (1,)).segments(ids)
        assert segments[0][0] == 0 and segments[-1][1] == n
        assert all(end == start for (_, end), (start, _) in zip(segments, segments[1:], strict=False))
        assert all(end > start for start, end in segments) or segments == [(0, 0)]
        lengths = [end - start for start, end in segments]
        if method == "fp":
            assert len(segments) == max(1, min(size, n)) and max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)


def test_boundaries_move_back_to_words():
    words = np.array([1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0], bool)  # a word of 3 tokens, one of 6, one of 2
    assert snapped(windows(11, 5), words) == [(0, 3), (3, 9), (9, 11)]
    assert snapped(windows(11, 4), words) == [(0, 3), (3, 8), (8, 11)]  # no start after 3 below 8: that boundary stays
    assert snapped(windows(11, 3), words) == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert snapped(windows(3, 5), words[:3]) == [(0, 3)]
    vocabulary = np.array([False, True])
    assert Partition("tp", 2, word_starts=vocabulary).segments(as_ids([0, 1, 0, 0, 0])) == [(0, 1), (1, 4), (4, 5)]


class Vocabulary:
    """A tokenizer, as far as it is asked."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def __len__(self):
        return len(self.pieces)

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]


def test_what_a_tokenizer_is_asked():
    assert partition.full_stop_id(Vocabulary("▁.", ".", ".Ċ")) == 1  # the full stop after a word, not one with white space
    assert partition.word_starts(Vocabulary("a", "Ġa", "▁a", "Ċ", "aĠ")).tolist() == [False, True, True, True, False]
    with pytest.raises(ValueError, match="segment_method=tp or fp"):
        partition.full_stop_id(Vocabulary("a", ".Ċ"))
    with pytest.raises(ValueError, match="one of sp, tp, fp, got 'word'"):
        Partition("word")
