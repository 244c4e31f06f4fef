"""The grader of boxed answers: MATH, AIME24, AMC, Minerva, OlympiadBench.

The last box of the response counts; boxes joined to it by commas or "and" make a list with it. The boxed answer is compared by
type and value (see `compare`); notation that our own parser doesn't know is left to math-verify. All sources are exact but
Minerva, whose keys are measured numbers: they match within half a unit of their last written digit.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Sequence

from deepgrpo.rewards import compare, latex, sympy_reader
from deepgrpo.rewards.answer import Answer, own_words, usable_keys
from deepgrpo.rewards.expression import TooComplex
from deepgrpo.types import Grade

MEASURED = frozenset({"Minerva"})  # sources whose keys are measured numbers
MAX_FALLBACK = 300  # characters that math-verify may see
_OPEN_ENDED = re.compile(r"\\(?:sum|prod|int|iint|oint|lim)(?![A-Za-z])")
_HUGE = re.compile(
    r"\d{40}|\^\s*\{?\s*[-+]?\d{4}|\^[^+\-=,]*\^[^+\-=,]*\^|\*\*.*\*\*|\d{4}\s*\)?\s*!|(?:binom|choose)[^+=]{0,60}\d{3}"
)
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")


def grade(answer: Answer) -> Grade:
    """Returns 1 if the last box says the same as one of the keys, else 0; no verdict where the row has no usable key."""
    return verdict(answer, latex.last_boxes(own_words(answer.response)))


def verdict(answer: Answer, boxes: Sequence[str] | None) -> Grade:
    """Returns the grade of a final statement: one box, or the boxes of a list. Without a box nothing is stated."""
    text = ",".join(boxes or ()).strip()
    if not text.strip(", ") or (len(text) < 40 and not latex.canonical(latex.clean(text)).strip(",")):
        return Grade(0.0, False, "unformatted")
    # A key may be a whole solution; the word None is what a broken extraction leaves behind.
    keys = [(latex.last_boxes(key) or [key])[-1].strip() if "\\boxed" in key else key for key in usable_keys(answer.ground_truth)]
    if not (keys := [key for key in keys if key not in ("", "None")]):
        return Grade(None, True, "bad_key", text[:200])
    rules = compare.Rules(
        measured=answer.data_source in MEASURED,
        free_constant=bool(re.search(r"differential|general solution|integral|constant|\\int|\by'", answer.question)),
        bases=bool(re.search(r"\bbase\b|binary|octal|hexadecimal", answer.question)),
        fallback=by_math_verify,
    )
    if sum(map(len, boxes)) > latex.MAX_RAW:
        return Grade(0.0, True, "too_long", text[:200])
    reason = _reason(text if len(boxes) > 1 else boxes[0], tuple(keys), rules)
    return Grade(float(reason == "right"), True, reason, text[:200])


@functools.lru_cache(maxsize=4096)  # the rollouts of a prompt repeat their answers
def _reason(text: str, keys: tuple[str, ...], rules: compare.Rules) -> str:
    reason = "wrong"
    for key in keys:
        try:
            if compare.same(key, text, rules):
                return "right"
        except TooComplex:
            reason = "too_complex"
    return reason


#### Declared answers

_DECLARED = re.compile(
    r"\b(?:answer|result|solution|value)\b[^.\n$\\]{0,60}?(?:\bis\b|\bequals\b|=|:)\s*(?::\s*)?(.+)", re.IGNORECASE
)
_SENTENCE = re.compile(r"[.;!?](?:\s|$)|\n")


def grade_declared(answer: Answer) -> Grade:
    """Returns 1 if the boxed answer, or without a box the one that the last sentence declares, says the same as a key.

    This is DeepScaleR's grader. A number that is merely mentioned is no answer, unlike in the reference, where the last formula
    of the transcript counts.
    """
    text = own_words(answer.response)
    if latex.boxes(text) or "\\boxed" in text:
        return grade(answer)
    declared = declared_answer(text)
    if declared is None:
        return Grade(0.0, False, "unformatted")
    return grade(dataclasses.replace(answer, response=f"\\boxed{{{declared}}}"))


def declared_answer(text: str) -> str | None:
    """Returns what the last sentence of the kind "Hence the answer is $\\frac12$." names, without its dollar signs."""
    found = list(_DECLARED.finditer(text))
    if not found:
        return None
    rest = re.sub(r"\*\*|__", "", found[-1][1]).strip()
    formula = re.match(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", rest)
    if formula:
        return next(group for group in formula.groups() if group is not None).strip()
    return _SENTENCE.split(rest)[0].strip() or None


#### math-verify


def by_math_verify(key: str, answer: str) -> bool:
    """Returns whether math-verify takes two pieces of LaTeX for equal. Only for notation that `expression` doesn't know.

    It runs bounded: short text, the same variables on both sides, no sums, integrals, towers or huge numbers that its algebra
    could get lost in. What is left is the deadline's business; its own alarms, which need a main thread, are off.
    """
    if len(answer) > MAX_FALLBACK or answer.count("{") > 40 or set(_LETTERS.findall(key)) != set(_LETTERS.findall(answer)):
        return False
    if _HUGE.search(answer) or set(_OPEN_ENDED.findall(answer)) - set(_OPEN_ENDED.findall(key)):
        return False
    verify = math_verify()
    config = [verify.LatexExtractionConfig(boxed_match_priority=0), verify.ExprExtractionConfig()]
    left, right = (
        verify.parse(f"${text}$", config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
        for text in (key, answer)
    )
    return bool(left) and bool(right) and verify.verify(left, right, timeout_seconds=None)


@functools.cache
def math_verify():
    """Imports math-verify when it is first wanted: it brings sympy, which takes a second."""
    sympy_reader.install()
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


warm_up = math_verify  # what a worker calls before it is ready
