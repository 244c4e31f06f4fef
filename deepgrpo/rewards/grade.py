"""Which grader marks which data source, and the rules that hold for all of them.

Only what the student wrote in this response can earn a reward: a right answer in its prompt or in a locked prefix earns nothing.
(Graders that check every step read prefix and response as one text, and still give 0 for an empty response. The reference's own
graders, `rewards.grader=compat_*`, read the whole transcript.) A response that the length limit cut off is wrong, whatever it
says.

To add a source: write a module with `grade(answer) -> Grade`, and enter it in GRADERS; or leave this file alone and name it in
the configuration, rewards.graders=("SOURCE=my_package.my_module:grade",). A grader may be a coroutine function; a module's
`warm_up()`, if it has one, runs before its worker is ready.
"""

import asyncio
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Iterable

from deepgrpo.rewards import weighted
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.rubric import DEFAULT, Rubric, resolve
from deepgrpo.types import Grade

__all__ = ["GRADERS", "STEP_CHECKING", "Answer", "Grader", "Rubric", "check_sources", "grade", "leaks_answer", "rubric_of"]

BOX = r"\\(?:boxed|fbox)(?![A-Za-z])|<answer>"
NUMBER = r"#{3,}|\\boxed(?![A-Za-z])|\banswer(?:\s+is\b|\s*:)|<answer>"
TAGS = r"<answer>"
ANY = f"{BOX}|{NUMBER}"


@dataclasses.dataclass(frozen=True)
class Grader:
    """An entry of GRADERS.

    path: "module:function", imported when it is first needed.
    leaks: pattern of a text that states a final answer or begins to: no locked prefix may hold one.
    family: "boxed", "number" or "formula" if `rewards.grader` and `rewards.extract` apply.
    checks_steps: its grades carry `right_prefix`.
    seconds: deadline of an answer, where rewards.deadline is too short for what it does.
    waits: it spends its time waiting for others (a judge, a program that it runs): graded in workers of their own.
    """

    path: str
    leaks: str
    family: str = ""
    checks_steps: bool = False
    seconds: float | None = None
    waits: bool = False


GRADERS: dict[str, Grader] = {
    "GSM8K": Grader("deepgrpo.rewards.gsm8k:grade", NUMBER, "number"),
    **dict.fromkeys(
        ("MATH", "DigitalLearningGmbH/MATH-lighteval", "AIME24", "AMC", "Minerva", "OlympiadBench"),
        Grader("deepgrpo.rewards.math:grade", BOX, "boxed"),
    ),
    "DeepScaleR": Grader("deepgrpo.rewards.deepscaler:grade", f"{BOX}|{NUMBER}", "formula"),
    "carry_chain": Grader("deepgrpo.rewards.carry_chain:grade", "####", checks_steps=True),
    "arithmetic": Grader("deepgrpo.rewards.arithmetic:grade", "####", checks_steps=True),
}

STEP_CHECKING = frozenset(source for source, grader in GRADERS.items() if grader.checks_steps)


#### Configuration


def rubric_of(rewards) -> Rubric:
    """The rubric of a configuration's `rewards` section, with every function that it names imported.

    Raises:
      SystemExit: an entry is malformed or names something that can't be imported; says which, and why.
    """
    rubric = Rubric.from_config(rewards)
    try:
        weighted.extra_rewards(rubric)
        for source, path in rubric.own_graders().items():
            try:
                resolve(path)
            except ValueError as error:
                raise ValueError(f"rewards.graders: {source}: {error}") from error
    except ValueError as error:
        raise SystemExit(f"configuration error: {error}") from error
    return rubric


def grader_of(source: str, rubric: Rubric) -> Grader:
    """The entry that grades a source.

    Raises:
      KeyError: there is none.
    """
    own = rubric.own_graders().get(source)
    return GRADERS[source] if own is None else dataclasses.replace(GRADERS.get(source, Grader("", ANY)), path=own, family="")


