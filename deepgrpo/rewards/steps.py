"""The graders that check every step: sums of several numbers, and the carry-chain task.

    4 + 5 + 3 = ?               ->    4 + 5 = 9\\n9 + 3 = 12\\n#### 12
    37;4821=?                   ->    a37?81\\nb81?05\\n...\\nj60?44\\n####44
    57a6b9c8d7e9f6g8h7i9j6=?    ->    a+6=63\\nb+9=72\\n...\\nj+6=32\\n####32

A question has one right text, so that checking every step is comparing with it. The locked prefix and the response are checked as
one text. `deepgrpo.data.carry_chain` makes its questions and its faulty solutions on top of the arithmetic here.
"""

import functools
import os.path
import re
import zlib
from collections.abc import Sequence

import numpy as np

from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

#### Sums


def sum_solution(numbers: Sequence[int]) -> str:
    """Returns the right text for the sum of two or more `numbers`, added from left to right."""
    total, lines = numbers[0], []
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return "\n".join([*lines, f"#### {total}"])


_TOKEN = re.compile(r"\d+|\n|#+|[^\s\d]")


def grade_sum(answer: Answer) -> Grade:
    """Returns 1 if every line and the final answer are right, whatever the spaces are."""
    tokens = list(_TOKEN.finditer((answer.prefix + own_words(answer.response)).rstrip()))
    expected = _TOKEN.findall(sum_solution([int(n) for n in re.findall(r"\d+", answer.question)]))
    matched = len(os.path.commonprefix([[token.group() for token in tokens], expected]))
    right_until = tokens[matched - 1].end() if matched else 0
    return _grade(answer, matched == len(expected) == len(tokens), right_until, r"####\s*(\d+)")


#### Carry chains

MODULUS = 100
MARKER = "####"  # before the final answer
QUESTION = re.compile(r"(\d\d)((?:[a-p]\d)+)=\?")


def parse(question: str) -> tuple[int, list[tuple[str, int]]]:
    """Returns the start value and the labelled operands in order.

    Raises:
      ValueError: the text is not a carry-chain question.
    """
    match = QUESTION.fullmatch(question)
    if match is None:
        raise ValueError(f"not a carry_chain question: {question!r}; expected two digits, pairs of letter and digit, then '=?'")
    pairs = match[2]
    return int(match[1]), [(pairs[i], int(pairs[i + 1])) for i in range(0, len(pairs), 2)]


def running_sums(question: str) -> list[str]:
    """Returns the value after each step, with two digits each."""
    value, steps = parse(question)
    sums = []
    for _, operand in steps:
        value = (value + operand) % MODULUS
        sums.append(f"{value:02d}")
    return sums


def written(steps: list[tuple[str, int]], sums: list[str]) -> str:
    """Returns the text of a solution that reaches the given values."""
    lines = [f"{letter}+{operand}={value}\n" for (letter, operand), value in zip(steps, sums, strict=True)]
    return "".join(lines) + MARKER + sums[-1]


def solution(question: str) -> str:
    """Returns the one right answer text, as the rule-based teacher writes it."""
    return written(parse(question)[1], running_sums(question))


def grade_carry_chain(answer: Answer) -> Grade:
    """Returns 1 if every step and the final value are right, and nothing follows.

    Raises:
      ValueError: the question is not a carry chain, or the row's key is not its final value.
    """
    text, expected = answer.prefix + own_words(answer.response), solution(answer.question)
    if own_words(answer.response) and not expected.endswith(MARKER + answer.ground_truth):
        raise ValueError(
            f"{answer.question}: ground truth is {answer.ground_truth!r}, but the solution ends in {expected[-2:]!r}"
        )
    return _grade(answer, text == expected, len(os.path.commonprefix([text, expected])), MARKER + r"(\d\d)")


#### Lookup chains: a value, ten times replaced by what a hidden table says. Only an environment knows the table

LOOKUPS = 10
LABELS = "abcdefghij"
LOOKUP_QUESTION = re.compile(r"(\d\d);(\d{4})=\?")


@functools.lru_cache(maxsize=4096)
def hidden_table(question: str) -> tuple[int, ...]:
    """Where each of 0..99 leads: a permutation, a pure function of the question, so that a wrong value never becomes right.

    Raises:
      ValueError: the text is not a lookup-chain question.
    """
    if LOOKUP_QUESTION.fullmatch(question) is None:
        raise ValueError(f"not a lookup_chain question: {question!r}; expected two digits, ';', four digits, '=?'")
    return tuple(np.random.default_rng(zlib.crc32(question.encode())).permutation(MODULUS).tolist())


def looked_up(question: str) -> list[str]:
    """Returns the start value and the value after each look-up, with two digits each."""
    values, table = [int(question[:2])], hidden_table(question)
    for _ in range(LOOKUPS):
        values.append(table[values[-1]])
    return [f"{value:02d}" for value in values]


def lookup_solution(question: str) -> str:
    """Returns the right text that asks each time, with what the environment answers."""
    values = looked_up(question)
    lines = [f"{label}{a}?{b}\n" for label, a, b in zip(LABELS, values, values[1:], strict=False)]
    return "".join(lines) + MARKER + values[-1]


def grade_lookup_chain(answer: Answer) -> Grade:
    """Returns 1 if every value and the final one are right, whether asked for or guessed, and nothing follows."""
    before = "".join(text for _, text in answer.prefix_parts) or answer.prefix
    now = "".join(text for _, text in answer.parts) or own_words(answer.response)
    told, expected = (before + now).replace(":", "?"), lookup_solution(answer.question)  # a right guess is right
    right_until = len(os.path.commonprefix([told, expected])) - len(before) + len(answer.prefix)
    return _grade(answer, told == expected, right_until, MARKER + r"(\d\d)")


def _grade(answer: Answer, right: bool, right_until: int, final_mark: str) -> Grade:
    """Returns the grade of a text that is right in its first `right_until` characters, the locked prefix included."""
    if not own_words(answer.response).strip():
        return Grade(0.0, False, "empty", right_prefix=0)
    final = re.search(final_mark, answer.prefix + own_words(answer.response))
    reason = "right" if right else "wrong" if final else "unformatted"
    return Grade(float(right), bool(final), reason, final[1] if final else "", max(0, right_until - len(answer.prefix)))
