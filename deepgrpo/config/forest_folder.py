"""Finds the saved forest that a path stands for, and the vocabulary that its token ids are of.

A path is a run's folder (its newest complete step), the folder of one step, or a saved forest itself: the `curriculum` folder
of a step, or what `python -m deepgrpo.forest` writes. Only JSON is read, and the forest's own files are compared with the step's
manifest: gigabytes of weights beside them are not.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

POOL = "forest"
FILES = ("trees.npz", "nodes.npz", "events.npz")
HEADER, MANIFEST, VOCABULARY = "curriculum.json", "manifest.json", "vocabulary.json"
CURRICULUM = "curriculum"  # a step's folder of the pool
EXPECTED = "expected a run's folder, the folder of one of its steps, or a saved forest"


@dataclasses.dataclass(frozen=True)
class Place:
    """A saved forest.

    folder: holds the forest's files. step: of the checkpoint that it is part of, None outside of one.
    run: the run's folder, with its config.json; None if there is none.
    """

    folder: pathlib.Path
    step: int | None = None
    run: pathlib.Path | None = None


def find(path: str | pathlib.Path) -> Place:
    """The forest that `path` stands for.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: no complete forest there, or another pool's state; says what was found.
    """
    given = pathlib.Path(path)
    if not given.is_dir():
        raise FileNotFoundError(f"{given}: no such folder; {EXPECTED}")
    place = _place(given.absolute(), given)
    header = read_json(place.folder / HEADER)
    if header.get("pool") != POOL:
        raise ValueError(f"{place.folder}: saved by pool type {header.get('pool')!r}, expected {POOL!r}: it holds no forest")
    if absent := [name for name in FILES if not (place.folder / name).is_file()]:
        raise ValueError(f"{place.folder} lacks {', '.join(absent)}: it is no complete forest")
    return place


def _place(path: pathlib.Path, given: pathlib.Path) -> Place:
    if (path / HEADER).is_file():
        return _whole_step(path.parent) if (path.parent / MANIFEST).is_file() else Place(path)
    if (path / MANIFEST).is_file():
        return _whole_step(path)
    steps = path / "checkpoints"
    if not steps.is_dir():
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:12]) or "nothing"
        raise ValueError(f"{given}: found {names}; {EXPECTED}")
    defects = []
    for step in sorted((int(entry.name) for entry in steps.iterdir() if entry.name.isdecimal()), reverse=True):
        problem = defect(steps / str(step))
        if problem is None:
            return _step_place(steps / str(step))
        defects.append(f"{step}: {problem}")
    raise ValueError(f"{steps}: no complete step with a forest ({'; '.join(defects) or 'it is empty'})")


def _whole_step(folder: pathlib.Path) -> Place:
    if problem := defect(folder):
        raise ValueError(f"{folder}: cannot be used: {problem}")
    return _step_place(folder)


def _step_place(folder: pathlib.Path) -> Place:
    run = folder.parent.parent
    return Place(folder / CURRICULUM, int(folder.name), run if (run / "config.json").is_file() else None)


def defect(folder: pathlib.Path) -> str | None:
    """Why a step's folder is not complete, or its curriculum damaged; None if it can be used."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing, so it was never completed"
    try:
        manifest = read_json(path)
        step, files = manifest["step"], {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if folder.name != str(step):
        return f"it holds step {step}, expected a folder of that name"
    for name, (size, sha256) in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is {'of another size than when it was written' if file.is_file() else 'missing'}"
        if name.startswith(f"{CURRICULUM}/") and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            return f"{name} is damaged: its sha256 is another one than when it was written"
    if f"{CURRICULUM}/{HEADER}" not in files:
        return f"it has no {CURRICULUM}/{HEADER}"
    return None


#### Which tokenizer's ids


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """model: the folder that the tokenizer was taken from. sha256: of the pairs (id, token)."""

    model: str
    sha256: str


def vocabulary_of_model(model: str | pathlib.Path) -> Vocabulary | None:
    """The vocabulary of a Hugging Face folder; None if there is no tokenizer in it. Merges don't count: ids mean the same."""
    folder = pathlib.Path(model)
    if (folder / "tokenizer.json").is_file():
        numbered = tokens(read_json(folder / "tokenizer.json"))
    elif (folder / "vocab.json").is_file():
        added = folder / "added_tokens.json"
        numbered = read_json(folder / "vocab.json") | (read_json(added) if added.is_file() else {})
    elif (folder / "tokenizer.model").is_file():
        return Vocabulary(str(model), hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest())
    else:
        return None
    pairs = sorted((number, token) for token, number in numbered.items())
    return Vocabulary(str(model), hashlib.sha256(json.dumps(pairs).encode()).hexdigest())


def tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """{token: id} of a tokenizer.json; a Unigram vocabulary is a list of (token, score) in the order of the ids."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
    return known | {added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}


def vocabulary_of_forest(place: Place) -> Vocabulary | None:
    """What the forest says about itself, else the model of its run; None if neither tells."""
    if (place.folder / VOCABULARY).is_file():
        return Vocabulary(**read_json(place.folder / VOCABULARY))
    if place.run is None:
        return None
    model = read_json(place.run / "config.json")["config"]["model.path"]
    return vocabulary_of_model(model)


def write_vocabulary(folder: str | pathlib.Path, vocabulary: Vocabulary) -> None:
    text = json.dumps(dataclasses.asdict(vocabulary), indent=1, sort_keys=True)
    (pathlib.Path(folder) / VOCABULARY).write_text(text + "\n", encoding="utf-8")


def read_json(path: pathlib.Path) -> Any:
    """What a JSON file holds.

    Raises:
      ValueError: it is not JSON; names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error})") from error
