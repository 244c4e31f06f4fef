"""Where a benchmark's files are: in a folder under their usual names, at a path, or on the Hugging Face hub."""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping

from deepgrpo.data import cells, tables

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

    rows: list[tables.Row]
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
    return Found(tables.read(str(path), columns), path, digests(path))


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
    files = tables.files_of(path)
    return {file.name: sha256(file) for file in files}


def sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
