"""From an evaluation's answers to its result; and marking the same answers again when the graders have changed."""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from deepgrpo.rewards.grade import Answer, external_sources, grader_of
from deepgrpo.rewards.rubric import Rubric
from deepgrpo.rewards.service import GradingService
from deepgrpo.telemetry import answers as answers_lib
from deepgrpo.telemetry import evaluation
from deepgrpo.types import Grade

BOOTSTRAP_SEED = 0
REWARDS = pathlib.Path(__file__).parents[1] / "rewards"


def grader_version() -> str:
    """A digest of the graders' sources, and the versions of the packages that they ask."""
    digest = hashlib.sha256()
    for path in sorted(REWARDS.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    packages = ",".join(f"{name} {importlib.metadata.version(name)}" for name in ("math-verify", "sympy"))
    return f"{digest.hexdigest()[:12]} ({packages})"


class NotOffline(ValueError):
    """These answers cannot be marked again from what is on disk."""


class Marks:
    """A grading service as an evaluation wants it: no bonuses of training, and what was cut off as the protocol says.

    truncated: "zero" (such an answer scores 0) or "graded" (it is one like any other, as in Dr. GRPO's evaluation).
    """

    def __init__(self, service: GradingService, truncated: str):
        self.service, self.truncated = service, truncated

    def submit(self, answer: Answer) -> "Future[Grade]":
        reason = "stop" if self.truncated == "graded" else answer.finish_reason
        return self.service.submit(dataclasses.replace(answer, finish_reason=reason, validation=True))


def mark_again(
    entries: Sequence[Mapping[str, Any]], protocol: Mapping[str, Any], workers: int, deadline: float
) -> tuple[list, int]:
    """The answers with the verdicts of the present graders under the protocol's rubric, and how many verdicts changed.

    Raises:
      NotOffline: a source is marked by a judge or by running a program.
    """
    entries, changed = json.loads(json.dumps(entries)), 0
    rubric, sources = rubric_from(protocol["rubric"]), {entry["data_source"] for entry in entries}
    if outside := external_sources(sources, rubric):
        raise NotOffline(
            f"{', '.join(sorted(outside))}: marked by a judge or by running a program, which marking again does not do; "
            "evaluate into a new --out"
        )
    with GradingService(workers, deadline, sources, rubric) as service:
        marks, waiting = Marks(service, protocol["truncated"]), []
        for entry in entries:
            shared = {key: entry[key] for key in ("data_source", "question", "ground_truth", "extra", "prompt")}
            for answer in entry["answers"]:
                if answer["finish_reason"] != "abort":
                    own = {key: answer[key] for key in ("response", "ending", "finish_reason")}
                    waiting.append((answer, marks.submit(Answer(prefix="", **own, **shared))))
        for answer, future in waiting:
            grade = future.result()
            changed += answer["reward"] != grade.reward
            answer.update(reward=grade.reward, reason=grade.reason, answer=grade.answer)
    return entries, changed


def rubric_from(fields: Mapping[str, Any]) -> Rubric:
    """A rubric out of JSON, where tuples are lists."""
    return Rubric(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def result_of(
    settings: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], workers: int = 2, deadline: float = 5.0
) -> dict[str, Any]:
    """Scores of an evaluation's answers. Where the settings name a second grader, its means stand beside the others' ("second").

    Only sources of mathematics have a second grader. workers, deadline: of it.
    """
    protocol, second = settings["protocol"], settings["second_grader"]
    names = list(protocol["sets"])

    def scores_of(entries, protocol):
        shape = (settings["left_out"], protocol["n"], protocol["threshold"], BOOTSTRAP_SEED)
        return evaluation.summarize(answers_lib.items_of(entries, names), *shape)

    scores = scores_of(entries, protocol)
    for name in names:
        lengths = [answer["tokens"] for entry in entries if entry["set"] == name for answer in entry["answers"]]
        scores[name]["response_tokens"] = float(np.mean(lengths)) if lengths else 0.0
    if second:
        rubric = rubric_from(protocol["rubric"] | {"grader": second})
        again = [entry for entry in entries if grader_of(entry["data_source"], rubric).family]
        other = protocol | {"rubric": dataclasses.asdict(rubric)}
        marked = scores_of(mark_again(again, other, workers, deadline)[0], other) if again else {}
        for name in scores:
            complete = name in marked and (name != "mean" or len(again) == len(entries))
            scores[name]["second"] = marked[name]["scores"].get(f"avg@{protocol['n']}") if complete else None
    return {**settings, "scores": scores, "items": answers_lib.items_of(entries, names)}


def regrade(folder: pathlib.Path, grader: str = "", workers: int = 2, deadline: float = 5.0) -> tuple[dict[str, Any], str]:
    """Marks the answers of an evaluation again, by the present graders; writes regraded-<grader>.json beside the old result.

    Args:
      grader: value of rewards.grader; "": the one that the evaluation had.

    Returns:
      (the result, what changed).

    Raises:
      FileNotFoundError: no finished evaluation there.
    """
    settings = answers_lib.read_settings(folder)
    if not (folder / answers_lib.RESULT).is_file():
        raise FileNotFoundError(f"{folder / answers_lib.RESULT} does not exist: the evaluation did not end; start it again first")
    protocol = settings["protocol"]
    protocol["grader"] = grader_version()
    protocol["rubric"]["grader"] = grader or protocol["rubric"]["grader"]
    before = answers_lib.read_lines(folder / answers_lib.ANSWERS)
    if len(before) != (answered := sum(entry["problems"] for entry in protocol["sets"].values())):
        what = f"{folder / answers_lib.ANSWERS} holds {len(before)} of {answered} problems: lines are lost or torn"
        raise NotOffline(f"{what}; start the evaluation again, which answers what is missing")
    entries, changed = mark_again(before, protocol, workers, deadline)
    result = result_of(settings, entries, workers, deadline)
    path = folder / f"regraded-{protocol['rubric']['grader']}-{protocol['grader'].split()[0]}.json"
    answers_lib.write_result(path, result)
    return result, f"{changed} of {sum(len(entry['answers']) for entry in entries)} verdicts changed: {path}"
