"""The grader of DABench: named values, written as `@name[value]` inside the last answer pair.

All the values of the key must be there and right: equal as text whatever the case, as lists, or as numbers within 1e-6.
"""

import re
from collections.abc import Sequence
from typing import Any

from deepgrpo.rewards import marks, search_qa, tables
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

TOLERANCE = 1e-6  # absolute
MAX_VALUE = 2_000  # characters
LEAK = r"<\s*/?\s*answer\b|@\w+\["  # of a prefix that states an answer, or begins to

_FIELD = re.compile(r"@(\w+)\[")
_SHORT_FIELD = re.compile(r"@(\w+)\[([^\]]*)\]")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def grade(answer: Answer) -> Grade:
    """1 if every named value of the key is stated and right; no verdict where the row has no usable key."""
    found = tables.pairs(own_words(answer.response))
    if not (key := _named(answer.ground_truth)):
        return Grade(None, bool(found), "bad_key", (found or [""])[-1][:200])
    return marks.worst(_verdict(key, pair) for pair in found[::-1])


def _verdict(key: dict[str, str], found: str) -> Grade:
    stated = fields(found)
    if not key.keys() <= stated.keys():
        return Grade(0.0, False, "partial" if stated else "unformatted", found.strip()[:200])
    right = all(same(value, stated[name]) for name, value in key.items())
    return Grade(float(right), True, "right" if right else "wrong", found.strip()[:200])


def _named(ground_truth: Any) -> dict[str, str]:
    """The key as name -> value. A value that is a list stays one, as text; empty if the key isn't a list of pairs."""
    pairs = ground_truth if isinstance(ground_truth, list | tuple) else ()
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return {}
    return {str(name): str(value) for name, value in pairs}


def fields(text: str) -> dict[str, str]:
    """The values that `text` names, the last one of a name. Brackets nest; where they don't pair, a value ends at the first."""
    starts = list(_FIELD.finditer(text))
    ends = [*(match.start() for match in starts[1:]), len(text)][: len(starts)]
    found = {}
    for match, end in zip(starts, ends, strict=True):
        value = _bracketed(text[match.end() : end])
        if value is not None:
            found[match[1]] = value
    return found


def _bracketed(text: str) -> str | None:
    depth = 1
    for bracket in re.finditer(r"[\[\]]", text):
        depth += 1 if bracket.group() == "[" else -1
        if depth == 0:
            return text[: bracket.start()]
    return text[: text.index("]")] if "]" in text else None


def same(key: str, found: str) -> bool:
    """Whether two values are equal: as numbers, as lists item by item, or as text without case, quotes and outer spaces."""
    if len(found) > MAX_VALUE:
        return False
    key, found = _bare(key), _bare(found)
    if key == found:
        return True
    left, right = _number(key), _number(found)
    if left is not None and right is not None:
        return abs(left - right) <= TOLERANCE or left == right
    left_items, right_items = _items(key), _items(found)
    if left_items is None or right_items is None or len(left_items) != len(right_items):
        return False
    return all(_same_item(a, b) for a, b in zip(left_items, right_items, strict=True))


def _same_item(key: str, found: str) -> bool:
    left, right = _number(key), _number(found)
    return key == found or left is not None and right is not None and abs(left - right) <= TOLERANCE


def _bare(text: str) -> str:
    return text.strip().strip('"').strip("'").strip().casefold()


def _number(text: str) -> float | None:
    plain = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    try:
        return float(plain) if "_" not in plain else None
    except ValueError:
        return None


def _items(text: str) -> list[str] | None:
    """The items of a flat list in brackets; None for anything else."""
    if text[:1] + text[-1:] not in ("[]", "()") or len(text) < 2 or re.search(r"[\[\]()]", text[1:-1]):
        return None
    return [_bare(item) for item in text[1:-1].split(",")]


#### As the reference does it


def grade_strict_reference(answer: Answer) -> Grade:
    """The public reference's verdict on the whole transcript: no nested brackets, and text must agree in case."""
    found = search_qa.pairs(answer.transcript, "<Answer>", "</Answer>")
    if not found:
        return Grade(0.0, False, "unformatted")
    stated = dict(_SHORT_FIELD.findall(found[-1], 0, found[-1].rfind("]") + 1))  # the bound keeps it linear
    key: Sequence[tuple[str, Any]] = [(str(name), value) for name, value in answer.ground_truth]
    if not all(name in stated for name, _ in key):
        return Grade(0.0, False, "partial", found[-1].strip()[:200])
    right = all(_equal(str(value), stated[name]) for name, value in key)
    return Grade(float(right), True, "right" if right else "wrong", found[-1].strip()[:200])


def _equal(key: str, found: str) -> bool:
    if key.strip().strip('"').strip("'") == found.strip().strip('"').strip("'"):
        return True
    try:
        return abs(float(key) - float(found)) < TOLERANCE
    except ValueError:
        return False
