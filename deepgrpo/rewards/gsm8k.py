"""The grader of GSM8K: one number.

Where it stands, in this order: after the last `####` mark, in the last box, after the last "answer is", or last in the text. A
mark without a number is no answer; marks or boxes that name different numbers are hedging and wrong. More or fewer `#` are a mark
only right before a number: they are headings otherwise, as are steps ("#### Step 2").
"""

import re
from fractions import Fraction

from deepgrpo.rewards import latex
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

MAX_DIGITS = 40  # of a number; no count of anything in a word problem is longer

_MARK = re.compile(r"(?P<mark>#{3,})[^\S\n]*(?:\n\s*(?=[-+$*\\]*\d))?(?P<stated>[^\n#]*)")
_HEADING = re.compile(r"[\s*]*(?:step|part|case|section|phase)\b", re.IGNORECASE)
_STARTS_WITH_NUMBER = re.compile(r"[\s*$~=({\[\"'`]*(?:\\boxed|[-+]?[\s$]*\.?\d)")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,]?\d)")
_ANSWER_IS = re.compile(r"answer(?:\s+is)?\s*:?([^\n]*)", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?=[-+]?\s{0,3}\.?\d)(?P<sign>[-+]\s*)?(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<decimals>\.\d+)?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,2})(?!\d))?(?:\s?/\s?(?P<below>[1-9]\d{0,39})(?!\d|\.\d))?"
    r"(?:\s?(?P<scale>thousand|million|billion)\b)?"
)
_AFTER_NUMBER = re.compile(r"[\w)]\s*$")  # then a minus subtracts
_SCALES = {None: 1, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def grade(answer: Answer, only_mark: bool = False) -> Grade:
    """1 if the final number of the response equals the key as a number. only_mark: without a `####` mark there is no answer."""
    text = own_words(answer.response)
    number, reason = final_number(text) if not only_mark or _marks(latex.clean_lines(text)) else (None, "unformatted")
    if number is None:
        return Grade(0.0, False, reason)
    right = number == numbers(str(answer.ground_truth))[-1]
    return Grade(float(right), True, "right" if right else "wrong", _written(number))


def final_number(text: str) -> tuple[Fraction | None, str]:
    """The number that a response settles on, or None and the reason why there is none."""
    text = latex.clean_lines(text)
    if marks := _marks(text):
        stated = [_first(mark) for mark in marks]
        if stated[-1] is None:
            return None, "unformatted"
        hedges = len({n for n in stated if n is not None}) > 1 or _alternatives(marks[-1])
        return (None, "hedge") if hedges else (stated[-1], "")
    if boxes := latex.last_boxes(text):
        stated = [_first(box) for box in boxes]
        return (None, "hedge") if len(set(stated)) > 1 else (stated[-1], "unformatted")
    if said := _ANSWER_IS.findall(text):
        if (number := _first(said[-1])) is not None:
            return number, ""
    found = numbers(text)
    return (found[-1], "") if found else (None, "unformatted")


def _marks(text: str) -> list[str]:
    """What stands behind each mark of a final answer."""
    found = [(len(match["mark"]), match["stated"]) for match in _MARK.finditer(text)]
    exact = [stated for length, stated in found if length == 4 and not _HEADING.match(stated)]
    return exact or [stated for length, stated in found if length != 4 and _STARTS_WITH_NUMBER.match(stated)]


def _alternatives(text: str) -> bool:
    """Whether a statement names different numbers with "or" between them."""
    sides = [numbers(side) for side in re.split(r"\bor\b", text)]
    return len({side[0] for side in sides if side}) > 1


def _first(text: str) -> Fraction | None:
    """The number that a final statement gives: the first; of an equation, the side that is a lone number, else the last side."""
    text = _SPACED.sub(lambda m: m.group().replace(" ", ""), text)  # 70 000
    sides = [numbers(side) for side in text.split("=")]
    if len(sides) > 1 and len(sides[0]) != 1:
        return sides[-1][0] if sides[-1] else None
    return next((side[0] for side in sides if side), None)


def numbers(text: str) -> list[Fraction]:
    """All numbers in `text`, in order: commas, currency, signs, simple fractions, powers of ten and scale words understood."""
    found = []
    for match in _NUMBER.finditer(text):
        digits, decimals = match["digits"] or "", match["decimals"] or ""
        if not digits + decimals or len(digits + decimals) > MAX_DIGITS:
            continue
        minus = (match["sign"] or " ")[0] == "-" and not _AFTER_NUMBER.search(text[max(0, match.start() - 3) : match.start()])
        value = Fraction((digits.replace(",", "") or "0") + decimals) * Fraction(10) ** int(match["exponent"] or 0)
        value = value * _SCALES[match["scale"]] / int(match["below"] or 1)
        found.append(-value if minus else value)
    return found


def _written(number: Fraction) -> str:
    return str(number) if number.denominator < 10**4 else str(float(number))
