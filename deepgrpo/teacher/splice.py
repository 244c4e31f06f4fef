"""Where a student's response and the teacher's corrected text part, and the token ids on both sides of the cut.

The prefix is always a literal slice of the *sampled* ids. Two rules find the cut:

- text: the longest common prefix in characters, mapped down to a boundary of the student's tokens. A teacher copies text, and one
  text has many tokenisations; what the student sampled need not be the canonical one.
- tokens (the reference): the longest common prefix of the sampled ids and the canonical encoding of the teacher's text.
"""

import dataclasses
import os.path
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from deepgrpo.types import Ids, as_ids

BROKEN = "\ufffd"  # what bytes that are no UTF-8 decode to


class Codec:
    """Text to ids and back, exactly. Wraps one tokenizer instance, which belongs to one thread (fast tokenizers cannot be
    shared)."""

    def __init__(self, tokenizer: Any):
        """`tokenizer`: a `transformers` tokenizer that nothing else uses."""
        self._tokenizer = tokenizer
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}  # more than the named ones
        self.special_ids = frozenset(tokenizer.all_special_ids) | added
        self.eos_token_id = getattr(tokenizer, "eos_token_id", None)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, nothing skipped, nothing tidied up."""
        return self._tokenizer.decode(
            np.asarray(ids, dtype=np.int32).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def words(self, ids: Sequence[int]) -> str:
        """Text of `ids` without the special tokens among them."""
        return self.decode([i for i in ids if i not in self.special_ids])


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a cut must satisfy; the keys of `config.teacher` and `config.curriculum`.

    max_model_len bounds state, prefix and suffix together, and must leave `min_remaining_tokens` after state and prefix.
    """

    min_prefix_match_tokens: int
    min_prefix_match_ratio: float
    min_suffix_len: int
    max_model_len: int
    min_remaining_tokens: int = 32


def _no_ids() -> Ids:
    return as_ids([])


@dataclasses.dataclass(frozen=True, eq=False)
class Splice:
    """An accepted cut (`reason` is "") or why there is none.

    prefix_ids: int32[len], literally the response's first ids.
    suffix_ids: int32[len], the teacher's ids after it, closed by a stop id; `body_len` of them come before an appended one.
    failed_suffix_ids: int32[len], what the student had written instead.
    match_tokens: common prefix of the sampled ids and the teacher's text as encoded. match_text_tokens: sampled ids whose text
      agrees with the teacher's; -1 where that was not looked at.
    """

    reason: str
    prefix_ids: Ids = dataclasses.field(default_factory=_no_ids)
    suffix_ids: Ids = dataclasses.field(default_factory=_no_ids)
    body_len: int = 0
    failed_suffix_ids: Ids = dataclasses.field(default_factory=_no_ids)
    match_tokens: int = 0
    match_text_tokens: int = -1

    def body(self) -> Ids:
        """int32[len], prefix and suffix without an appended stop id: what is verified."""
        return np.concatenate([self.prefix_ids, self.suffix_ids[: self.body_len]])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading items that are equal."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differs[0]) if differs.size else n


def append_eos(ids: Sequence[int], mask: Sequence[int], eos: Any) -> tuple[list[int], list[int], bool]:
    """The reference's rule: closes a suffix by the tokenizer's EOS id unless that is its last id already.

    Args:
      eos: an id; a list of ids, of which the first counts; None or an empty list: nothing is appended.

    Returns:
      ids, mask and whether an id was appended.

    Raises:
      ValueError: ids and mask differ in length.
    """
    if len(ids) != len(mask):
        raise ValueError(f"a suffix and its mask must have one length, got {len(ids)} and {len(mask)}")
    if isinstance(eos, (list, tuple)):
        eos = eos[0] if eos else None
    if eos is None or (len(ids) and ids[-1] == eos):
        return list(ids), list(mask), False
    return [*ids, eos], [*mask, 1], True


#### The two rules


