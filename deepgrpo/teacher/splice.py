"""Where a student's response and the teacher's corrected text part, and the token ids on both sides of the cut.

The prefix is always a literal slice of the *sampled* ids. Two rules find the cut:

- text: the longest common prefix in characters, mapped down to a boundary of the student's tokens. A teacher copies text, and one
  text has many tokenisations; what the student sampled need not be the canonical one. One text also has many spellings: line
  ends, no-break spaces, composed letters and byte order marks of both are read alike, and the student's are kept.
- tokens (the reference): the longest common prefix of the sampled ids and the canonical encoding of the teacher's text.

No prefix ends inside a character, a number, or a mark such as `\\boxed`, `####` or `<answer>`: it would give the rest away.
"""

import dataclasses
import os.path
import re
import unicodedata
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.rewards.answer import unit_at
from deepgrpo.types import Ids, as_ids, plain

BROKEN = "\ufffd"  # what bytes that are no UTF-8 decode to
_SPACES = {"\u00a0": " ", "\u202f": " ", "\u2028": "\n", "\u2029": "\n", "\x85": "\n", "\r": "\n", "\r\n": "\n"}
_FAR = 100  # characters: most of a command with its arguments that a cut goes back over
_ARGUMENT = re.compile(r"\\[A-Za-z]+\s?(?:\{[^{}\n]*\}\s?)?\{[^{}\n]*\Z")  # of a LaTeX command, still open
_INVISIBLE = "\ufeff\u200b\u2060"  # byte order mark, spaces of no width
_JOINERS = "\u200d\ufe0e\ufe0f"  # of emoji


class Codec:
    """Text to ids and back, exactly. Wraps one tokenizer instance, which belongs to one thread (fast tokenizers cannot be
    shared)."""

    def __init__(self, tokenizer: Any):
        """`tokenizer`: a `transformers` tokenizer that nothing else uses."""
        self._tokenizer = self.tokenizer = tokenizer
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}  # more than the named ones
        self.special_ids = frozenset(tokenizer.all_special_ids) | added
        self.eos_token_id = getattr(tokenizer, "eos_token_id", None)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, nothing skipped, nothing tidied up."""
        ids = plain(np.asarray(ids, np.int32)).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids: Ids) -> str:
        """Text of `ids` up to the first special token: what follows the end of a turn belongs to nobody."""
        return self.decode(ids[: _first_special(ids, self.special_ids)])


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

    @classmethod
    def from_config(cls, config: ml_collections.ConfigDict) -> "Limits":
        """config: the whole configuration."""
        t = config.teacher
        matches = t.min_prefix_match_tokens, t.min_prefix_match_ratio, t.min_suffix_len
        return cls(*matches, config.rollout.max_model_len, config.curriculum.min_remaining_tokens)


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


#### Texts that say the same


def same_start(a: str, b: str) -> tuple[int, int]:
    """How many characters of each text, from its start, say the same as those of the other; none is cut from its accents."""
    if a.isascii() and b.isascii() and "\r" not in a + b:
        shared = len(os.path.commonprefix([a, b]))
        return shared, shared
    ends = (0, 0)
    for (left, i), (right, j) in zip(_units(a), _units(b), strict=False):
        if left != right:
            break
        ends = i, j
    return ends


def _units(text: str) -> Iterator[tuple[str, int]]:
    """Yields the characters of a text as they are compared, each with what belongs to it, and where it ends."""
    start = 0
    while start < len(text):
        end = start + 1
        while end < len(text) and _joined(text, end):
            end += 1
        unit = text[start:end]
        if unit not in _INVISIBLE:
            yield _SPACES.get(unit) or unicodedata.normalize("NFC", unit.strip(_INVISIBLE)), end
        start = end


def _joined(text: str, place: int) -> bool:
    """Whether the characters on both sides of a place are one to the reader."""
    after = text[place]
    return (
        bool(unicodedata.combining(after))
        or after in _JOINERS
        or text[place - 1] == "\u200d"
        or text[place - 1 : place + 1] == "\r\n"
    )


def without_repetition(text: str, given: str, student: str) -> str:
    """The teacher's text without the start that it repeats: all of what was given before the student's text, or its last lines.

    The latter only where more is then shared with the student's text, which may begin alike by chance.
    """
    lines = [i + 1 for i, character in enumerate(given) if character == "\n"]
    best, shared = text, same_start(student.lstrip(), text.lstrip())[0]
    for start in reversed([0, *lines]):
        tail = given[start:].strip()
        if not tail:
            continue
        matched, used = same_start(tail, text.lstrip())
        rest = text.lstrip()[used:]
        gain = same_start(student.lstrip(), rest.lstrip())[0]
        if matched == len(tail) and (gain > shared or (start == 0 and gain == shared)):
            best, shared = rest, gain
    return best


def whole(text: str, place: int) -> int:
    """The largest place up to `place` inside no character, number, mark or LaTeX argument of a text; words may be cut."""
    while 0 < place < len(text):
        unit = unit_at(text, place)
        if command := _ARGUMENT.search(text, max(0, place - _FAR), place):
            place = command.start()
        elif unit is not None and not unit[1].isalpha():
            place = unit[0]
        elif _joined(text, place):
            place -= 1
        else:
            break
    return place


#### The two rules


def splice_tokens(student: Ids, teacher: Sequence[int], state_len: int, eos: Any, limits: Limits) -> Splice:
    """Cuts where the ids part, as the reference does: also inside a number or a mark.

    Args:
      student: int32[len], the sampled response. teacher: the teacher's text as encoded. state_len: ids before the response.
      eos: see `append_eos`.
    """
    if not len(teacher):
        return Splice("empty_teacher_tokens")
    match = common_prefix(plain(student), teacher)
    return _checked(student, match, teacher[match:], state_len, eos, limits, match_tokens=match)


def splice_text(codec: Codec, student: Ids, text: str, state_len: int, stop_ids: Sequence[int], limits: Limits) -> Splice:
    """Cuts where the texts part.

    A run of leading whitespace may differ: the student's is taken. Nothing is shared past the response's first special token (its
    stop id is not text) or past bytes that are no UTF-8. The result decodes to the teacher's text, what is shared spelled as by
    the student, or is rejected.

    Args:
      student: int32[len], the sampled response. text: the teacher's. state_len: ids before the response.
      stop_ids: the first one closes the suffix; none: it stays open.
    """
    usable = student[: _first_special(student, codec.special_ids)]
    written = codec.decode(usable)
    text = written[: len(written) - len(written.lstrip())] + text.lstrip()
    if not text.strip():
        return Splice("empty_teacher_tokens")
    ours, theirs = same_start(written.partition(BROKEN)[0], text)
    match, shared = _boundary(codec, usable, written[:ours])
    text = written[:ours] + text[theirs:]
    match = back_off(codec, usable[:match], written, text)
    if match < len(usable) and usable[match] < 0:  # a call is kept with its answer, and the teacher says another
        return Splice("invented_observation", match_text_tokens=match)
    shared = len(codec.decode(usable[:match]))
    suffix = codec.encode(text[shared:]) if shared < len(text) else []
    lengths = {"match_tokens": common_prefix(plain(student), codec.encode(text)), "match_text_tokens": match}
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


def back_off(codec: Codec, ids: Ids, *texts: str) -> int:
    """The largest number of leading ids whose text ends inside no character, number or mark of any of the texts, which all begin
    with the text of `ids`."""
    k = len(ids)
    while k:
        text = codec.decode(ids[:k])
        place = min(whole(continued, len(text)) for continued in texts)
        if place == len(text) and BROKEN not in text[-4:]:
            break
        k = min(k - 1, _boundary(codec, ids[:k], text[:place])[0])
    return k


def own(ids: Ids) -> int:
    """Tokens that the student wrote."""
    return int((ids >= 0).sum())


def _checked(student: Ids, match: int, suffix: Sequence[int], state_len: int, eos: Any, limits: Limits, **lengths: int) -> Splice:
    """Applies the limits in the reference's order."""
    closed, _, _ = append_eos(suffix, [1] * len(suffix), eos)
    reason = ""
    if match < limits.min_prefix_match_tokens:
        reason = "prefix_too_short"
    elif len(student) and own(student[:match]) / max(1, own(student)) < limits.min_prefix_match_ratio:
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


