"""A saved curriculum's header (which pool wrote the folder, in which version), and the refusal of what is not as it was saved."""

import contextlib
import json
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

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


def read_columns(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The columns of an npz file: of equal length, and every list of tokens where its offsets say.

    Raises:
      NotAsSaved: they are not.
    """
    with as_saved(path):
        with np.load(path, allow_pickle=False) as arrays:
            columns = dict(arrays.items())
        lengths = set()
        for name, column in columns.items():
            if f"{name}_offsets" in columns:
                offsets = columns[f"{name}_offsets"]
                ends = [int(offsets[0]), int(offsets[-1])]
                if ends != [0, len(column)] or (np.diff(offsets) < 0).any() or (len(column) and column.min() < 0):
                    raise ValueError(f"the lists of {name} are not where their offsets say, or hold what is no token")
            else:
                lengths.add(len(column) - name.endswith("_offsets"))
        if len(lengths) > 1:
            raise ValueError(f"columns of different lengths: {sorted(lengths)}")
    return columns


def saved_counts(found: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    """Saved counters over those that are known, which an older snapshot may lack.

    Raises:
      ValueError: a name is unknown, or a value no whole number >= 0.
    """
    for name, value in found.items():
        if name not in known or type(value) is not int or value < 0:
            raise ValueError(f"the counter {name} is {value!r}")
    return {**known, **found}
