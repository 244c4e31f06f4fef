"""Rows out of files: JSON Lines, JSON, Parquet, and what Hugging Face's `save_to_disk` wrote (read without their library)."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def read(path: str, columns: Sequence[str]) -> list[Row]:
    """All rows of a file or folder, which must have `columns`.

    Raises:
      FileNotFoundError: nothing there, or a folder without data. ValueError: not readable, empty, or without a needed column.
        Each says what was found and what was expected.
    """
    files = files_of(pathlib.Path(path))
    rows = _parquet(files) if files[0].suffix == ".parquet" else _arrow(files) if files[0].suffix == ".arrow" else _text(files[0])
    if not rows:
        raise ValueError(f"data: {path} has no rows")
    for number, row in enumerate(rows):
        if missing := [column for column in columns if column not in row]:
            raise ValueError(
                f"data: {path}, row {number} lacks {', '.join(missing)}; it has {', '.join(row) or 'no columns'}. This reader "
                f"needs {', '.join(columns)}: rename the columns or choose another reader (the NAME of NAME:PATH)"
            )
    return rows


def files_of(place: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the rows of a file, a folder, or a pattern of Parquet shards (`train-*.parquet`).

    Raises:
      FileNotFoundError: there are none. ValueError: a folder of several splits, or a file of unknown type.
    """
    if "*" in place.name and (shards := sorted(place.parent.glob(place.name))):
        return shards
    if not place.exists():
        raise FileNotFoundError(f"data: {place} does not exist (from {pathlib.Path.cwd()}). Correct the path of this data set")
    if place.is_dir():
        return _files_of_folder(place)
    if place.suffix not in (".jsonl", ".json", ".parquet", ".arrow"):
        raise ValueError(
            f"data: {place} is of unknown type {place.suffix!r}; expected .jsonl, .json, .parquet, .arrow or a folder"
        )
    return [place]


def _files_of_folder(path: pathlib.Path) -> list[pathlib.Path]:
    """A data set saved by `save_to_disk` (state.json names its Arrow files), or the Parquet shards of one split."""
    names = sorted(p.name for p in path.iterdir())
    if "dataset_dict.json" in names:
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"data: {path} holds several splits; name one: {' or '.join(str(path / split) for split in splits)}")
    if "state.json" in names:
        return [path / file["filename"] for file in json.loads((path / "state.json").read_text())["_data_files"]]
    shards = [name for name in names if name.endswith(".parquet")]
    if len({name.split("-")[0].removesuffix(".parquet") for name in shards}) > 1:
        raise ValueError(f"data: {path} holds Parquet files of several splits; name one: {', '.join(shards[:8])}")
    if not shards:
        raise FileNotFoundError(
            f"data: no data set in {path}: expected state.json (save_to_disk) or *.parquet, "
            f"found {', '.join(names[:20]) or 'nothing'}"
        )
    return [path / name for name in shards]


def _text(path: pathlib.Path) -> list[Row]:
    """JSON Lines, or one JSON list."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {path} is not JSON ({error}); expected one list of objects") from error
        wrong = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)
        if wrong is not None:
            raise ValueError(f"data: {path}, item {wrong} holds a {type(rows[wrong]).__name__}; expected a list of objects")
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also cut at U+2028 inside a string
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"data: {path}, line {number} is not JSON ({error}); expected one object a line") from error
            if not isinstance(rows[-1], dict):
                raise ValueError(f"data: {path}, line {number} holds a {type(rows[-1]).__name__}; expected an object")
    return rows


def _parquet(paths: Sequence[pathlib.Path]) -> list[Row]:
    import pyarrow.parquet  # a second to import, for those who have such files

    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


def _arrow(paths: Sequence[pathlib.Path]) -> list[Row]:
    import pyarrow

    rows: list[Row] = []
    for path in paths:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_stream(source)  # what Hugging Face's library writes
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
            rows += reader.read_all().to_pylist()
    return rows
