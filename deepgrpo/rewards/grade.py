"""Which grader marks which data source, and the rules that hold for all of them.

Only what the student wrote in this response can earn a reward: a right answer in its prompt or in a locked prefix earns nothing.
(Graders that check every step read prefix and response as one text, and still give 0 for an empty response. The reference's own
graders, `rewards.grader=compat_*`, read the whole transcript.) A response that the length limit cut off is wrong, whatever it
says.

To add a source: write a module with `grade(answer) -> Grade`, and enter it in GRADERS; or leave this file alone and name it in
the configuration, rewards.graders=("SOURCE=my_package.my_module:grade",). A grader may be a coroutine function; a module's
`warm_up()`, if it has one, runs before its worker is ready. One that asks a service of its own says so by attributes of the
function: `grade.seconds = 60.0`, its deadline, and `grade.waits = True`, for workers that hold nobody else up.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Sequence

from deepgrpo.rewards import latex
from deepgrpo.rewards.answer import BOX, DECLARED, HASHES, TAG, Answer, canonical, tagged_answers, whole, worst
from deepgrpo.rewards.reward import DEFAULT, Rubric, called, checked, extra_rewards, number, resolve, total
from deepgrpo.types import Grade

__all__ = ["GRADERS", "STEP_CHECKING", "Answer", "Grader", "Rubric", "check_sources", "grade", "leaks_answer", "rubric_of"]

BOXED = f"{BOX}|{TAG}|{HASHES}|{DECLARED}"
ANY = f"{BOXED}|\\banswer\\s*:"


@dataclasses.dataclass(frozen=True)
class Grader:
    """An entry of GRADERS.

    path: "module:function", imported when it is first needed; "" for sources that `external.ExternalGrading` grades.
    leaks: pattern of a text that states a final answer or begins to: no locked prefix may hold one.
    family: "boxed", "number" or "formula" if `rewards.extract` applies.
    checks_steps: its grades carry `right_prefix`.
    seconds: deadline of an answer, where rewards.deadline is too short for what it does.
    waits: it spends its time waiting for others: graded in workers of their own.
    """

    path: str
    leaks: str
    family: str = ""
    checks_steps: bool = False
    seconds: float | None = None
    waits: bool = False

    @property
    def external(self) -> bool:
        return not self.path


GRADERS: dict[str, Grader] = {
    "GSM8K": Grader("deepgrpo.rewards.gsm8k:grade", BOXED, "number"),
    **dict.fromkeys(
        ("MATH", "DigitalLearningGmbH/MATH-lighteval", "AIME24", "AMC", "Minerva", "OlympiadBench"),
        Grader("deepgrpo.rewards.math:grade", BOXED, "boxed"),
    ),
    "DeepScaleR": Grader("deepgrpo.rewards.math:grade_declared", BOXED, "formula"),
    **dict.fromkeys(("hotpotqa", "2wikimultihopqa", "musique", "bamboogle"), Grader("deepgrpo.rewards.qa:grade_search", TAG)),
    "reasoning_gym": Grader("deepgrpo.rewards.reasoning_gym:grade", rf"{TAG}|\banswer\b[\s*_]{{0,4}}:", seconds=30.0),
    "stdlib": Grader("deepgrpo.rewards.qa:grade_search", TAG),
    **dict.fromkeys(
        ("finqa", "hybridqa", "ottqa", "multihiertt", "wikitq", "reasoning-table"),
        Grader("deepgrpo.rewards.qa:grade_table", rf"{TAG}|\banswer\b[\s*_]{{0,4}}[:\uff1a]|\banswer\s+is\b"),
    ),
    "DABench": Grader("deepgrpo.rewards.qa:grade_named", f"{TAG}|@\\w+\\["),
    **dict.fromkeys(("datatask", "research", "dabstep_research", "dabstep", "DSBench_data_analysis"), Grader("", TAG)),
    "DSBench_data_modeling": Grader("", TAG),
    "ds1000": Grader("", r"```|<\s*code\b"),
    "carry_chain": Grader("deepgrpo.rewards.steps:grade_carry_chain", "####", checks_steps=True),
    "arithmetic": Grader("deepgrpo.rewards.steps:grade_sum", "####", checks_steps=True),
    "lookup_chain": Grader("deepgrpo.rewards.steps:grade_lookup_chain", "####", checks_steps=True),
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
        extra_rewards(rubric)
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
    if own is None:
        return GRADERS[canonical(source)]
    function = resolve(own)
    return Grader(own, ANY, seconds=getattr(function, "seconds", None), waits=getattr(function, "waits", False))


def external_sources(sources: Iterable[str], rubric: Rubric = DEFAULT) -> frozenset[str]:
    """Those of `sources` that a judge or a program marks, outside of the grading workers."""
    return frozenset(source for source in sources if grader_of(source, rubric).external)


def check_sources(sources: Iterable[str], rubric: Rubric = DEFAULT) -> None:
    """Refuses data sources without a grader, before anything starts.

    Raises:
      ValueError: names the unknown sources and the known ones.
    """
    if unknown := unknown_sources(sources, rubric):
        known = ", ".join([*GRADERS, *rubric.own_graders()])
        raise ValueError(
            f"no grader for data_source {', '.join(map(repr, unknown))}; known: {known} -> {remedy_for(unknown, rubric)}"
        )


def unknown_sources(sources: Iterable[str], rubric: Rubric = DEFAULT) -> list[str]:
    return sorted(source for source in set(sources) - rubric.own_graders().keys() if canonical(source) not in GRADERS)


def remedy_for(unknown: Sequence[str], rubric: Rubric = DEFAULT) -> str:
    """The line that gives unknown sources a grader."""
    own = [f"{source}={path}" for source, path in rubric.own_graders().items()]
    line = ",".join([*own, *(f"{source}=deepgrpo.rewards.math:grade_declared" for source in unknown)])
    return (
        f"--config.rewards.graders='{line}' marks an answer in a box or after 'Answer:' (a number after '####': "
        "deepgrpo.rewards.gsm8k:grade); or name a grader of your own, package.module:function, or correct the column data_source"
    )


def prepare(sources: Iterable[str], rubric: Rubric) -> None:
    """Imports what the graders of `sources` need, so that the first answer of each does not pay for it."""
    extra_rewards(rubric)
    for grader in {grader_of(source, rubric) for source in sources}:
        module = sys.modules[resolve(grader.path).__module__]
        if warm_up := getattr(module, "warm_up", None):
            warm_up()
        if rubric.grader != "typed" and grader.family:
            from deepgrpo.rewards import strict

            strict.warm_up()


#### Grading


def grade(answer: Answer, rubric: Rubric = DEFAULT, task: Grade | None = None) -> Grade:
    """Grades in this process, without a deadline: what a grading worker runs. Everyone else uses `service.GradingService`.

    task: the task's own grade, if it is known already; only the further rewards are then calculated.

    Raises:
      ValueError: unknown data source, or a finish reason that isn't graded.
      reward.GraderFault: a function of the user's gave no usable verdict, or a grader an impossible one.
    """
    check_sources([answer.data_source], rubric)
    task = checked(task or _task_grade(answer, rubric), grader_name(answer.data_source, rubric))
    return checked(total(task, answer, rubric.weight, _extras(rubric)), "rewards.extra")


def grader_name(source: str, rubric: Rubric) -> str:
    """What a fault of a source's grader is reported under: the path of the user's, or the source."""
    return rubric.own_graders().get(source, f"the grader of {source}")


_extras = functools.cache(extra_rewards)


def _task_grade(answer: Answer, rubric: Rubric) -> Grade:
    grader = grader_of(answer.data_source, rubric)
    if answer.data_source not in rubric.own_graders():
        answer = dataclasses.replace(answer, data_source=canonical(answer.data_source))
    if answer.finish_reason == "length":
        return Grade(0.0, False, "truncated", right_prefix=0 if grader.checks_steps else None)
    if answer.finish_reason != "stop":
        raise ValueError(f"finish_reason {answer.finish_reason!r} is not graded; expected 'stop' or 'length'")
    if rubric.grader != "typed" and grader.family:
        return _compatible(answer, grader, rubric)
    if grader.family and rubric.extract != "default":
        return _extracted(whole(answer), grader, rubric.extract)
    path = rubric.own_graders().get(answer.data_source)
    if path is None:
        return resolve(grader.path)(answer if grader.checks_steps else whole(answer))
    result = called(path, resolve(path), answer)
    if isinstance(result, Grade):
        return result
    reward = number(result, path)  # a user's grader may return a plain number
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
    from deepgrpo.rewards import gsm8k, math

    if extract == "mark":
        return gsm8k.grade(answer, only_mark=True) if grader.family == "number" else resolve(grader.path)(answer)
    stated = tagged_answers(answer, lenient=extract == "answer_tag_lenient")
    if grader.family == "number":
        grades = [gsm8k.grade(dataclasses.replace(answer, response=text)) for text in stated]
    else:
        grades = [math.verdict(answer, latex.last_boxes(text) if "\\boxed" in text else [text]) for text in stated]
    return worst(grades)


def user_functions(source: str, rubric: Rubric) -> list[str]:
    """The functions of the user's that take part in grading a source. If one hangs, that says nothing about the answer."""
    own = rubric.own_graders().get(source)
    return [*([own] if own else []), *(name.rpartition(":")[2] for name in rubric.extra_weights() if ":" in name)]


