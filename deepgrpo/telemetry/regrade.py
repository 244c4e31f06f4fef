"""From an evaluation's answers to its result; and marking the same answers again when the graders have changed."""

import dataclasses
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.rewards.grade import Answer
from deepgrpo.rewards.service import GradingService
from deepgrpo.telemetry import answers as answers_lib
from deepgrpo.telemetry import evaluation

BOOTSTRAP_SEED = 0
REWARDS = pathlib.Path(__file__).parents[1] / "rewards"


def grader_version() -> str:
    """A digest of the graders' sources, and the versions of the packages that they ask."""
    digest = hashlib.sha256()
    for path in sorted(REWARDS.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    packages = ",".join(f"{name} {importlib.metadata.version(name)}" for name in ("math-verify", "sympy"))
    return f"{digest.hexdigest()[:12]} ({packages})"


class GradesTruncated:
    """A grading service to which an answer that was cut off is one like any other (Dr. GRPO's evaluation)."""

    def __init__(self, inner: GradingService):
        self.inner = inner

    def submit(self, answer: Answer):
        return self.inner.submit(dataclasses.replace(answer, finish_reason="stop"))


def result_of(settings: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    protocol = settings["protocol"]
    items = answers_lib.items_of(entries, list(protocol["sets"]))
    scores = evaluation.summarize(items, settings["left_out"], protocol["n"], protocol["threshold"], BOOTSTRAP_SEED)
    for name in protocol["sets"]:
        lengths = [answer["tokens"] for entry in entries if entry["set"] == name for answer in entry["answers"]]
        scores[name]["response_tokens"] = float(np.mean(lengths)) if lengths else 0.0
    return {**settings, "scores": scores, "items": items}


def regrade(folder: pathlib.Path, workers: int = 2, deadline: float = 5.0) -> tuple[dict[str, Any], str]:
    """Marks the answers of an evaluation again, by the present graders; writes regraded-<grader>.json beside the old result.

    Returns:
      (the result, what changed).

    Raises:
      FileNotFoundError: no finished evaluation there.
    """
    settings = answers_lib.read_settings(folder)
    entries = answers_lib.read_lines(folder / answers_lib.ANSWERS)
    if not (folder / answers_lib.RESULT).is_file():
        raise FileNotFoundError(f"{folder / answers_lib.RESULT} does not exist: the evaluation did not end; start it again first")
    protocol, changed = settings["protocol"], 0
    with GradingService(workers, deadline, {entry["data_source"] for entry in entries}) as service:
        marks = GradesTruncated(service) if protocol["truncated"] == "graded" else service
        waiting = []
        for entry in entries:
            shared = {key: entry[key] for key in ("data_source", "question", "ground_truth", "extra")}
            waiting += [
                (a, marks.submit(Answer(prefix="", response=a["response"], finish_reason=a["finish_reason"], **shared)))
                for a in entry["answers"]
                if a["finish_reason"] != "abort"
            ]
        for answer, future in waiting:
            grade = future.result()
            changed += answer["reward"] != grade.reward
            answer.update(reward=grade.reward, reason=grade.reason, answer=grade.answer)
    protocol["grader"] = grader_version()
    result = result_of(settings, entries)
    path = folder / f"regraded-{protocol['grader'].split()[0]}.json"
    answers_lib.write_result(path, result)
    return result, f"{changed} of {len(waiting)} verdicts changed: {path}"