def splice_tokens(student: Ids, teacher: Sequence[int], state_len: int, eos: Any, limits: Limits) -> Splice:
    """Cuts where the ids part.

    Args:
      student: int32[len], the sampled response. teacher: the teacher's text as encoded. state_len: ids before the response.
      eos: see `append_eos`.
    """
    if not len(teacher):
        return Splice("empty_teacher_tokens")
    match = common_prefix(student, teacher)
    return _checked(student, match, teacher[match:], state_len, eos, limits, match_tokens=match)


def splice_text(codec: Codec, student: Ids, text: str, state_len: int, stop_ids: Sequence[int], limits: Limits) -> Splice:
    """Cuts where the texts part.

    A run of leading whitespace may differ: the student's is taken. Nothing is shared past the response's first special token (its
      stop
    id is not text) or past bytes that are no UTF-8. The result decodes to the teacher's text, or is rejected.

    Args:
      student: int32[len], the sampled response. text: the teacher's. state_len: ids before the response.
      stop_ids: the first one closes the suffix; none: it stays open.
    """
    usable = student[: _first_special(student, codec.special_ids)]
    written = codec.decode(usable)
    text = written[: len(written) - len(written.lstrip())] + text.lstrip()
    if not text.strip():
        return Splice("empty_teacher_tokens")
    shared = len(os.path.commonprefix([written.partition(BROKEN)[0], text]))
    match, shared = _boundary(codec, usable, written[:shared])
    suffix = codec.encode(text[shared:]) if shared < len(text) else []
    lengths = {"match_tokens": common_prefix(student, codec.encode(text)), "match_text_tokens": match}
    found = _checked(student, match, suffix, state_len, list(stop_ids), limits, **lengths)
    if found.reason:
        return found
    if not codec.special_ids.isdisjoint(suffix):
        return Splice("special_in_suffix", **lengths)
    if codec.decode(found.body()) != text:
        return Splice("roundtrip_failed", **lengths)
    return found


def _first_special(ids: Ids, special: Collection[int]) -> int:
    found = np.flatnonzero(np.isin(ids, list(special)))
    return int(found[0]) if found.size else len(ids)


def _boundary(codec: Codec, ids: Ids, shared: str) -> tuple[int, int]:
    """Returns the largest number of leading ids whose text lies wholly inside `shared`, and that text's length.

    `shared` is a prefix of the ids' text. Whole prefixes are decoded (a token's text alone may be half a character), about
    log2(len) of them.
    """

    def sound(k: int) -> tuple[int, bool]:
        """Characters of the first k ids before any broken one, and whether all are sound."""
        before, broken, _ = codec.decode(ids[:k]).partition(BROKEN)
        return len(before), not broken

    low, high = 0, len(ids)  # the smallest k that reaches the end of `shared`: characters only grow with k
    while low < high:
        middle = (low + high) // 2
        if sound(middle)[0] >= len(shared):
            high = middle
        else:
            low = middle + 1
    k = low
    while k:
        characters, complete = sound(k)
        if complete and characters <= len(shared):
            return k, characters
        k -= 1  # ends past `shared`, or inside a character: at most a few tokens to go
    return 0, 0


def _checked(student: Ids, match: int, suffix: Sequence[int], state_len: int, eos: Any, limits: Limits, **lengths: int) -> Splice:
    """Applies the limits in the reference's order."""
    closed, _, _ = append_eos(suffix, [1] * len(suffix), eos)
    reason = ""
    if match < limits.min_prefix_match_tokens:
        reason = "prefix_too_short"
    elif len(student) and match / len(student) < limits.min_prefix_match_ratio:
        reason = "prefix_ratio_too_low"
    elif not len(suffix):
        reason = "empty_suffix"
    elif len(suffix) < limits.min_suffix_len:
        reason = "suffix_too_short"
    elif state_len + match + len(closed) > limits.max_model_len:
        reason = "too_long"
    elif limits.max_model_len - state_len - match < limits.min_remaining_tokens:
        reason = "no_room_for_rollouts"
    if reason:
        return Splice(reason, **lengths)
    return Splice("", student[:match], as_ids(closed), len(suffix), student[match:], **lengths)
