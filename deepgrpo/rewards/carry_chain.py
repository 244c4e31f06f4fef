"""The step-checking grader of the carry-chain task (`deepgrpo.data.carry_chain`).

A question has one right text, so checking every step is comparing with it: the locked prefix and the response, as one text.
"""

import os.path
import re

from deepgrpo.data import carry_chain
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

_FINAL = re.compile(re.escape(carry_chain.MARKER) + r"(\d\d)")


def grade(answer: Answer) -> Grade:
    """1 if every step and the final value are right, and nothing follows. `right_prefix`: characters before the first wrong one.

    Raises:
      ValueError: the question is not a carry chain, or the row's key is not its final value.
    """
    response = own_words(answer.response)
    if not response:
        return Grade(0.0, False, "empty", right_prefix=0)
    solution = carry_chain.solution(answer.question)
    if not solution.endswith(carry_chain.MARKER + answer.ground_truth):
        raise ValueError(
            f"{answer.question}: ground truth is {answer.ground_truth!r}, but the solution ends in {solution[-2:]!r}"
        )
    text = answer.prefix + response
    final = _FINAL.search(text)
    reason = "right" if text == solution else "wrong" if final else "unformatted"
    right_prefix = max(0, _right_characters(text, solution) - len(answer.prefix))
    return Grade(float(text == solution), final is not None, reason, final[1] if final else "", right_prefix)


def depth(question: str, text: str) -> float:
    """The share of the question's steps that `text` (locked prefix included) has right before its first mistake: 0 to 1."""
    solution = carry_chain.solution(question)
    right = solution[: _right_characters(own_words(text), solution)]
    return right.count("\n") / solution.count("\n")


def _right_characters(text: str, solution: str) -> int:
    return len(os.path.commonprefix([text, solution]))
