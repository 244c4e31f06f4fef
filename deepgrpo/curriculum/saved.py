"""How pools are saved: a header (which pool wrote the folder, in which version), and tables of records.

A record is a frozen dataclass or a named tuple; the type of a field decides where it goes. A table is two files:

    <name>.npz   a column per number (None is NaN, or -1 of whole numbers) and per Problem (its place among the problems). Token
                 ids are `<field>`, those of all records, concatenated, and `<field>_offsets` (record i has
                 [offsets[i], offsets[i + 1]))
    <name>.json  `numbers` of the pool itself, `problems` (each once, whatever the number of records that share it), and the
                 fields that are neither number, Problem nor token ids, one row per record

Nothing is pickled, and equal content makes equal bytes.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import pathlib
import typing
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.types import Ids, Problem, as_ids

NUMBERS = {int: np.int64, bool: np.bool_, float: np.float64, int | None: np.int64, float | None: np.float64}  # field: column
NONE = {int | None: -1, float | None: math.nan}  # type of a field: what its column holds for None
NAME = "curriculum.json"
REMEDY = "Put it back as it was saved, or move this checkpoint away, so that the one before it is resumed; or start a new run"
_ANY = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, EOFError, MemoryError)
_ANY += (StopIteration, zipfile.BadZipFile, zlib.error)


class NotAsSaved(ValueError):
    """A file of a saved curriculum is damaged, or of another pool; the message names it."""


@contextlib.contextmanager
def as_saved(place: str | pathlib.Path) -> Iterator[None]:
    """Whatever goes wrong inside is a fault of the files at `place`, and names them.

    Raises:
      NotAsSaved: in place of the error.
    """
    try:
        yield
    except NotAsSaved:
        raise
    except _ANY as error:
        what = "it is absent" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise NotAsSaved(f"{place}: damaged, or not what this run saves there ({what}). {REMEDY}") from error


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Stops the garbage collector: many records are made and none is garbage, but it would walk over all of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def write_header(folder: str, pool: str, version: int, fields: dict[str, Any]) -> None:
    text = json.dumps({"pool": pool, "version": version} | fields, indent=1, sort_keys=True)
    (pathlib.Path(folder) / NAME).write_text(text + "\n", encoding="utf-8")


def read_header(folder: str, pool: str, version: int) -> dict[str, Any]:
    """Returns the header's fields.

    Raises:
      NotAsSaved: the folder was written by another pool or in another version (names both), or its header cannot be read.
    """
    path = pathlib.Path(folder) / NAME
    if not path.is_file():
        raise NotAsSaved(f"{path} is absent: expected a saved curriculum of pool type {pool!r}, version {version}. {REMEDY}")
    with as_saved(path):
        header = json.loads(path.read_text(encoding="utf-8"))
        saved_by, saved_as = header["pool"], header["version"]
    if saved_by != pool:
        raise NotAsSaved(
            f"{path}: saved by pool type {saved_by!r}, but this run uses {pool!r}; "
            f"set curriculum.pool={saved_by} or start a new run"
        )
    if saved_as != version:
        raise NotAsSaved(
            f"{path}: format version {saved_as} of pool {pool!r}, but this code reads version {version}; "
            "resume with the code that wrote it or start a new run"
        )
    return header


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a pool is made of: its records in order, and numbers of its own (counters, next handles)."""

    rows: Sequence[Any]
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)


def fields_of(record: type, *left_out: str) -> list[tuple[str, Any]]:
    """The (name, type) of the fields of a dataclass, for a named tuple in which it is saved."""
    return [(field.name, field.type) for field in dataclasses.fields(record) if field.name not in left_out]


def write_saved(folder: str, name: str, record: type, saved: Saved) -> None:
    """Writes both files; `record` is the class of the rows, which may be plain tuples if it is a named tuple.

    Raises:
      ValueError: a problem holds what JSON cannot; names it.
    """
    problems: dict[str, int] = {}  # by content: a restored problem is another object than the data set's
    places: dict[int, int] = {}  # the same by identity, so that each object is encoded once
    columns: dict[str, np.ndarray] = {}
    plain: dict[str, list[Any]] = {}
    for i, (key, kind) in enumerate(typing.get_type_hints(record).items()):
        values = [row[i] for row in saved.rows] if issubclass(record, tuple) else [getattr(row, key) for row in saved.rows]
        if kind is Problem:
            for value in values:
                if id(value) not in places:
                    places[id(value)] = problems.setdefault(_problem_text(value), len(problems))
            columns[key] = np.array([places[id(value)] for value in values], np.int64)
        elif kind is Ids:
            columns[key] = np.concatenate([*values, np.zeros(0, np.int32)])
            columns[f"{key}_offsets"] = np.cumsum([0, *map(len, values)])
        elif kind in NUMBERS:
            columns[key] = np.array([NONE.get(kind) if value is None else value for value in values], NUMBERS[kind])
        else:
            plain[key] = values
    rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
    parts = {"numbers": json.dumps(dict(saved.numbers), sort_keys=True)}
    parts |= {"problems": "[" + ",\n".join(problems) + "]", "rows": "[" + ",\n".join(map(json.dumps, rows)) + "]"}
    text = ",\n".join(f'"{key}": {value}' for key, value in parts.items())
    (pathlib.Path(folder) / f"{name}.json").write_text("{" + text + "}\n", encoding="utf-8")
    np.savez(pathlib.Path(folder) / f"{name}.npz", **columns)