#### Other places, for the question whether the place matters

# teacher: where student and teacher part (the method); own: a random place before it; random: a random place of the student's
# failed response, right so far or not; solution: a random place of the teacher's solution, as of a worked example shown in part.
# All ask the teacher the same and verify the same. Only the first two keep the teacher's suffix as what follows the state.
PLACES = ("teacher", "own", "random", "solution")
PURPOSE = 0xC07  # keeps these draws apart from all others of the same seed


def move(cut: Splice, student: Ids, state_ids: Ids, place: str, *, codec: Codec, limits: Limits, seed: int) -> Splice:
    """The cut at `place`: a function of its arguments, with the same lengths of the match for the metrics.

    At least one token is kept and at least one left out; of special tokens (the response's stop id) none is kept. A place inside
    a number or mark is moved back to where that begins, at the very start of the text forward.

    Args:
      cut: an accepted one. student: int32[len], the response. state_ids: int32[len], what it continues.

    Returns:
      The new cut; its `reason` is no_room_for_rollouts, too_long, empty_suffix or prefix_too_short if that place does not exist.
    """
    if place == "teacher":
        return cut
    body = cut.body()
    source = body if place == "solution" else student
    special = np.flatnonzero(np.isin(source, list(codec.special_ids)))
    end = min(int(special[0]) if special.size else len(source), len(source) - 1)
    if place == "own":
        end = min(end, max(1, len(cut.prefix_ids) - 1))
    room = limits.max_model_len - limits.min_remaining_tokens - len(state_ids)
    if min(end, room) < 1:
        return dataclasses.replace(cut, reason="no_room_for_rollouts" if end >= 1 else "empty_suffix")
    fingerprint = zlib.crc32(np.concatenate([state_ids, student]).astype("<i4").tobytes())
    k = int(np.random.default_rng((seed, PURPOSE, fingerprint)).integers(1, min(end, room) + 1))
    text = codec.decode(source)
    first = (n for n in range(1, min(end, room) + 1) if back_off(codec, source[:n], text) == n)
    k = back_off(codec, source[:k], text) or next(first, 0)
    if not k:
        return dataclasses.replace(cut, reason="prefix_too_short")
    closing = cut.suffix_ids[cut.body_len :]
    follows = body[k:] if place != "random" or k <= len(cut.prefix_ids) else cut.suffix_ids[: cut.body_len]
    suffix = np.concatenate([follows, closing])
    if len(state_ids) + k + len(suffix) > limits.max_model_len:
        return dataclasses.replace(cut, reason="too_long")
    return dataclasses.replace(
        cut, prefix_ids=source[:k], suffix_ids=suffix, body_len=len(follows), failed_suffix_ids=student[k:]
    )