def check_sources(sources: Iterable[str], rubric: Rubric = DEFAULT) -> None:
    """Refuses data sources without a grader, before anything starts.

    Raises:
      ValueError: names the unknown sources and the known ones.
    """
    if unknown := sorted(set(sources) - GRADERS.keys() - rubric.own_graders().keys()):
        raise ValueError(
            f"no grader for data_source {', '.join(map(repr, unknown))}; known: {', '.join([*GRADERS, *rubric.own_graders()])}. "
            "Correct the data set's data_source column, add a grader to deepgrpo/rewards/grade.py, or name yours: "
            'rewards.graders=("SOURCE=package.module:function",)'
        )


def prepare(sources: Iterable[str], rubric: Rubric) -> None:
    """Imports what the graders of `sources` need, so that the first answer of each does not pay for it."""
    weighted.extra_rewards(rubric)
    for grader in {grader_of(source, rubric) for source in sources}:
        module = sys.modules[resolve(grader.path).__module__]
        if warm_up := getattr(module, "warm_up", None):
            warm_up()
        if grader.family and rubric.grader != "typed":
            from deepgrpo.rewards import strict

            strict.warm_up()


#### Grading


def grade(answer: Answer, rubric: Rubric = DEFAULT) -> Grade:
    """Grades in this process, without a deadline: what a grading worker runs. Everyone else uses `service.GradingService`.

    Raises:
      ValueError: unknown data source, or a finish reason that isn't graded.
    """
    check_sources([answer.data_source], rubric)
    return weighted.total(_task_grade(answer, rubric), answer, rubric.weight, _extras(rubric))


_extras = functools.cache(weighted.extra_rewards)


def _task_grade(answer: Answer, rubric: Rubric) -> Grade:
    grader = grader_of(answer.data_source, rubric)
    if answer.finish_reason == "length":
        return Grade(0.0, False, "truncated", right_prefix=0 if grader.checks_steps else None)
    if answer.finish_reason != "stop":
        raise ValueError(f"finish_reason {answer.finish_reason!r} is not graded; expected 'stop' or 'length'")
    if grader.family and rubric.grader != "typed":
        return _compatible(answer, grader, rubric)
    if grader.family and rubric.extract != "default":
        return _extracted(answer, grader, rubric.extract)
    result = resolve(grader.path)(answer)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    return result if isinstance(result, Grade) else _from_number(result, answer.data_source)


def _from_number(value: object, source: str) -> Grade:
    """A user's grader may return a plain number."""
    reward = weighted.as_reward(value, source)
    return Grade(reward, True, "no_verdict" if reward is None else "right" if reward > 0 else "wrong")


def _compatible(answer: Answer, grader: Grader, rubric: Rubric) -> Grade:
    from deepgrpo.rewards import strict

    if rubric.extract.startswith("answer_tag"):
        return strict.grade_tagged(answer, rubric.grader, lenient=rubric.extract == "answer_tag_lenient")
    if grader.family == "number":
        return strict.grade_gsm8k(answer, only_mark=rubric.extract == "mark")
    return strict.grade_formula(answer) if grader.family == "formula" else strict.grade_boxed(answer, rubric.grader)


def _extracted(answer: Answer, grader: Grader, extract: str) -> Grade:
    """The typed graders on an answer that stands elsewhere than the source's own rule has it."""
    from deepgrpo.rewards import answer_tags, gsm8k, latex, math

    if extract == "mark":
        return gsm8k.grade(answer, only_mark=True) if grader.family == "number" else resolve(grader.path)(answer)
    text = answer_tags.inside(answer, lenient=extract == "answer_tag_lenient")
    if text is None:
        return Grade(0.0, False, "unformatted")
    if grader.family == "number":
        return gsm8k.grade(dataclasses.replace(answer, response=text))
    return math.verdict(answer, latex.last_boxes(text) if "\\boxed" in text else [text])


#### Locked prefixes


def leaks_answer(data_source: str, text: str) -> bool:
    """Whether `text` (a locked prefix) already states a final answer, or has begun to: a state that starts from it is worthless.

    Sources with a grader of the user's own are judged by every mark of a final answer that any grader here knows.
    """
    grader = GRADERS.get(data_source)
    return _pattern(grader.leaks if grader else ANY).search(text) is not None


@functools.cache
def _pattern(leaks: str) -> re.Pattern:
    return re.compile(leaks, re.IGNORECASE)
