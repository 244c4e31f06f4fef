"""Rows out of files: JSON Lines, JSON, Parquet, and what Hugging Face's `save_to_disk` wrote (read without their library).

A benchmark's files are found in a folder under their usual names, at a path, or on the Hugging Face hub.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from deepgrpo.data import cells
from deepgrpo.data.cells import DataError, Schema, check, problem, refuse

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
SIGNATURES = (  # first bytes of what is often found in the place of a data file: what it is, and what to do
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull in its repository, or hf download"),
    (b"\x1f\x8b", "compressed with gzip", "gunzip -c {file} > NEW{suffix}"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -dc {file} > NEW{suffix}"),
    (b"BZh", "compressed with bzip2", "bunzip2 -c {file} > NEW{suffix}"),
    (b"\xfd7zXZ", "compressed with xz", "xz -dc {file} > NEW{suffix}"),
    (b"PK\x03\x04", "a zip archive", "unzip {file}, and name the file that was in it"),
    (b"<!doctype html", "a web page, so the download failed", "download the file itself (its raw or resolve address)"),
    (b"<html", "a web page, so the download failed", "download the file itself (its raw or resolve address)"),
)
MARKS = (  # byte-order marks, the longer ones first
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
AGAIN = "get the file again; it is cut off or damaged"


def read(path: str, schema: Mapping[str, Schema]) -> list[Row]:
    """All rows of a file or folder, whose cells are what `schema` says; columns that it does not name are not looked at.

    Raises:
      FileNotFoundError: nothing there. DataError: not readable, empty, without a needed column, or
        with cells of another kind. Each says what was found and what was expected.
    """
    rows: list[Row] = []
    for file in files_of(pathlib.Path(path)):
        found = _rows(file)
        check(found, schema, file)
        rows += found
    if not rows:
        raise DataError(f"data: {path} has no rows", "get the file again, or leave this data set out")
    return rows


def files_of(place: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the rows of a file, a folder, or a pattern of Parquet shards (`train-*.parquet`).

    Raises:
      FileNotFoundError: no such path. DataError: a folder without data or with several splits, or a file of unknown type.
    """
    if "*" in place.name and (shards := sorted(place.parent.glob(place.name))):
        return shards
    if not place.exists():
        raise FileNotFoundError(f"data: {place} does not exist (from {pathlib.Path.cwd()}). Correct the path of this data set")
    if place.is_dir():
        return _files_of_folder(place)
    if place.suffix not in SUFFIXES:
        _refuse_other_content(place)
        convert = f"pyarrow.parquet.write_table(pyarrow.csv.read_csv('{place}'), '{place.with_suffix('.parquet')}')"
        csv = f'python -c "import pyarrow.csv, pyarrow.parquet; {convert}"'
        remedy = csv if place.suffix == ".csv" else "convert it to one of these, or correct its name"
        raise DataError(f"data: {place} is of unknown type {place.suffix!r}; expected {', '.join(SUFFIXES)} or a folder", remedy)
    return [place]


def _files_of_folder(path: pathlib.Path) -> list[pathlib.Path]:
    """A data set saved by `save_to_disk` (state.json names its Arrow files), or the Parquet shards of one split."""
    names = sorted(p.name for p in path.iterdir())
    if "dataset_dict.json" in names:
        splits = listed(path / "dataset_dict.json", "splits")
        several = " or ".join(str(path / str(split)) for split in splits)
        raise DataError(f"data: {path} holds several splits; name one: {several}", "name one split's folder")
    if "state.json" in names:
        files = listed(path / "state.json", "_data_files")
        return [path / str(file["filename"] if isinstance(file, dict) and "filename" in file else file) for file in files]
    shards = [name for name in names if name.endswith(".parquet")]
    if len({name.split("-")[0].removesuffix(".parquet") for name in shards}) > 1:
        found = ", ".join(shards[:8])
        raise DataError(f"data: {path} holds Parquet files of several splits; name one: {found}", "name one split's files")
    if not shards:
        expected = f"no data set in {path}: expected state.json (save_to_disk) or *.parquet"
        raise DataError(f"data: {expected}, found {', '.join(names[:20]) or 'nothing'}", "name a file in it, or another folder")
    return [path / name for name in shards]