#### Locked prefixes


def leaks_answer(data_source: str, text: str) -> bool:
    """Whether `text` (a locked prefix) already states a final answer, or has begun to: a state that starts from it is worthless.

    Sources with a grader of the user's own are judged by every mark of a final answer that any grader here knows.
    """
    leaks = GRADERS.get(canonical(data_source), Grader("", ANY)).leaks
    return any(_pattern(leaks).search(spelling) for spelling in (text, latex.clean_lines(text)))


@functools.cache
def _pattern(leaks: str) -> re.Pattern:
    return re.compile(leaks, re.IGNORECASE)


#### How a final answer must be written

# The prompt may leave it out (a bare question, another template). The teacher is told all the same: a right answer in another
# form is a wrong one.


@dataclasses.dataclass(frozen=True)
class Form:
    """says: for the teacher. mark: what a text that asks for this form holds, whatever its case."""

    says: str
    mark: str


FORMS = {
    "box": Form("The final answer stands within \\boxed{} at the end.", "\\boxed"),
    "mark": Form('The last line is "#### " and the final answer.', "####"),
    "answer_tag_lenient": Form("The final answer stands between <answer> and </answer> at the end.", "<answer>"),
    "answer_tag": Form("The reasoning ends with </think> <answer>, then come the answer and </answer>.", "</think> <answer>"),
    "code": Form("The code stands in one block between ```python and ```.", "```"),
}


def answer_form(source: str, rubric: Rubric) -> Form | None:
    """Returns the form that a source's grader looks for; None for a grader of the user's own, whose form nobody knows."""
    if source in rubric.own_graders():
        return None
    grader = GRADERS[canonical(source)]
    if grader.family and rubric.extract.startswith("answer_tag"):
        return FORMS[rubric.extract]
    if grader.family == "number" or grader.checks_steps:
        return FORMS["mark"]
    return FORMS["box" if grader.family else "code" if canonical(source) == "ds1000" else "answer_tag_lenient"]


def missing_form(told: str, source: str, rubric: Rubric) -> str:
    """Returns what the teacher must be told about the answer's form beyond `told`; "" if nothing is missing."""
    form = answer_form(source, rubric)
    return "" if form is None or form.mark in told.lower() else form.says
