"""The answers of an evaluation on disk, chunk by chunk, so that one that was killed goes on where it was.

    <folder>/settings.json   what the answers depend on; an evaluation with other settings does not go on here
    <folder>/answers.jsonl   one line a problem, appended as each chunk of problems is finished
    <folder>/result.json     scores, and every problem's rewards and extracted answers

A line holds all that a grader needs, so a later grader can mark the answers again (`evaluate --regrade`).
"""

import contextlib
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from deepgrpo.data.tables import document
from deepgrpo.rewards.answer import Answer
from deepgrpo.telemetry import dumps
from deepgrpo.types import Group

log = logging.getLogger(__name__)

SETTINGS, ANSWERS, RESULT = "settings.json", "answers.jsonl", "result.json"


class OtherSettings(ValueError):
    """The folder holds an evaluation that was made in another way; says what differs."""


class AnswerLog:
    """Answers by chunk; a chunk is there as a whole or not at all.

    Raises:
      OtherSettings: see there.
    """

    def __init__(self, folder: pathlib.Path, settings: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / ANSWERS
        settings = json.loads(json.dumps(settings))  # as it will be read back
        if (folder / SETTINGS).is_file():
            before = read_settings(folder)
            if changed := differences(before, settings):
                raise OtherSettings(
                    f"{folder} holds an evaluation with other settings; choose another --out or remove it:\n  "
                    + "\n  ".join(changed)
                )
        else:
            part = folder / f".{SETTINGS}.part"
            part.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
            part.replace(folder / SETTINGS)
        self.chunks: dict[str, list[dict[str, Any]]] = {}
        self._recover()

    def _recover(self) -> None:
        """Takes up complete chunks; what a killed process left half written is dropped."""
        for entry in read_lines(self.path):
            self.chunks.setdefault(entry.get("chunk"), []).append(entry)
        self.chunks = {name: entries for name, entries in self.chunks.items() if len(entries) == entries[0].get("chunk_size")}
        dumps.write(self.path, [entry for entries in self.chunks.values() for entry in entries])

    def append(self, chunk: str, entries: Sequence[Mapping[str, Any]]) -> None:
        entries = [dict(entry) | {"chunk": chunk, "chunk_size": len(entries)} for entry in entries]
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n" for entry in entries)
            file.flush()
            os.fsync(file.fileno())
        self.chunks[chunk] = entries


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """A line for each innermost setting that differs, named by its dotted key."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in before | now
            for line in differences(before.get(key, "(absent)"), now.get(key, "(absent)"), f"{name}.{key}" if name else key)
        ]
    return [f"{name}: {before!r} then, {now!r} now"]


def read_settings(folder: pathlib.Path) -> dict[str, Any]:
    """Raises FileNotFoundError, saying what was expected, where no evaluation is."""
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: expected the folder of an evaluation (--out)")
    return document(path, {"protocol": {"sets": {}}})


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines that can be read; how many cannot is logged. A chunk that lacks one is answered again."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    entries: list[dict[str, Any]] = []
    for line in filter(None, lines):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line.decode()), dict):
                entries.append(entry)
    if torn := len(list(filter(None, lines))) - len(entries):
        log.warning("%s: %d lines cannot be read", path, torn)
    return entries


def write_result(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def entry_of(group: Group, name: str, item: str, seen: Sequence[Answer]) -> dict[str, Any]:
    """The line of one problem. name: of its set. item: names the problem. seen: what the grader saw, one a rollout.

    A completion that was aborted was left out by the loop; here it stands as an answer without a verdict.
    """
    problem = group.prompt.problem
    answers = [
        {
            "response": answer.response,
            "ending": answer.ending,
            "tokens": len(rollout.completion.ids),
            "finish_reason": rollout.completion.finish_reason,
            "reward": rollout.grade.reward,
            "reason": rollout.grade.reason,
            "answer": rollout.grade.answer,
        }
        for rollout, answer in zip(group.rollouts, seen, strict=True)
    ]
    aborted = {
        "response": "",
        "ending": "",
        "tokens": 0,
        "finish_reason": "abort",
        "reward": None,
        "reason": "abort",
        "answer": "",
    }
    return {
        "set": name,
        "id": item,
        "data_source": problem.data_source,
        "question": problem.question,
        "ground_truth": problem.ground_truth,
        "extra": dict(problem.extra),
        "prompt": seen[0].prompt if seen else "",
        "prompt_tokens": len(group.prompt.ids),
        "answers": answers + [aborted] * (group.prompt.n - len(answers)),
    }


def items_of(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """{set: items} for `telemetry.evaluation` and `telemetry.compare`, sets in the order of `names`."""
    columns = {"rewards": "reward", "answers": "answer", "finish_reasons": "finish_reason", "reasons": "reason"}
    return {
        name: [
            {"id": entry["id"]} | {column: [answer[key] for answer in entry["answers"]] for column, key in columns.items()}
            for entry in entries
            if entry["set"] == name
        ]
        for name in names
    }