def document(path: pathlib.Path, schema: Mapping[str, Schema]) -> Row:
    """One JSON object, such as a result or its settings.

    Raises:
      DataError: it cannot be read, or is not what the schema says.
    """
    _refuse_other_content(path)
    found, defect = _parsed(_decode(path))
    if defect or not isinstance(found, dict):
        raise DataError(f"data: {path} {f'is not JSON ({defect})' if defect else _no_object(found)}", AGAIN)
    refuse(path, [text for name, part in schema.items() if (text := problem(found.get(name), part, name))], AGAIN)
    return found


def listed(path: pathlib.Path, key: str) -> list[Any]:
    """The list that a saved data set's JSON file holds under `key`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"data: {path} has no list {key} ({type(error).__name__}: {error})", AGAIN) from error
    if not isinstance(found, list):
        raise DataError(f"data: {path} has no list {key}", AGAIN)
    return found


def _rows(file: pathlib.Path) -> list[Row]:
    """The rows of one file, as its suffix says."""
    _refuse_other_content(file)
    if file.suffix in (".parquet", ".arrow"):
        return _table(file)
    text = _decode(file).replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"(?m)^\ufeff", "", text).lstrip()  # files with a mark, one behind the other
    return _list(text, file) if text.startswith("[") else _lines(text, file)


def _refuse_other_content(file: pathlib.Path) -> None:
    """Refuses what is no regular file with content of its type, and says what it is."""
    if not file.is_file():
        raise DataError(f"data: {file} is not a file", "name a data file, or a folder of Parquet shards")
    try:
        with open(file, "rb") as opened:
            head = opened.read(64).lstrip()
    except OSError as error:
        raise DataError(
            f"data: {file} cannot be read: {error.strerror}", "correct its permissions, or name another file"
        ) from error
    if not head and not file.stat().st_size:
        raise DataError(f"data: {file} is empty (0 bytes)", AGAIN)
    for signature, what, remedy in SIGNATURES:
        if head.lower().startswith(signature.lower()):
            suffix = "".join(end for end in file.suffixes if end in SUFFIXES) or ".jsonl"
            raise DataError(f"data: {file} is {what}", remedy.format(file=shlex.quote(str(file)), suffix=suffix))
    if head.startswith((b"PAR1", b"ARROW1")) and file.suffix in (".jsonl", ".json"):
        suffix = ".parquet" if head.startswith(b"PAR1") else ".arrow"
        raise DataError(
            f"data: {file} holds {suffix[1:]} data",
            f"mv {shlex.quote(str(file))} {shlex.quote(str(file.with_suffix(suffix)))}, and name that",
        )


def _decode(file: pathlib.Path) -> str:
    """A file's text, which must be UTF-8, with or without a byte-order mark."""
    raw = file.read_bytes()
    other = next((name for mark, name in MARKS if raw.startswith(mark)), "")
    if not other and raw[:400].count(0) > len(raw[:400]) // 3:
        other = "UTF-16LE" if raw[1:2] == b"\0" else "UTF-16BE"
    names = [shlex.quote(str(name)) for name in (file, file.with_suffix(f".utf8{file.suffix}"))]
    convert = f"iconv -f {{}} -t UTF-8 {names[0]} > {names[1]}"
    if other:
        raise DataError(f"data: {file} is {other} text; expected UTF-8", convert.format(other))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, high = raw.count(b"\n", 0, error.start) + 1, sum(byte > 127 for byte in raw)
        western = high < len(raw) / 10  # other scripts use such bytes for most of their letters
        guess = "it looks like Latin-1 or Windows-1252" if western else "`file -i` may name its encoding"
        raise DataError(
            f"data: {file}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8; {guess}",
            convert.format("WINDOWS-1252" if western else "ENCODING"),
        ) from error


def _list(text: str, file: pathlib.Path) -> list[Row]:
    """One JSON list of objects."""
    found, defect = _parsed(text)
    if defect:
        raise DataError(f"data: {file} is not JSON ({defect}); expected one list of objects", AGAIN)
    wrong = [f"row {n} {_no_object(row)}" for n, row in enumerate(found) if not isinstance(row, dict)]
    refuse(file, wrong, "expected a list of objects, one a row")
    return found


