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
    validation: the answer is scored for a report, not for training; some sources then leave bonuses out.
    prompt: all the text that the engine was given, chat markers and locked prefix included; "" where only the question is known.
    ending: text of the sampled end-of-turn token, which `response` is without.
    """

    data_source: str
    question: str
    prefix: str
    response: str
    finish_reason: str
    ground_truth: Any
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    validation: bool = False
    prompt: str = ""
    ending: str = ""

    @property
    def transcript(self) -> str:
        """Prompt and response as one text, which is what the public reference grades. Everyone else should not."""
        return (self.prompt or self.question + "\n" + self.prefix) + self.response + self.ending


def own_words(text: str) -> str:
    """`text` up to its first end-of-turn token: what follows belongs to nobody."""
    end = END_OF_TURN.search(text)
    return text[: end.start()] if end else text
