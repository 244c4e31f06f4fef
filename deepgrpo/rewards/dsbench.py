"""Grader of DSBench data modelling: the task's evaluation script scores the submission file, in the sandbox.

The row brings, in `extra` (or in a ground truth that is a mapping): `expected_file`, the submission's path in the workspace;
`ground_truth`, the path of the key; `evaluation_script`, its path; `workspace`; `baseline_result` and `gold_result`, two scores.
"""

import math
import os
import pathlib
import stat
import sys
from collections.abc import Mapping
from typing import Any

from deepgrpo.rewards import sandbox
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.research import final_answer
from deepgrpo.types import Grade

SECONDS = 300.0  # for the evaluation script
LARGEST = 2**28  # bytes of a submission


def grade(answer: Answer, *, strict: bool = False, seconds: float = SECONDS, allow_network: bool = False) -> Grade:
    """See `normalised`; 0 without an <Answer> or without a usable submission. Runs a child process: not in a grading worker.

    No verdict ("no_scale", "evaluation", "sandbox"): the row's scores span no scale, or the evaluation could not be done for a
    reason that lies with this machine or the row.

    Raises:
      sandbox.SandboxUnavailable: scripts cannot be isolated here. KeyError, OSError: the row lacks a field, key or script.
    """
    if final_answer(answer) is None:
        return Grade(0.0, False, "unformatted")
    row = _fields(answer)
    baseline, gold = float(row["baseline_result"]), float(row["gold_result"])
    if normalised(gold, baseline, gold) is None:
        return Grade(None, True, "no_scale")
    script, truth = pathlib.Path(row["evaluation_script"]), pathlib.Path(row["ground_truth"])
    materials = {"evaluate.py": script.read_bytes(), f"key/{truth.name}": truth.read_bytes()}
    submission = read_submission(pathlib.Path(row["workspace"]), row["expected_file"])
    if submission is None:
        return Grade(0.0, False, "no_submission")
    name = f"submission/{pathlib.PurePath(row['expected_file']).name}"
    arguments = ["--answer_file", f"key/{truth.name}", "--predict_file", name, "--path", "dummy", "--name", "dummy"]
    try:
        result = sandbox.run(
            [sys.executable, "evaluate.py", *arguments],
            files=materials | {name: submission},
            seconds=seconds,
            cpu_seconds=max(1, int(seconds)),
            disk_bytes=2 * (LARGEST + sum(map(len, materials.values()))),
            allow_network=allow_network,
        )
    except sandbox.SandboxError:
        return Grade(None, True, "sandbox")
    last_line = result.output.strip().rpartition("\n")[2]
    if result.outcome in ("timeout", "killed") or last_line.startswith("ModuleNotFoundError"):
        return Grade(None, True, "evaluation", result.output[-500:])
    score = _score(result)
    if score is None:
        return Grade(0.0, False, "bad_submission", result.output[-500:])
    reward = normalised(score, baseline, gold, clip=not strict)
    return Grade(reward, True, "right" if reward >= 1 else "judged", repr(score))


def normalised(score: float, baseline: float, gold: float, clip: bool = True) -> float | None:
    """(score - baseline) / (gold - baseline), at least 0 and, with `clip`, at most 1: where the submission stands between a
    trivial and the best known result. The same formula serves scores to be minimised (gold < baseline).

    A score that is not a number gives 0. None: gold equals baseline or one is not finite, so that there is no scale.
    """
    if not (math.isfinite(baseline) and math.isfinite(gold)) or gold == baseline:
        return None
    share = (score - baseline) / (gold - baseline)
    if math.isnan(share) or share <= 0 or not math.isfinite(score):
        return 0.0
    return min(share, 1.0) if clip else share


def read_submission(workspace: pathlib.Path, name: str) -> bytes | None:
    """Content of a regular file in the workspace; None if there is none, or more than LARGEST of it.

    The workspace was written by untrusted code: a link (to the key, say) or a device counts as no file.
    """
    root = workspace.resolve()
    path = root / name
    if not path.resolve().is_relative_to(root):
        return None
    try:
        if path.parent.resolve() != path.parent:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = file.read(LARGEST + 1)
    return content if len(content) <= LARGEST else None


def forget_submission(workspace: str | os.PathLike, name: str = "submission.csv") -> None:
    """Deletes a submission that an earlier rollout left, so that it can't be scored for this one."""
    pathlib.Path(workspace, name).unlink(missing_ok=True)


def _score(result: sandbox.Result) -> float | None:
    """What the script printed, if it ended well and that is a number."""
    if result.outcome != "ok":
        return None
    try:
        return float(result.output.strip())
    except ValueError:
        return None


def _fields(answer: Answer) -> Mapping[str, Any]:
    truth = answer.ground_truth
    return {**answer.extra, **(truth if isinstance(truth, Mapping) else {"ground_truth": truth})}
