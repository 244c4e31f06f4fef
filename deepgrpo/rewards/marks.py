"""The marks of a final answer: what graders find it by, and what no locked prefix may hold.

Boxes, `####`, answer tags, and "answer is VALUE". A heading ("### Step 1"), a plan ("the answer: we add") and a name ("the answer
is $x$, say") state nothing.
"""

import dataclasses
import re
from collections.abc import Iterable

from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])"
TAG = r"<\s*/?\s*answer\b"
_HEADING = (
    r"(?:step|part|case|section|phase|given|solution|approach|explanation|first|next|then|let|calculat|comput|find|determin|"
    r"identify|understand|analy[sz]|add|subtract|multipl|divid|convert|check|verif)"
)
_WRAP = r"[\s*$~=({\[\"'`_]"
_NUMBER = rf"{_WRAP}{{0,20}}(?:\\boxed|[-+]?[\s$]{{0,3}}\.?\d)(?!\d{{0,3}}[.):]\s+[A-Za-z])"  # "### 2. Add them" is a heading
HASHES = rf"(?<!#)####(?!#)(?!{_WRAP}{{0,20}}{_HEADING})|(?<!#)#{{3,}}(?=[^\S\n]*\n?{_NUMBER})"
_IS = r"\banswer\b[*_]{0,3}(?:\s{1,3}(?:is|was|equals)\b|\s{0,3}[:=])"
_FILLER = (
    r"(?:[\s:=~$*_(\[{|\"`]|\\[(\[{]|\\left\b|therefore\b|thus\b|then\b|just\b|simply\b|exactly\b|about\b|"
    r"approximately\b|equal to\b|\\(?:text|mathbf|textbf|mathrm)\{|(?:option|choice)\b|\\?[a-z]+\s?=(?!=))*+"
)
_VALUE = (
    r"(?:[-+]?\s?(?:[\u20ac\u00a3]|\\\$)?\.?\d|[-+]?[a-z]{0,2}\\(?:[dt]?frac|sqrt|pi|infty|emptyset|varnothing|begin|binom)|"
    r"(?-i:[A-J])(?=[).,;:}*\s]*(?:[\n).}*]|$))|[a-z]\s?[-+*/^](?:[a-z](?![a-z])|[-+*/^(){} ]){0,20}\d)"
)
SAID = rf"{_IS}(?={_FILLER}{_VALUE})"  # in front of a value
BEGUN = rf"{_IS}{_FILLER}(?:\\[a-z]*)?\Z"  # the value is about to come
FINAL = r"\bfinal answer\b[*_]{0,3}(?:\s{1,3}is\b|\s{0,3}:)[\s*_]{0,5}(?:[^\W\d_]+[ \-]?){1,3}(?:[.!*_]|\n|\Z)"  # a word or two
DECLARED = f"{SAID}|{BEGUN}|{FINAL}"

# What is one mark or one word: a prefix that ends inside of one leaves it to the response.
_UNIT = re.compile(
    rf"{_IS}|\\[A-Za-z]+\s*\{{?|\\.|#+|<[\s/]*[A-Za-z]*\s*>?|@\w*\[?|(?<![\w)])[-+\u2212]?\d(?:,?\d)*(?:\.\d+)?|\d(?:,?\d)*(?:\.\d+)?|[^\W\d_]+|```\w*|\*+",
    re.IGNORECASE,
)
MAX_STATED = 20  # final answers of a response that are looked at
_WINDOW = 300  # characters of a prefix's last line that are looked at


def worst(grades: Iterable[Grade]) -> Grade:
    """The grade of a response that states final answers with these grades: one that is wrong is hedging, a repetition is not."""
    return min(grades, key=lambda grade: grade.reward or 0.0, default=Grade(0.0, False, "unformatted"))


def whole(answer: Answer) -> Answer:
    """`answer` with the boundary of locked prefix and response moved to the front of the mark, word or number that it cuts.

    So `The answer is \\` + `boxed{42}` says what the whole says. A mark that the prefix holds complete stays there, and earns
    nothing.
    """
    end = len(answer.prefix)
    unit = unit_at(answer.prefix + own_words(answer.response), end)
    if unit is None:
        return answer
    prefix, begun = answer.prefix[: unit[0]], answer.prefix[unit[0] :]
    return dataclasses.replace(answer, prefix=prefix, response=begun + answer.response, prompt=answer.prompt.removesuffix(begun))


def unit_at(text: str, place: int) -> tuple[int, str] | None:
    """The mark, word or number that a place in a text is inside of: where it begins, and what it is."""
    start = max(text.rfind("\n", 0, place) + 1, place - _WINDOW)
    for unit in _UNIT.finditer(text, start, place + _WINDOW):
        if unit.start() < place < unit.end():
            return unit.start(), unit.group()
        if unit.end() >= place:
            break
    return None