def _lines(text: str, file: pathlib.Path) -> list[Row]:
    """JSON Lines."""
    rows, wrong = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also cut at U+2028 inside a string
        if line.strip():
            row, defect = _parsed(line)
            if defect or not isinstance(row, dict):
                wrong.append(f"line {number} " + (f"is not JSON ({defect})" if defect else _no_object(row)))
            else:
                rows.append(row)
    if wrong and not rows and isinstance(whole := _parsed(text)[0], dict):
        inner = next((name for name, value in whole.items() if isinstance(value, list)), None)
        remedy = (
            f"jq -c '.[\"{inner}\"][]' {shlex.quote(str(file))} > NEW.jsonl"
            if inner
            else "expected one object a line, or one list of objects"
        )
        raise DataError(
            f"data: {file} is one JSON object, with {', '.join(map(str, list(whole)[:8]))}; expected its rows", remedy
        )
    refuse(file, wrong, "expected one JSON object a line; correct these lines, or get the file again if it is cut off")
    return rows


def _no_object(value: Any) -> str:
    return f"holds a {type(value).__name__}, expected an object"


class _Twice(ValueError):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields, of which Python's parser would silently keep the last of equal names."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"{next(name for name in found if names.count(name) > 1)!r} stands twice in one object")
    return found


def _parsed(text: str) -> tuple[Any, str]:
    """A JSON text's value, and what is wrong with it."""
    try:
        return json.loads(text, object_pairs_hook=_once), ""
    except json.JSONDecodeError as error:
        return None, f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        return None, "it is nested too deeply"
    except ValueError as error:  # a name that stands twice, a number of more digits than Python reads
        return None, str(error).partition(";")[0]


def _table(file: pathlib.Path) -> list[Row]:
    """Parquet, or what Hugging Face's library writes: a stream of Arrow record batches."""
    import pyarrow  # a second to import, for those who have such files
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as opened:  # not read_table, which takes folders named KEY=VALUE for columns
                table = opened.read()
        else:
            with pyarrow.memory_map(str(file)) as source:
                try:
                    table = pyarrow.ipc.open_stream(source).read_all()
                except pyarrow.ArrowInvalid:
                    table = pyarrow.ipc.open_file(source).read_all()
        twice = [name for name in dict.fromkeys(table.column_names) if table.column_names.count(name) > 1]
        rows = table.to_pylist() if not twice else []
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"data: {file} is not a readable {file.suffix[1:]} file ({reason})", AGAIN) from error
    if twice:
        raise DataError(f"data: {file} has the column {', '.join(twice)} twice", "rename or drop one of them")
    return rows


_DATA_FILES = ("*.parquet", "*.arrow", "*.jsonl", "*.json", "*.txt", "*.md", "*.csv")
_HELD_OUT = re.compile(r"(?:^|[^a-z])(?:test|dev|val|valid|validation|eval|evaluation|heldout)(?![a-z])")
_BENCHMARKS = frozenset("aime aime24 amc amc23 math500 minerva olympiadbench bamboogle".split())  # which are nothing but tests


@dataclasses.dataclass(frozen=True)
class Split:
    """One file that a benchmark comes in.

    names: where it lies in a source folder, patterns allowed, the usual one first. rows: its official number; 0: none is known.
    train: meant for training, so that a test file in its place is refused.
    """

    names: tuple[str, ...]
    rows: int = 0
    train: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """Rows of one split, the file or folder they came from, and the sha256 of every file read."""

    rows: list[Row]
    path: pathlib.Path
    files: Mapping[str, str]


def open_source(source: str, revision: str | None = None) -> pathlib.Path:
    """The local file or folder that `source` stands for; OWNER/NAME, if there is no such path, is fetched from the hub.

    Raises:
      FileNotFoundError: no such path. ConnectionError: the hub did not give it; says how to do without.
    """
    path = pathlib.Path(source).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) or path.suffix in (".jsonl", ".json", ".parquet", ".arrow"):
        raise FileNotFoundError(f"source: {source} does not exist (from {pathlib.Path.cwd()}), nor is it a hub name (OWNER/NAME)")
    return pathlib.Path(fetch(source, revision))


