"""What lies on the disk: the record of a run (`<run>/config.json`), and the saved forest that a path stands for.

The record has the configuration, versions, source state and machine, and is compared when the run is resumed. A path to a forest
is a run's folder (its newest complete step), the folder of one step, or a saved forest itself: the `curriculum` folder of a step,
or what `python -m deepgrpo.forest` writes. Only JSON is read, and the forest's own files are compared with the step's manifest:
gigabytes of weights beside them are not.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from deepgrpo.config.errors import ConfigError
from deepgrpo.config.flags import ROOT, CommandLine, flatten

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "safetensors", "transformers", "tokenizers"),
    *("ml-collections", "openai", "httpx", "math-verify", "pyarrow"),
)

ENDPOINT = "base_url api_key_env timeout max_concurrent replay token_budget prices"
HARMLESS = {  # by section, the keys that a resumed run may change, as they do not reach the parameters; *: all
    "": "run_dir compilation_cache requires_accelerator",
    "train": "epochs steps student_tokens",
    "model": "origin",
    "data": "origin validation validation_limit selection",
    "rewards": "workers deadline",
    "curriculum": "start_from",
    "sandbox": "allow_network",
    "learner": "coordinator process",
    **dict.fromkeys(("teacher", "judge"), ENDPOINT),
    **dict.fromkeys(("vllm", "weights", "validation", "evaluation", "checkpoint", "telemetry", "diagnostics"), "*"),
}
NOT_HARMLESS = ("vllm.extra_args",)
LENGTH = ("train.epochs", "train.steps")  # not harmless when the learning rate depends on the run's length
RESTARTS_KEPT = 100


def run_folder(config: config_dict.ConfigDict) -> pathlib.Path:
    return pathlib.Path(config.run_dir) / config.name


def write_resolved(config: config_dict.ConfigDict, line: CommandLine, resuming: bool, devices: Sequence[str]) -> list[str]:
    """Writes `<run>/config.json`; returns what differs from the run that is resumed, a line each, for the log.

    resuming: the run folder has a checkpoint that will be loaded. devices: names of the accelerators, one each.

    Raises:
      ConfigError: the resumed run has another value of a key that would make it a different run.
    """
    path, accepted = run_folder(config) / "config.json", config.checkpoint.accept_changes
    record = {
        "config": json.loads(json.dumps(flatten(config))),  # tuples become lists, as they will when read back
        "command_line": list(line.argv),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git_state(),
        "vocabulary": vocabulary.sha256 if (vocabulary := vocabulary_of_model(config.model.path)) else None,
        "host": {"name": platform.node(), "system": platform.platform(), "cpus": os.cpu_count(), "devices": list(devices)},
    }
    notes = []
    record["restarts"] = []
    if path.exists() and resuming:
        before = read_json(path)
        if (was := before.get("vocabulary")) != record["vocabulary"] and was and "vocabulary" not in accepted:
            raise ConfigError(
                f"run folder: the tokenizer in {config.model.path} numbers its tokens otherwise than when {path.parent} began,"
                " whose states and rollouts are of those numbers -> copy that tokenizer back, or choose another --config.name"
            )
        notes = differences(before, record, config)
        this = {key: record[key] for key in ("command_line", "started", "versions", "git", "host")} | {"changed": notes}
        record = before | {"config": record["config"], "restarts": [*before["restarts"], this][-RESTARTS_KEPT:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return notes


def began(config: config_dict.ConfigDict) -> str:
    """ISO time of the run's first start, from its record: what its prompts' chat template is told the date is, however often it
    is resumed."""
    return json.loads((run_folder(config) / "config.json").read_text(encoding="utf-8"))["started"]


def differences(before: dict[str, Any], now: dict[str, Any], config: config_dict.ConfigDict) -> list[str]:
    """Lists changed keys and package versions; refuses keys that would make the resumed run a different one."""
    old, new = before["config"], now["config"]
    changed = [key for key in (new | old) if key not in old or key not in new or old[key] != new[key]]
    lines = {key: f"{key}: {old.get(key, '(absent)')!r} -> {new.get(key, '(absent)')!r}" for key in changed}
    # A key that only one of them has came or went with a version of the program: said, not refused.
    refused = [key for key in changed if key in old and key in new and not harmless(key, config)]
    if refused:
        head = f"{run_folder(config)} was started with other values; resuming it would make a different run:"
        accept = ",".join([*config.checkpoint.accept_changes, *refused])
        raise ConfigError(
            "\n  ".join([head, *(lines[key] for key in refused)])
            + "\n   -> restore them, choose another --config.name, or go on with the new values by "
            + f"--config.checkpoint.accept_changes={accept}"
        )
    was = before["restarts"][-1]["versions"] if before["restarts"] else before["versions"]
    upgraded = [f"{name}: {was.get(name)} -> {version}" for name, version in now["versions"].items() if was.get(name) != version]
    return list(lines.values()) + upgraded


def harmless(key: str, config: config_dict.ConfigDict) -> bool:
    if key in config.checkpoint.accept_changes:
        return True
    if key in NOT_HARMLESS or (key in LENGTH and config.optim.schedule != "constant"):
        return False
    section, _, name = key.rpartition(".")
    return any(known in (name, "*") for known in HARMLESS.get(section, "").split())


def versions() -> dict[str, str | None]:
    """Versions of Python, this project and the packages that can change a number; None for one that is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict[str, Any]:
    """Commit of the source tree and the tracked files that differ from it; None where git or its history is missing."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        modified = git("status", "--porcelain", "--untracked-files=no").splitlines()
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(modified), "modified": [entry[3:] for entry in modified[:50]]}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None, "modified": []}


#### Saved forests

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
    step = path.parent if (path / HEADER).is_file() else path  # the step that the path is, or that it is the forest of
    if (step / MANIFEST).is_file():
        steps = [step]
    elif step != path:
        return Place(path)
    elif (path / "checkpoints").is_dir():
        steps = [entry for entry in (path / "checkpoints").iterdir() if entry.name.isdecimal()]
    else:
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:12]) or "nothing"
        raise ValueError(f"{given}: found {names}; {EXPECTED}")
    defects = []
    for step in sorted(steps, key=lambda step: int(step.name) if step.name.isdecimal() else -1, reverse=True):
        problem = defect(step)
        if problem is None:
            run = step.parent.parent
            return Place(step / CURRICULUM, int(step.name), run if (run / "config.json").is_file() else None)
        defects.append(f"{step}: {problem}")
    raise ValueError(f"{given}: no complete step with a forest ({'; '.join(defects) or 'there is none'})")


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
