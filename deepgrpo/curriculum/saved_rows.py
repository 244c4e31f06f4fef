"""A pool's records as two files: `<name>.json` (problems, plain fields) and `<name>.npz` (token ids).

A record is a frozen dataclass; what a field holds decides where it goes. A Problem is stored once, whatever the number of records
that share it. Token ids, which every record must have, are stored as `<field>` (those of all records, concatenated) and
`<field>_offsets` (record i has [offsets[i], offsets[i + 1])). Anything else is JSON.
"""

import dataclasses
import itertools
import json
import pathlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from deepgrpo.curriculum.header import as_saved, read_columns, saved_counts
from deepgrpo.types import Ids, Problem, as_ids

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a pool is made of: its records in order, and numbers of its own (counters, next handles)."""

    rows: Sequence[Any]
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)


def write_saved(folder: str, name: str, saved: Saved) -> None:
    """Writes both files. Equal content makes equal bytes.

    Raises:
      ValueError: a problem holds what JSON cannot; names it.
    """
    problems: dict[str, int] = {}  # by content: a restored problem is another object than the data set's
    numbers: dict[int, int] = {}  # the same by identity, so that each object is encoded once
    plain: list[dict[str, Any]] = []
    ids: dict[str, list[Ids]] = {}
    for row in saved.rows:
        fields = {}
        for key, value in ((field.name, getattr(row, field.name)) for field in dataclasses.fields(row)):
            if isinstance(value, Problem):
                if id(value) not in numbers:
                    numbers[id(value)] = problems.setdefault(_problem_text(value), len(problems))
                fields[key] = numbers[id(value)]
            elif isinstance(value, np.ndarray):
                ids.setdefault(key, []).append(value)
            else:
                fields[key] = value
        plain.append(fields)
    path = pathlib.Path(folder)
    parts = {
        "numbers": json.dumps(dict(saved.numbers), sort_keys=True),
        "problems": "[" + ",\n".join(problems) + "]",
        "rows": "[" + ",\n".join(map(json.dumps, plain)) + "]",
    }
    text = ",\n".join(f'"{key}": {value}' for key, value in parts.items())
    (path / f"{name}.json").write_text("{" + text + "}\n", encoding="utf-8")
    columns = {}
    for key, lists in ids.items():
        columns[key] = np.concatenate(lists).astype(np.int32)
        columns[f"{key}_offsets"] = np.cumsum([0, *map(len, lists)])
    np.savez(path / f"{name}.npz", **columns)


def read_saved(folder: str, name: str, record: type[Record]) -> Saved:
    """Returns what `write_saved` was given; `record` is the class of its rows.

    Raises:
      NotAsSaved: a file is absent or damaged, or of other records; names it.
    """
    path = pathlib.Path(folder)
    columns = read_columns(path / f"{name}.npz")
    with as_saved(path / f"{name}.json"):
        content = json.loads((path / f"{name}.json").read_text(encoding="utf-8"))
        problems = [Problem(**fields | {"prompt_ids": as_ids(fields["prompt_ids"])}) for fields in content["problems"]]
        fields_of = {field.name: field.type for field in dataclasses.fields(record)}
        lists = {key: _split(columns[key], columns[f"{key}_offsets"]) for key in columns if f"{key}_offsets" in columns}
        if wrong := [key for key, values in lists.items() if len(values) != len(content["rows"])]:
            raise ValueError(f"{len(content['rows'])} rows, but {name}.npz has {len(lists[wrong[0]])} of {wrong[0]}")
        rows = []
        for i, fields in enumerate(content["rows"]):
            for key, value in fields.items():
                expected = int if fields_of[key] is Problem else fields_of[key]
                if not _fits(value, expected) or (fields_of[key] is Problem and not 0 <= value < len(problems)):
                    raise ValueError(f"row {i}: {key} is {value!r}, expected {getattr(expected, '__name__', expected)}")
            held = {key: problems[value] for key, value in fields.items() if fields_of[key] is Problem}
            rows.append(record(**fields | held | {key: values[i] for key, values in lists.items()}))
        return Saved(rows, saved_counts(content["numbers"], dict.fromkeys(content["numbers"], 0)))


def _fits(value: Any, expected: Any) -> bool:
    """Whether a JSON value is of a field's type; true and false are no numbers."""
    parts = typing.get_args(expected) if isinstance(expected, types.UnionType) else (expected,)
    kinds = tuple(typing.get_origin(part) or part for part in parts)
    return isinstance(value, (*kinds, int) if float in kinds else kinds) and (bool in kinds or not isinstance(value, bool))


def _split(values: np.ndarray, offsets: np.ndarray) -> list[Ids]:
    """Each list as a buffer of its own: a view would keep the whole file in memory."""
    return [as_ids(values[start:stop]) for start, stop in itertools.pairwise(offsets.tolist())]


def _problem_text(problem: Problem) -> str:
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    try:
        return json.dumps(fields | {"prompt_ids": problem.prompt_ids.tolist(), "extra": dict(problem.extra)})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"problems must be JSON-serialisable to be saved, but row {problem.index} of {problem.data_source!r} is not: {error}"
        ) from error
