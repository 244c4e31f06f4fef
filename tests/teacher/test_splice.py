"""The cut between student and teacher: properties over random text and tokenisations, limits, the reference's EOS rule."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepgrpo.data import carry_chain
from deepgrpo.teacher.splice import (
    BROKEN,
    Codec,
    Limits,
    append_eos,
    same_start,
    splice_text,
    splice_tokens,
    whole,
)
from deepgrpo.types import as_ids
from tests.teacher.fakes import byte_level_codec, teacher_cases

CODEC = byte_level_codec()
STOP = 2
OPEN = Limits(min_prefix_match_tokens=0, min_prefix_match_ratio=0.0, min_suffix_len=0, max_model_len=10_000)
texts = st.text(st.sampled_from("ab 12+=\n\tπ€😀日é\u0301The sum"), max_size=40) | st.text(max_size=12)


def sampled(text: str, seed: int, stop: bool = True) -> np.ndarray:
    """Ids of `text` as a student may sample them: randomly split, far from canonical."""
    draw, ids, rest = random.Random(seed), [], text.encode("utf-8", "ignore").decode()
    canonical = CODEC.encode(rest)
    for i in canonical:
        piece = CODEC.decode([i])
        split = BROKEN not in piece and len(piece) > 1 and draw.random() < 0.5
        ids += [j for part in (piece[:1], piece[1:]) for j in CODEC.encode(part)] if split else [i]
    return as_ids([*ids, STOP] if stop else ids)


def brute_force(student: np.ndarray, written: str, teacher: str, shared: int) -> int:
    """The largest number of leading ids whose text is a prefix of what is shared and cuts no number or mark of either text."""

    def sound(k):
        text = CODEC.decode(student[:k])
        return BROKEN not in text and len(text) <= shared and all(whole(t, len(text)) == len(text) for t in (written, teacher))

    return max(k for k in range(len(student) + 1) if sound(k))


@settings(max_examples=150, deadline=None)
@given(common=texts, ours=texts, theirs=texts, seed=st.integers(0, 99))
def test_cut_is_a_slice_of_the_sampled_ids_and_the_whole_is_the_teachers_text(common, ours, theirs, seed):
    student = sampled(common + ours, seed)
    written = CODEC.decode(student[:-1])
    teacher = written[: len(written) - len(written.lstrip())] + (common + theirs).encode("utf-8", "ignore").decode().lstrip()
    found = splice_text(CODEC, student, common + theirs, 7, [STOP], OPEN)
    if found.reason:
        assert found.reason in ("empty_suffix", "empty_teacher_tokens") or (BROKEN in common + theirs + written)
        return
    k = len(found.prefix_ids)
    assert np.array_equal(found.prefix_ids, student[:k]) and np.array_equal(found.failed_suffix_ids, student[k:])
    teacher = written[: (ends := same_start(written, teacher))[0]] + teacher[ends[1] :]
    assert CODEC.decode(found.body()) == teacher
    assert found.suffix_ids[-1] == STOP and found.body_len == len(found.suffix_ids) - 1
    if BROKEN not in written:
        shared, _ = same_start(written, teacher)
        assert k == brute_force(student[:-1], written, teacher, shared) == found.match_text_tokens


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30), theirs=texts)
def test_any_ids_of_a_random_model_are_cut_at_a_character(ids, theirs):
    """A flat distribution samples special ids, halves of characters and bytes that are no UTF-8."""
    student = as_ids([i % len(CODEC._tokenizer) for i in ids])
    found = splice_text(CODEC, student, CODEC.text(student) + theirs + "x", 0, [STOP], OPEN)
    if not found.reason:
        prefix = CODEC.decode(found.prefix_ids)
        assert BROKEN not in prefix and CODEC.decode(found.body()).startswith(prefix)
        assert not CODEC.special_ids & set(found.prefix_ids.tolist())


class PairCodec:
    """Ids are bytes (below 256) or any two bytes in a row: tokens that end one character and begin the next."""

    special_ids, eos_token_id = frozenset(), None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        chunks = (bytes([i]) if i < 256 else bytes(divmod(i - 256, 256)) for i in ids)
        return b"".join(chunks).decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(common=texts, ours=texts, theirs=texts, pairs=st.lists(st.booleans(), min_size=60, max_size=60))
def test_tokens_that_join_halves_of_characters(common, ours, theirs, pairs):
    codec, ids, rest = PairCodec(), [], (common + ours).encode("utf-8", "ignore")
    while rest:
        size = 2 if len(rest) > 1 and pairs[len(ids) % len(pairs)] else 1
        ids.append(rest[0] if size == 1 else 256 + 256 * rest[0] + rest[1])
        rest = rest[size:]
    found = splice_text(codec, as_ids(ids), common + theirs, 0, [STOP], OPEN)
    if not found.reason:
        assert codec.decode(found.body()).lstrip() == (common + theirs).lstrip()
        assert BROKEN not in codec.decode(found.prefix_ids) or BROKEN in common
    else:
        assert found.reason in ("empty_suffix", "empty_teacher_tokens")


def test_non_canonical_samples_match_in_characters_though_not_in_tokens():
    text, wrong = "The sum is 12 + 30 = 42 units.", "The sum is 12 + 30 = "
    student = as_ids([j for symbol in wrong + "43." for j in CODEC.encode(symbol)])  # a character at a time
    found = splice_text(CODEC, student, text, 0, [STOP], OPEN)
    assert (found.match_text_tokens, CODEC.decode(found.prefix_ids)) == (len(wrong), wrong)
    assert found.match_tokens < 3
    leading = splice_text(CODEC, as_ids([*CODEC.encode("\n\n"), *student]), text, 0, [STOP], OPEN)
    assert CODEC.decode(leading.body()) == "\n\n" + text, "one run of leading whitespace is tolerated"


def test_cut_never_halves_a_character():
    cut = splice_text(CODEC, as_ids(CODEC.encode("ab\u00e9")), "ab\u00ea and more", 0, [STOP], OPEN)  # é and ê share a byte
    assert CODEC.decode(cut.prefix_ids) == "ab"


def test_special_tokens_and_lossy_texts_are_refused():
    assert CODEC.special_ids == {0, 1, 2}, "those without a role, too"
    student = as_ids(CODEC.encode("a = 1"))
    assert splice_text(CODEC, student, "a = 2<|im_end|>", 0, [STOP], OPEN).reason == "special_in_suffix"
    assert splice_text(CODEC, student, "a = 1", 0, [STOP], OPEN).reason == "empty_suffix"
    ended = as_ids([*student, STOP, *student])
    assert splice_text(CODEC, ended, "a = 1<|im_end|>a = 2", 0, [STOP], OPEN).reason == "special_in_suffix", (
        "no prefix goes past it"
    )
    assert splice_text(CODEC, student, " \n", 0, [STOP], OPEN).reason == "empty_teacher_tokens"

    class Lossy(Codec):
        def encode(self, text):
            return super().encode(text.replace("é", "e"))  # as a normaliser may do

    assert splice_text(Lossy(CODEC._tokenizer), student, "a = 2 é", 0, [STOP], OPEN).reason == "roundtrip_failed"


def test_carry_chain_is_cut_just_before_the_wrong_digit(tmp_path):
    from transformers import AutoTokenizer

    carry_chain.build_tokenizer(tmp_path)
    codec = Codec(AutoTokenizer.from_pretrained(tmp_path))
    right = carry_chain.solution("57a6b9c8d7e9f6g8h7i9j6=?")
    student = as_ids([*codec.encode("a+6=63\nb+9=62\nc+8=70"), codec.eos_token_id])
    found = splice_text(codec, student, right, 32, [codec.eos_token_id], OPEN)
    assert codec.decode(found.prefix_ids) == "a+6=63\nb+9=" and codec.decode(found.body()) == right
    assert found.match_tokens == found.match_text_tokens == len("a+6=63\nb+9=")


def test_long_responses_take_few_decodes():
    class Counting(Codec):
        decoded = 0

        def decode(self, ids):
            self.decoded += len(ids)
            return super().decode(ids)

    codec = Counting(CODEC._tokenizer)
    student = as_ids(CODEC.encode("x1 + " * 1400)[:4096])
    found = splice_text(codec, student, CODEC.decode(student[:3000]) + "!", 0, [STOP], OPEN)
    assert found.match_text_tokens == 3000 and codec.decoded < 20 * 4096


def test_limits_are_checked_in_order_in_both_rules():
    student, text = as_ids(CODEC.encode("1 + 1 = 3")), "1 + 1 = 2!"
    for limits, reason in (
        (Limits(99, 0.0, 0, 1000), "prefix_too_short"),
        (Limits(0, 1.0, 0, 1000), "prefix_ratio_too_low"),
        (Limits(0, 0.0, 9, 1000), "suffix_too_short"),
        (Limits(0, 0.0, 0, 5), "too_long"),
        (Limits(0, 0.0, 0, 30), "no_room_for_rollouts"),
    ):
        assert splice_text(CODEC, student, text, 0, [STOP], limits).reason == reason
        assert splice_tokens(student, CODEC.encode(text), 0, STOP, limits).reason == reason


@pytest.mark.parametrize("args, result", teacher_cases("append_eos"))
def test_golden_append_eos(args, result):
    eos = None if args["eos_token_id"] == "attribute absent" else args["eos_token_id"]
    if "error" in result:
        with pytest.raises(ValueError):
            append_eos(args["ids"], args["mask"], eos)
    else:
        assert append_eos(args["ids"], args["mask"], eos) == (result["ids"], result["mask"], result["appended"])