def read_saved(folder: str, name: str, record: type) -> Saved:
    """Returns what `write_saved` was given.

    Raises:
      NotAsSaved: a file is absent or damaged, or of other records; names it.
    """
    path = pathlib.Path(folder)
    with as_saved(path / f"{name}.json"):
        content = json.loads((path / f"{name}.json").read_text(encoding="utf-8"))
        problems = [Problem(**fields | {"prompt_ids": as_ids(fields["prompt_ids"])}) for fields in content["problems"]]
        numbers = saved_counts(content["numbers"], dict.fromkeys(content["numbers"], 0))
    with as_saved(path / f"{name}.npz"):
        with np.load(path / f"{name}.npz", allow_pickle=False) as arrays:
            columns = dict(arrays.items())
        values = {}
        for key, kind in typing.get_type_hints(record).items():
            if kind is Problem:
                values[key] = [problems[place] for place in _checked(columns[key], np.int64, 0, len(problems)).tolist()]
            elif kind is Ids:
                values[key] = _split(_checked(columns[key], np.int32), columns[f"{key}_offsets"])  # marks are negative
            elif kind in NUMBERS:
                values[key] = _checked(columns[key], NUMBERS[kind]).tolist()
                if kind in NONE:
                    values[key] = [None if value == NONE[kind] or value != value else value for value in values[key]]
        if len(lengths := {len(column) for column in values.values()}) > 1:
            raise ValueError(f"columns of different lengths: {sorted(lengths)}")
    with as_saved(path / f"{name}.json"):
        plain = {key: kind for key, kind in typing.get_type_hints(record).items() if key not in values}
        for i, row in enumerate(content["rows"]):
            for key, kind in plain.items():
                if not isinstance(row[key], typing.get_origin(kind) or kind) or row.keys() != plain.keys():
                    raise ValueError(f"row {i}: {key} is {row[key]!r}, expected {kind.__name__}")
        if plain:
            values |= {key: [row[key] for row in content["rows"]] for key in plain}
        columns = zip(*values.values(), strict=True)
        return Saved([record(**dict(zip(values, row, strict=True))) for row in columns], numbers)


def saved_counts(found: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    """Saved counters, all of those that are known.

    Raises:
      ValueError: a name is unknown or missing, or a value no whole number >= 0.
    """
    if wrong := [name for name, value in found.items() if name not in known or type(value) is not int or value < 0]:
        raise ValueError(f"the counter {wrong[0]} is {found[wrong[0]]!r}")
    if found.keys() != known.keys():
        raise ValueError(f"counters are missing: {sorted(known.keys() - found.keys())}")
    return dict(found)


def _checked(column: np.ndarray, kind: type, least: int | None = None, bound: int | None = None) -> np.ndarray:
    if column.dtype != kind or column.ndim != 1:
        raise ValueError(f"a column of {column.dtype}{list(column.shape)}, expected {np.dtype(kind)}")
    if len(column) and ((least is not None and column.min() < least) or (bound is not None and column.max() >= bound)):
        raise ValueError(f"numbers from {column.min()} to {column.max()}, expected at least {least} and below {bound}")
    return column


def _split(values: np.ndarray, offsets: np.ndarray) -> list[Ids]:
    """Each list as a buffer of its own: a view would keep the whole file in memory."""
    if _checked(offsets, np.int64)[[0, -1]].tolist() != [0, len(values)] or (np.diff(offsets) < 0).any():
        raise ValueError("lists of token ids are not where their offsets say")
    lists = [values[start:stop].copy() for start, stop in itertools.pairwise(offsets.tolist())]
    for ids in lists:
        ids.flags.writeable = False
    return lists


def _problem_text(problem: Problem) -> str:
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    try:
        return json.dumps(fields | {"prompt_ids": problem.prompt_ids.tolist(), "extra": dict(problem.extra)})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"problems must be JSON-serialisable to be saved, but row {problem.index} of {problem.data_source!r} is not: {error}"
        ) from error