def fetch(repository: str, revision: str | None) -> str:
    """Downloads a data set repository's files (cached by huggingface_hub) and returns their folder."""
    remedy = (
        f"on a machine with a connection: hf download {repository} --repo-type dataset --local-dir FOLDER, copy FOLDER here and "
        "give it as --source"
    )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConnectionError(
            f"source: {repository} is no local path; to fetch it: pip install huggingface_hub. Or, {remedy}"
        ) from error
    try:
        return huggingface_hub.snapshot_download(
            repository, repo_type="dataset", revision=revision, allow_patterns=list(_DATA_FILES), etag_timeout=10
        )
    except Exception as error:  # offline, unknown repository, no permission: the client has a type for each
        raise ConnectionError(
            f"source: {repository} is no local path and the Hugging Face hub did not give it ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}). {remedy[0].upper() + remedy[1:]}"
        ) from error


def load(
    place: pathlib.Path, name: str, split: Split, only: bool, columns: Mapping[str, cells.Schema], allow_test: bool = False
) -> Found:
    """The rows of one split.

    Args:
      place: a file, a saved data set, or a folder that holds the split under one of its names.
      name: of the split. only: no other split is wanted, so that `place` may be the split itself.

    Raises:
      FileNotFoundError: not there; says what was looked for. ValueError: ambiguous, unreadable, or a test file for training.
    """
    path = locate(place, name, split, only)
    if split.train and not allow_test and held_out(path):
        raise ValueError(
            f"source: {path} is a test or validation file by its name and would become training data. Give the official training "
            f"file (--split {name}=PATH), or say --allow-test-as-train if that is what you want"
        )
    return Found(read(str(path), columns), path, digests(path))


def locate(place: pathlib.Path, name: str, split: Split, only: bool) -> pathlib.Path:
    """The file or folder of a split, as `load` takes it."""
    if not place.exists():
        raise FileNotFoundError(f"source: {place} does not exist (from {pathlib.Path.cwd()})")
    if place.is_file():
        if not only:
            raise ValueError(f"source: {place} is one file, several splits are wanted: name one (--split {name}) or a folder")
        return place
    if (place / "dataset_dict.json").is_file():
        known = json.loads((place / "dataset_dict.json").read_text())["splits"]
        if chosen := [known_name for known_name in (name, *split.names) if known_name in known]:
            return place / chosen[0]
    if (place / "state.json").is_file():
        if not only:
            raise ValueError(f"source: {place} is one saved split, several are wanted: name one (--split {name})")
        return place
    for pattern in split.names:
        found = sorted(path for path in place.glob(pattern) if path.suffix or path.is_dir())
        if len(found) == 1:
            inner = found[0] / "dataset_dict.json"
            return locate(found[0], name, split, only=True) if inner.is_file() else found[0]
        if len(found) > 1:
            shards = {re.sub(r"-\d+-of-\d+(?=\.)", "", path.name) for path in found}
            if len(shards) == 1 and found[0].suffix == ".parquet":
                return found[0].parent / pathlib.Path(pattern).name
            raise ValueError(
                f"source: several files could be {name}: {', '.join(map(str, found[:6]))}. Choose: --split {name}=PATH"
            )
    there = ", ".join(sorted(path.name for path in place.iterdir())[:15]) or "nothing"
    raise FileNotFoundError(
        f"source: no {name} split in {place}: looked for {', '.join(split.names)}, found {there}. Say where it is (--split "
        f"{name}=PATH), or name only the splits that you want (--split OTHER)"
    )


def held_out(path: pathlib.Path) -> bool:
    """Whether a file's name, or its folder's if the file is a split of a saved set, says that it is for testing."""
    name = path.name.lower()
    return bool(_HELD_OUT.search(name)) or re.sub(r"[-_]", "", name.split(".")[0]) in _BENCHMARKS


def digests(path: pathlib.Path) -> dict[str, str]:
    """{file name: sha256} of a file, or of the data files of a folder or a pattern."""
    files = files_of(path)
    return {file.name: sha256(file) for file in files}


def sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
