"""Answers between R1-style tags: `<think> ... </think> <answer> ... </answer>`.

Strict, as Dr. GRPO's r1 template is scored: the text must hold exactly `</think> <answer>`, and `</answer>`. Lenient: both answer
tags, anywhere. What a pair encloses is the answer, or the box in it if there is one; pairs that differ are hedging. The opening
tag must be the student's own; the thoughts that close before it may have begun in a locked prefix.
"""

from deepgrpo.rewards import marks
from deepgrpo.rewards.answer import Answer, own_words


def inside(answer: Answer, lenient: bool) -> list[str]:
    """Text of each answer pair behind the thoughts, without repetitions; empty if the response isn't in the format."""
    text = answer.prefix + own_words(answer.response)
    if not (lenient or "</think> <answer>" in text):
        return []
    own = text[len(answer.prefix) :]
    for part in (own.rpartition("</think>")[2], own):
        pieces = part.split("</answer>")
        found = [piece.rpartition("<answer>")[2] for piece in pieces[:-1] if "<answer>" in piece]
        if found and "<answer>" not in pieces[-1]:
            return list(dict.fromkeys(" ".join(text.split()) for text in found[-marks.MAX_STATED :]))
    return []
