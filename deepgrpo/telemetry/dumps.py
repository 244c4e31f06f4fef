"""Dumps for reading: `rollouts/<step>.jsonl` and `validation/<step>.jsonl`, one record a rollout.

The fields input, output, score, reward, step, finished, completed, task_id and data_source are those of the released
implementation's dumps; the rest is ours.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepgrpo.config.errors import CONTROL
from deepgrpo.telemetry.log import no_end
from deepgrpo.types import Group, Ids, Rollout

Decode = Callable[[list[int]], str]  # ids to text, special tokens kept


def rollout_records(groups: Sequence[Group], step: int, decode: Decode) -> list[dict[str, Any]]:
    """Everything about a step's rollouts, in group order: texts, ids, verdict, and the hard state they started from."""
    return [
        record(group, rollout, step, decode)
        | {
            "prompt_ids": group.prompt.ids.tolist(),
            "response_ids": rollout.completion.ids.tolist(),
            "group": group.prompt.group_id,
            "injected": group.prompt.injected,
            "node": None if group.prompt.node is None else str(group.prompt.node),
            "locked_length": group.prompt.locked,
            "locked_text": decode(locked_ids(group).tolist()),
            "weight_version": rollout.completion.version,
        }
        for group in groups
        for rollout in group.rollouts
    ]


def validation_records(groups: Sequence[Group], step: int, decode: Decode) -> list[dict[str, Any]]:
    """The answers of a validation, in group order; `statistics.validation_metrics` is computed from these."""
    return [
        record(group, rollout, step, decode) | {"group": group.prompt.group_id} for group in groups for rollout in group.rollouts
    ]


def record(group: Group, rollout: Rollout, step: int, decode: Decode) -> dict[str, Any]:
    completion, grade, problem = rollout.completion, rollout.grade, group.prompt.problem
    return {
        "step": step,
        "data_source": problem.data_source,
        "task_id": problem.index,
        "input": decode(group.prompt.ids.tolist()),
        "output": decode(completion.ids.tolist()),
        "score": grade.reward,
        "reward": grade.reward,
        "completed": grade.completed,
        "finished": completion.finish_reason == "stop",
        "finish_reason": completion.finish_reason,
        "reason": grade.reason,
        "answer": grade.answer,
        "ground_truth": problem.ground_truth,
        "response_length": len(completion.ids),
    }


def locked_ids(group: Group) -> Ids:
    return group.prompt.ids[len(group.prompt.problem.prompt_ids) :]


def write(path: str | pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes JSON lines, whole or not at all; a step that is repeated after a resume replaces its file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8", errors="backslashreplace") as file:  # half a character is JSON's own escape then
        for entry in records:
            text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
            file.write(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")  # for whoever prints the file
    part.replace(path)


def show(path: str | pathlib.Path, records: Iterable[dict[str, Any]]) -> bool:
    """`write` for reading matter, which is not worth a run: False, and a warning, if it could not be written."""
    with no_end(f"{pathlib.Path(path).parent}"):
        write(path, records)
        return True
    return False


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
