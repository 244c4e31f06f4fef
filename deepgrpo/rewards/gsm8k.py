"""The grader of GSM8K: one number.

Where it stands, in this order: after the last `####` mark, in the last box, after the last "answer is", or last in the text (see
`marks`). A mark without a number is no answer; marks or boxes that name different numbers are hedging and wrong. Hours with
minutes, dollars with cents and their like are one number, in either unit.
"""

import re
from fractions import Fraction

from deepgrpo.rewards import latex
from deepgrpo.rewards.answer import HASHES, SAID, Answer, own_words
from deepgrpo.rewards.latex import COMPOUND, compound
from deepgrpo.types import Grade

MAX_DIGITS = 40  # of a number; no count of anything in a word problem is longer

_MARK = re.compile(rf"(?P<mark>{HASHES})[^\S\n]*(?:\n\s*(?=[-+$*\\]*\d))?(?P<stated>[^\n#]*)", re.IGNORECASE)
_ANSWER_IS = re.compile(rf"{SAID}(?=([^\n]*))", re.IGNORECASE)
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,]?\d)")
_NUMBER = re.compile(
    r"(?=[-+]?\s{0,3}\.?\d)(?P<sign>[-+]\s*)?(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<decimals>\.\d+)?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,2})(?!\d))?(?:\s?/\s?(?P<below>[1-9]\d{0,39})(?!\d|\.\d))?"
    r"(?:\s?(?P<scale>thousand|million|billion)\b)?"
)
_MINUEND = re.compile(r"[\d)%]\s*$|\w$|(?<![A-Za-z])[A-Za-z]\s+$")  # before a minus that subtracts
_BULLET = re.compile(r"[\w\n]\s*$")  # before a minus with a space behind it
_SCALES = {None: 1, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def grade(answer: Answer, only_mark: bool = False) -> Grade:
    """Returns 1 if the final number of the response equals the key. only_mark: there is no answer without a `####` mark."""
    text = own_words(answer.response)
    stated, reason = final_number(text) if not only_mark or _marks(latex.clean_lines(text)) else ((), "unformatted")
    if not stated:
        return Grade(0.0, False, reason)
    right = numbers(str(answer.ground_truth))[-1] in stated
    written = str(stated[0] if stated[0].denominator < 10**4 else float(stated[0]))
    return Grade(float(right), True, "right" if right else "wrong", written)


def final_number(text: str) -> tuple[tuple[Fraction, ...], str]:
    """Returns the number that a response settles on, in each of its units; or nothing, and the reason why."""
    text = latex.clean_lines(text)
    if marked := _marks(text):
        stated = [_first(mark) for mark in marked]
        named = {side[0] for part in re.split(r"\bor\b", marked[-1]) if (side := numbers(part))}
        if stated[-1] and (len(set(stated) - {()}) > 1 or len(named) > 1):
            return (), "hedge"
        return stated[-1], "unformatted"
    if boxes := latex.last_boxes(text):
        stated = [_first(box) for box in boxes]
        return ((), "hedge") if len(set(stated)) > 1 else (stated[-1], "unformatted")
    if (said := _ANSWER_IS.findall(text)) and (number := _first(said[-1])):
        return number, ""
    last = list(COMPOUND.finditer(text))[-1:]
    if last and not re.search(r"\d", text[last[0].end() :]) and (values := compound(last[0])):
        return tuple(values.values()), ""
    return tuple(numbers(text)[-1:]), "unformatted"


def _marks(text: str) -> list[str]:
    """Returns what stands behind each mark of a final answer; behind the exact marks, if there are any."""
    found = [(match["mark"], match["stated"]) for match in _MARK.finditer(text)]
    return [stated for mark, stated in found if mark == "####"] or [stated for _, stated in found]


def _first(text: str) -> tuple[Fraction, ...]:
    """Returns the first number of a final statement; of an equation, the side that is one number, or else the last side."""
    text = _SPACED.sub(lambda m: m.group().replace(" ", ""), text)  # 70 000
    if (match := COMPOUND.search(text)) and not re.search(r"\d", text[: match.start()]) and (values := compound(match)):
        return tuple(values.values())
    sides = [numbers(side) for side in text.split("=")]
    if len(sides) > 1 and len(sides[0]) != 1:
        return tuple(sides[-1][:1])
    return next((tuple(side[:1]) for side in sides if side), ())


def numbers(text: str) -> list[Fraction]:
    """Returns all numbers in `text`, in order, with commas, signs, simple fractions, powers of ten and scale words."""
    found = []
    for match in _NUMBER.finditer(text):
        digits, decimals = match["digits"] or "", match["decimals"] or ""
        if not digits + decimals or len(digits + decimals) > MAX_DIGITS:
            continue
        sign, before = match["sign"] or "", text[max(0, match.start() - 12) : match.start()]
        minus = sign[:1] == "-" and not _MINUEND.search(before) and not (sign[1:] and _BULLET.search(before))
        value = Fraction((digits.replace(",", "") or "0") + decimals) * Fraction(10) ** int(match["exponent"] or 0)
        value = value * _SCALES[match["scale"]] / int(match["below"] or 1)
        found.append(-value if minus else value)
    return found
