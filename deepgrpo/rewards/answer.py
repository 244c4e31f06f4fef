"""What a grader sees. It lives below the graders, so that `grade` may import them all."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end_of_text|end)\|>|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>")


@dataclasses.dataclass(frozen=True)
class Answer:
    """One response of the student, with its context.

    data_source: picks the grader.
    question: the user's text.
    prefix: text of the locked prefix: the model's earlier words, context only.
    response: what the student wrote now; the only part that can earn a reward.
    finish_reason: "stop" or "length".
    ground_truth: the row's key, JSON-serialisable.
    extra: further columns of the row, JSON-serialisable.
    """

    data_source: str
    question: str
    prefix: str
    response: str
    finish_reason: str
    ground_truth: Any
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def own_words(text: str) -> str:
    """`text` up to its first end-of-turn token: what follows belongs to nobody."""
    end = END_OF_TURN.search(text)
    return text[: end.start()] if end else text
