"""The grading of a run, from its configuration; and what can be told of a user's graders and rewards before a run starts."""

import concurrent.futures
import contextlib
import pathlib
from collections.abc import Collection
from typing import Any

from deepgrpo.config.errors import Finding
from deepgrpo.data.dataset import usable_rows
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import check_sources, external_sources, grader_of, rubric_of, user_functions
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.service import GradingService
from deepgrpo.types import Grade

MARKS_AN_ANSWER = 2  # at most: some answers are shown to two judges


def open_grading(config, stack: contextlib.ExitStack, sources: Collection[str], folder: pathlib.Path) -> GradingService:
    """The grading service for `sources`, with a judge and a sandbox where one of them needs it; closed with `stack`.

    Args:
      config: the whole configuration. folder: of the judge's replies.

    Raises:
      SystemExit, ValueError: a source has no grader, or a key is malformed or missing; says which.
      sandbox.SandboxUnavailable: a source runs code of the model's, which can't be isolated here.
    """
    rewards, rubric = config.rewards, rubric_of(config.rewards)
    check_sources(sources, rubric)
    external, deadline = None, 0.0
    if outside := external_sources(sources, rubric):
        from deepgrpo.endpoint.client import DEADLINE_SLACK
        from deepgrpo.rewards.agents import ds1000
        from deepgrpo.rewards.agents import external as external_lib
        from deepgrpo.rewards.agents.judges import open_judge

        judged = outside & external_lib.JUDGED.keys() - external_lib.NO_JUDGE_NEEDED
        judge_deadline = MARKS_AN_ANSWER * (config.judge.timeout + DEADLINE_SLACK)
        external = external_lib.ExternalGrading(
            outside,
            judge=open_judge(config, stack, folder) if judged else None,
            allow_network=config.sandbox.allow_network,
            judge_deadline=judge_deadline,
            strict=rewards.grader != "typed",
        )
        stack.enter_context(external)
        deadline = max(judge_deadline * bool(judged), ds1000.SECONDS, external_lib.DSBENCH_SECONDS)
    service = GradingService(rewards.workers, rewards.deadline, sources, rubric, external=external, external_deadline=deadline)
    return stack.enter_context(service)


PATIENCE = 10.0  # seconds for a call whose grader waits for others, and may take longer
REMEDY = "mend the function: it takes one Answer and returns a finite number, a Grade, or None (no verdict)"


def reward_problems(config: Any) -> list[Finding]:
    """Findings about the functions that rewards.graders and rewards.extra name; nothing is asked where there are none.

    They run in a grading worker, as in the run, on an answer that states the row's key.
    """
    rubric = Rubric.from_config(config.rewards)
    if not rubric.graders and not any(":" in name for name in rubric.extra_weights()):
        return []
    findings = []
    for source, row in _rows(config, set(rubric.own_graders())).items():
        if not (names := user_functions(source, rubric)):
            continue
        response = f"The answer is \\boxed{{{row.ground_truth}}}."
        answer = Answer(source, row.question, "", response, "stop", row.ground_truth, row.extra)
        try:
            if external_sources([source], rubric):
                continue
            grade, said = _graded(answer, rubric, config.rewards.deadline)
        except (ValueError, RuntimeError) as error:  # no such function, or its import failed, ended the process or never ended
            what = f"rewards: {' or '.join(names)}: {_last(str(error))}"
            return [Finding(what, "mend the module, or put its folder into PYTHONPATH")]
        what = f"rewards: {said or ' or '.join(names)}, called on a row of {source}"
        if grade.reason.startswith("error"):
            findings.append(Finding(what, REMEDY))
        elif grade.reason in ("timeout", "crash"):
            why = "ended its process" if grade.reason == "crash" else f"took more than {config.rewards.deadline:g} s"
            findings.append(Finding(f"{what}, {why}", "make it faster, or raise --config.rewards.deadline"))
        elif grade.reward is None and grade.reason != "closed":
            findings.append(Finding(f"{what}, returned None: no verdict", "check that it returns its value", fatal=False))
    return findings


def _rows(config: Any, sources: set[str]) -> dict[str, Any]:
    """A row of each of `sources` that the data sets hold, and of the first source."""
    found: dict[str, Any] = {}
    for spec in (*config.data.train, *config.data.validation):
        try:
            rows = usable_rows(spec, config.data.template, config.loop == "agent")
        except (ValueError, OSError):  # the data's own findings
            continue
        for row in rows:
            if row.ground_truth is not None and (not found or row.data_source in sources):
                found.setdefault(row.data_source, row)
    return found


def _graded(answer: Answer, rubric: Rubric, deadline: float) -> tuple[Grade, str]:
    """The grade, and the fault of the function that gave none."""
    with GradingService(1, deadline, [answer.data_source], rubric, waiting_workers=1) as service:
        waits = grader_of(answer.data_source, rubric).waits
        try:
            grade = service.submit(answer).result(PATIENCE if waits else None)
        except concurrent.futures.TimeoutError:
            return Grade(None, False, "closed"), ""
        return grade, "; ".join(f"{name}: {_last(details[0])}" for name, details in service.faults().items())


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]
