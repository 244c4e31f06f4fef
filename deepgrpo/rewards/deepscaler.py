"""The grader of DeepScaleR: boxed answers, compared as for MATH; without a box, what the last sentence declares to be the answer.

A number that is merely mentioned is no answer, unlike in the reference, where the last formula of the transcript counts.
"""

import dataclasses
import re

from deepgrpo.rewards import latex, math
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

_DECLARED = re.compile(
    r"\b(?:answer|result|solution|value)\b[^.\n$\\]{0,60}?(?:\bis\b|\bequals\b|=|:)\s*(?::\s*)?(.+)", re.IGNORECASE
)
_SENTENCE = re.compile(r"[.;!?](?:\s|$)|\n")


def grade(answer: Answer) -> Grade:
    """1 if the boxed, else the declared, answer says the same as one of the keys."""
    text = own_words(answer.response)
    if latex.boxes(text) or "\\boxed" in text:
        return math.grade(answer)
    declared = declared_answer(text)
    if declared is None:
        return Grade(0.0, False, "unformatted")
    return math.grade(dataclasses.replace(answer, response=f"\\boxed{{{declared}}}"))


def declared_answer(text: str) -> str | None:
    """`\\frac12` of "Hence the answer is $\\frac12$.": what the last such sentence names, without its dollar signs."""
    found = list(_DECLARED.finditer(text))
    if not found:
        return None
    rest = re.sub(r"\*\*|__", "", found[-1][1]).strip()
    formula = re.match(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", rest)
    if formula:
        return next(group for group in formula.groups() if group is not None).strip()
    return _SENTENCE.split(rest)[0].strip() or None
