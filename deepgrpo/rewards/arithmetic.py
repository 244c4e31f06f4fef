"""The step-checking grader of sums of several numbers, added from left to right: `a + b + c = ?`.

    4 + 5 + 3 = ?    ->    4 + 5 = 9\\n9 + 3 = 12\\n#### 12

There is one right text, but for spaces. The locked prefix and the response are checked as one text, so every line counts.
"""

import re
from collections.abc import Sequence

from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

_TOKEN = re.compile(r"\d+|\n|#+|[^\s\d]")


def solution(numbers: Sequence[int]) -> str:
    """The right text for the sum of `numbers` (two or more)."""
    total, lines = numbers[0], []
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return "\n".join([*lines, f"#### {total}"])


def grade(answer: Answer) -> Grade:
    """1 if every line and the final answer are right. `right_prefix`: the response's characters before the first wrong token."""
    text = answer.prefix + own_words(answer.response)
    if not own_words(answer.response).strip():
        return Grade(0.0, False, "empty", right_prefix=0)
    expected = _TOKEN.findall(solution([int(n) for n in re.findall(r"\d+", answer.question)]))
    right_until = matched = 0
    tokens = list(_TOKEN.finditer(text.rstrip()))
    for token, wanted in zip(tokens, expected, strict=False):
        if token.group() != wanted:
            break
        right_until, matched = token.end(), matched + 1
    final = re.search(r"####\s*(\d+)", text)
    right = matched == len(expected) == len(tokens)
    reason = "right" if right else "wrong" if final else "unformatted"
    return Grade(float(right), bool(final), reason, final.group(1) if final else "", max(0, right_until - len(answer.prefix)))
