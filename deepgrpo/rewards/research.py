"""Rewards of the data-analysis agents: what a judge says of their answers and reports, and how much of their code ran.

An agent writes <Analyze>, <Understand>, <Code> and <Answer> blocks; the environment puts <Execute> blocks with the output between
them. All rewards are in [0, 1]; `strict` gives the reference's own scales (dabstep_research 1 to 5, dabstep -1).
"""

import re
from collections.abc import Callable, Coroutine
from typing import Any

from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.rewards.judges import Judge, checked_dabstep_research
from deepgrpo.rewards.sandbox import ERROR
from deepgrpo.types import Grade

JudgedGrader = Callable[[Answer, Judge, bool], Coroutine[Any, Any, Grade]]  # (answer, judge, strict); raises judges.NoVerdict

_ANSWER = re.compile(r"<Answer>(.*?)</Answer>", re.DOTALL)
_EXECUTE = re.compile(r"<Execute>(.*?)</Execute>", re.DOTALL)
_ANALYZE = re.compile(r"</?Analyze>")  # the chat template may have written the opening tag


async def grade_datatask(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """0 for a wrong answer; 0.5 + 0.5 * `code_pass_ratio` for a right one."""
    said = final_answer(answer) if analyzes(answer) else None
    if not said:
        return _unformatted(strict)
    right = await judge.mark("answer_correctness", question=question(answer), reference_answer=key(answer), answer=said)
    return Grade(right * (0.5 + 0.5 * code_pass_ratio(answer)), True, "right" if right else "wrong", said)


async def grade_research(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """Mean of `code_pass_ratio`, report quality and report soundness."""
    report = final_answer(answer) if analyzes(answer) else None
    if not report:
        return _unformatted(strict)
    instruction = question(answer)
    quality = await judge.mark("report_quality", instruction=instruction, report=report)
    soundness = await judge.mark("report_soundness", instruction=instruction, trajectory=trajectory(answer))
    return Grade((code_pass_ratio(answer) + quality + soundness) / 3, True, "judged", report)


async def grade_dabstep_research(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """(m - 1) / 4 of the mean m of two marks from 1 to 5; strict: m."""
    report = final_answer(answer)
    if not report:
        return Grade(0.0, False, "unformatted")
    instruction, checklist = question(answer), key(answer)
    texts = {"instruction": instruction, "checklist": checklist, "report": report}
    marks = await judge.mark("dabstep_research", checked_dabstep_research, **texts)
    return Grade(marks if strict else (marks - 1) / 4, True, "judged", report)


async def grade_dsbench_analysis(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """1 if the judge calls the answer correct, else 0."""
    said = final_answer(answer)
    if not said:
        return Grade(0.0, False, "unformatted")
    right = await judge.mark("dsbench_accuracy", question=question(answer), reference_answer=key(answer), answer=said)
    return Grade(right, True, "right" if right else "wrong", said)


async def grade_dabstep(answer: Answer, judge: Judge | None = None, strict: bool = False) -> Grade:
    """No verdict: the answers are scored by a public leaderboard alone, there is no key to compare with. Strict: -1."""
    said = final_answer(answer) or ""
    return Grade(-1.0, False, "no_key", said) if strict else Grade(None, bool(said), "no_key", said)


GRADERS: dict[str, JudgedGrader] = {
    "datatask": grade_datatask,
    "research": grade_research,
    "dabstep_research": grade_dabstep_research,
    "DSBench_data_analysis": grade_dsbench_analysis,
    "dabstep": grade_dabstep,
}


def refuse_untrainable(sources) -> None:
    """Refuses training data whose answers nobody here can mark.

    Raises:
      ValueError: dabstep is among them.
    """
    if "dabstep" in sources:
        raise ValueError(
            "data_source 'dabstep' has no answer keys (only its leaderboard scores answers), so that every rollout would be "
            "without a verdict: take it out of data.train; it can be rolled out and exported by validation"
        )


#### Reading a trajectory


def trajectory(answer: Answer) -> str:
    """The agent's own turns and the blocks that the environment put between them, the locked prefix first."""
    return answer.prefix + own_words(answer.response)


def analyzes(answer: Answer) -> bool:
    return _ANALYZE.search(trajectory(answer)) is not None


def final_answer(answer: Answer) -> str | None:
    """Content of the last closed <Answer> pair of the response, outputs of code left out, trimmed; None without one."""
    found = _ANSWER.findall(_EXECUTE.sub("", own_words(answer.response)))
    return found[-1].rpartition("<Answer>")[2].strip() if found else None


def code_pass_ratio(answer: Answer) -> float:
    """Share of the executed blocks without an error; 0 if no code ran.

    `extra["executions"]`, the list of outputs that the environment gave, decides where the rollout has it: a block in the text
    may have been written by the model.
    """
    blocks = answer.extra.get("executions")
    if blocks is None:
        blocks = _EXECUTE.findall(trajectory(answer))
    return sum(ERROR not in block for block in blocks) / len(blocks) if blocks else 0.0


def question(answer: Answer) -> str:
    """The row's instruction or question, else the user's text."""
    return str(answer.extra.get("instruction") or answer.extra.get("question") or answer.question)


def key(answer: Answer) -> str:
    """The reference answer or checklist as text."""
    truth = answer.ground_truth
    return "\n".join(map(str, truth)) if isinstance(truth, list | tuple) else str(truth)


def _unformatted(strict: bool) -> Grade:
    return Grade(0.0, strict, "unformatted")  # the reference counts it as completed
