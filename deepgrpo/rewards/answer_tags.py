"""Answers between R1-style tags: `<think> ... </think> <answer> ... </answer>`.

Strict, as Dr. GRPO's r1 template is scored: the text must hold exactly `</think> <answer>`, and `</answer>`. Lenient: both answer
tags, anywhere. What the last pair encloses is the answer, or the box in it if there is one. The opening tag must be the student's
own; the thoughts that close before it may have begun in a locked prefix.
"""

import re

from deepgrpo.rewards.answer import Answer, own_words


def inside(answer: Answer, lenient: bool) -> str | None:
    """Text of the final answer, or None if the response isn't in the format."""
    text = answer.prefix + own_words(answer.response)
    start = text.rfind("<answer>")
    end = text.find("</answer>", start)
    if start < len(answer.prefix) or end < 0 or not (lenient or "</think> <answer>" in text):
        return None
    return re.sub(r"\s+", " ", text[start + len("<answer>") : end]).strip()
