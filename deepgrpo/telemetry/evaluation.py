"""An evaluation on disk, from its answers to its result and table; and marking the same answers again by other graders.

    <folder>/settings.json   what the answers depend on; an evaluation with other settings does not go on here
    <folder>/answers.jsonl   one line for each problem, appended as each chunk of problems is finished
    <folder>/result.json     scores, and every problem's rewards and extracted answers

An evaluation that was killed goes on after its last whole chunk. A line of answers holds all that a grader needs, so a later
grader can mark the answers again (`evaluate --regrade`).
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import rich.table

from deepgrpo.data.tables import document
from deepgrpo.rewards.grade import Answer, external_sources, grader_of
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.service import GradingService
from deepgrpo.telemetry import dumps, statistics
from deepgrpo.telemetry.log import Console
from deepgrpo.types import Grade, Group

log = logging.getLogger(__name__)

SETTINGS, ANSWERS, RESULT = "settings.json", "answers.jsonl", "result.json"
BOOTSTRAP_SEED = 0
REWARDS = pathlib.Path(__file__).parents[1] / "rewards"

Printed = tuple[rich.table.Table, Sequence[str]]  # and the lines below it


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
            write_json(folder / SETTINGS, settings, indent=1)
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in read_lines(self.path):  # what a killed process left half written is dropped
            found.setdefault(entry.get("chunk"), []).append(entry)
        self.chunks = {name: entries for name, entries in found.items() if len(entries) == entries[0].get("chunk_size")}
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


def write_json(path: pathlib.Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n", encoding="utf-8")
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
        | ({"turns": rollout.turns, "parts": answer.parts} if rollout.episode else {})
        for rollout, answer in zip(group.rollouts, seen, strict=True)
    ]
    aborted = {"response": "", "ending": "", "tokens": 0, "finish_reason": "abort"}
    aborted |= {"reward": None, "reason": "abort", "answer": ""}
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


#### Marking


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
                    own["parts"] = tuple(map(tuple, answer.get("parts", ())))
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
        return statistics.summarize(items_of(entries, names), *shape)

    scores = scores_of(entries, protocol)
    for name in names:
        lengths = [answer["tokens"] for entry in entries if entry["set"] == name for answer in entry["answers"]]
        scores[name]["response_tokens"] = float(np.mean(lengths)) if lengths else 0.0
        if turns := [
            answer["turns"] for entry in entries if entry["set"] == name for answer in entry["answers"] if "turns" in answer
        ]:
            scores[name]["turns"] = float(np.mean(turns))
    if second:
        rubric = rubric_from(protocol["rubric"] | {"grader": second})
        again = [entry for entry in entries if grader_of(entry["data_source"], rubric).family]
        other = protocol | {"rubric": dataclasses.asdict(rubric)}
        marked = scores_of(mark_again(again, other, workers, deadline)[0], other) if again else {}
        for name in scores:
            complete = name in marked and (name != "mean" or len(again) == len(entries))
            scores[name]["second"] = marked[name]["scores"].get(f"avg@{protocol['n']}") if complete else None
    return {**settings, "scores": scores, "items": items_of(entries, names)}


def regrade(folder: pathlib.Path, grader: str = "", workers: int = 2, deadline: float = 5.0) -> tuple[dict[str, Any], str]:
    """Marks the answers of an evaluation again, by the present graders; writes regraded-<grader>.json beside the old result.

    Args:
      grader: value of rewards.grader; "": the one that the evaluation had.

    Returns:
      (the result, what changed).

    Raises:
      FileNotFoundError: no finished evaluation there.
    """
    settings = read_settings(folder)
    if not (folder / RESULT).is_file():
        raise FileNotFoundError(f"{folder / RESULT} does not exist: the evaluation did not end; start it again first")
    protocol = settings["protocol"]
    protocol["grader"] = grader_version()
    protocol["rubric"]["grader"] = grader or protocol["rubric"]["grader"]
    before = read_lines(folder / ANSWERS)
    if len(before) != (answered := sum(entry["problems"] for entry in protocol["sets"].values())):
        what = f"{folder / ANSWERS} holds {len(before)} of {answered} problems: lines are lost or torn"
        raise NotOffline(f"{what}; start the evaluation again, which answers what is missing")
    entries, changed = mark_again(before, protocol, workers, deadline)
    result = result_of(settings, entries, workers, deadline)
    path = folder / f"regraded-{protocol['rubric']['grader']}-{protocol['grader'].split()[0]}.json"
    write_json(path, result)
    return result, f"{changed} of {sum(len(entry['answers']) for entry in entries)} verdicts changed: {path}"


#### Tables


def result_table(result: Mapping[str, Any]) -> Printed:
    """A row a set; the last is the unweighted mean over sets. Scores in percent, with standard error and 95 % interval."""
    protocol, scores = result["protocol"], result["scores"]
    every = next(iter(scores.values()))["scores"]  # pass@1 is avg@n where an answer is right or wrong
    names = [key for key in every if key != "pass@1"] or [f"avg@{protocol['n']}"]
    table = rich.table.Table(title=f"{result['model']['path']}, seed {result['seed']} (scores in %)")
    table.add_column("set")
    columns = ["problems", f"{titled(names[0], protocol)} ± s.e.", "95 % interval", *names[1:]]
    second = [f"by {result['second_grader']}"] if result["second_grader"] else []
    for column in [*columns, *second, "truncated %", "tokens", "no verdict"]:
        table.add_column(column, justify="right")
    for name, entry in scores.items():
        found = [entry["scores"].get(key) for key in names]
        first = "-" if found[0] is None else f"{percent(found[0]['mean'])} ± {percent(found[0]['error'])}"
        bounds = "-" if found[0] is None else f"{percent(found[0]['low'])} - {percent(found[0]['high'])}"
        others = ["-" if score is None else percent(score["mean"]) for score in found[1:]]
        others += [percent(entry["second"] and entry["second"]["mean"])] if second else []
        if name == "mean":
            table.add_section()
            counts = ["", first, bounds, *others, "", "", ""]
        else:
            lost = f"{entry['excluded']} + {entry['left_out']} left out" if entry["left_out"] else str(entry["excluded"])
            shares = [percent(entry["truncated_share"]), f"{entry['response_tokens']:.0f}{turns_of(entry)}", lost]
            counts = [str(entry["problems"]), first, bounds, *others, *shares]
        table.add_row(name + (" INCOMPLETE" if entry["incomplete"] else ""), *counts)
    return table, lines_of(result)


def turns_of(entry: Mapping[str, Any]) -> str:
    return f" in {entry['turns']:.1f} turns" if "turns" in entry else ""


def titled(name: str, protocol: Mapping[str, Any]) -> str:
    return "greedy" if protocol["temperature"] == 0 else name


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """The protocol, in words."""
    p = result["protocol"]
    limit = f"{p['max_new_tokens']} new tokens, " if p["max_new_tokens"] else ""
    cut = "score 0" if p["truncated"] == "zero" else "are graded like others"
    drawn = "greedy" if p["temperature"] == 0 else f"temperature {p['temperature']:g}, top_p {p['top_p']:g}"
    lines = [
        f"template {p['template']}; stop ids {', '.join(map(str, p['stop_ids']))}; {drawn}, answers a problem: {p['n']}",
        f"limit {limit}context {p['max_model_len']}; answers that it cuts off {cut}",
        f"grader {p['rubric']['grader']}, version {p['grader']}",
        f"engine {p['engine']}, {p['dtype']}; weights {result['model']['weights']}",
    ]
    if result["selection"]["label"]:
        lines.append(f"checkpoint {result['selection']['label']}: {', '.join(result['selection']['sets'])}")
    if any(entry["incomplete"] for entry in result["scores"].values()):
        lines.append(
            "INCOMPLETE: more than 1 % of a set's problems have no verdict or were left out; do not report these numbers"
        )
    return lines


def percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f}"


def show(printed: Printed) -> None:
    width = None if sys.stdout.isatty() else 160  # a log has no width to fit into
    console = Console(width=width, highlight=False)
    console.print(printed[0])
    for line in printed[1]:
        console.print(line, markup=False, soft_wrap=True)
