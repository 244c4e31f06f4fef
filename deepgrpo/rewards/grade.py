"""Which grader marks which data source, and the rules that hold for all of them.

Only what the student wrote in this response can earn a reward: a right answer in its prompt or in a locked prefix earns nothing.
(Graders that check every step read prefix and response as one text, and still give 0 for an empty response.) A response that the
length limit cut off is wrong, whatever it says.

To add a source: write a module with `grade(answer) -> Grade`, and enter it in GRADERS.
"""

import re
from collections.abc import Callable, Iterable

from deepgrpo.rewards import arithmetic, carry_chain, gsm8k, math
from deepgrpo.rewards.answer import Answer
from deepgrpo.types import Grade

__all__ = ["GRADERS", "STEP_CHECKING", "Answer", "check_sources", "grade", "leaks_answer"]

GRADERS: dict[str, Callable[[Answer], Grade]] = {
    "GSM8K": gsm8k.grade,
    "MATH": math.grade,
    "DigitalLearningGmbH/MATH-lighteval": math.grade,
    "AIME24": math.grade,
    "AMC": math.grade,
    "Minerva": math.grade,
    "OlympiadBench": math.grade,
    "carry_chain": carry_chain.grade,
    "arithmetic": arithmetic.grade,
}

STEP_CHECKING = frozenset({"carry_chain", "arithmetic"})  # their grades carry `right_prefix`

_LEAKS = {
    math.grade: re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])"),
    gsm8k.grade: re.compile(r"#{3,}|\\boxed(?![A-Za-z])|\banswer(?:\s+is\b|\s*:)", re.IGNORECASE),
    carry_chain.grade: re.compile("####"),
    arithmetic.grade: re.compile("####"),
}


def check_sources(sources: Iterable[str]) -> None:
    """Refuses data sources without a grader, before anything starts.

    Raises:
      ValueError: names the unknown sources and the known ones.
    """
    if unknown := sorted(set(sources) - GRADERS.keys()):
        raise ValueError(
            f"no grader for data_source {', '.join(map(repr, unknown))}; known: {', '.join(GRADERS)}. "
            "Correct the data set's data_source column or add a grader to deepgrpo/rewards/grade.py"
        )


def grade(answer: Answer) -> Grade:
    """Grades in this process, without a deadline: what a grading worker runs. Everyone else uses `service.GradingService`.

    Raises:
      ValueError: unknown data source, or a finish reason that isn't graded.
    """
    check_sources([answer.data_source])
    if answer.finish_reason == "length":
        return Grade(0.0, False, "truncated", right_prefix=0 if answer.data_source in STEP_CHECKING else None)
    if answer.finish_reason != "stop":
        raise ValueError(f"finish_reason {answer.finish_reason!r} is not graded; expected 'stop' or 'length'")
    return GRADERS[answer.data_source](answer)


def leaks_answer(data_source: str, text: str) -> bool:
    """Whether `text` (a locked prefix) already states a final answer, or has begun to: a state that starts from it is worthless.

    Raises:
      ValueError: unknown data source.
    """
    check_sources([data_source])
    return _LEAKS[GRADERS[data_source]].search(text) is not None
