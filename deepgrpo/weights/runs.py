"""Finding a run's checkpoints from outside of it: which step, which model it started from, how it was selected."""

import difflib
import pathlib
from typing import Any

from deepgrpo.config.folders import read_json, vocabulary_of_model
from deepgrpo.weights.checkpoint import MANIFEST, CheckpointError, Checkpoints, defect

EXPECTED = f"expected a run's folder (with checkpoints/<step>/{MANIFEST}) or one of its steps (with {MANIFEST})"


def step_folder(checkpoint: pathlib.Path, best: bool) -> pathlib.Path:
    """The folder of one complete step that `checkpoint`, a run or a step, stands for."""
    if not checkpoint.is_dir():
        near = difflib.get_close_matches(checkpoint.name, names(checkpoint.parent), n=1)
        hint = f"did you mean {checkpoint.parent / near[0]}? " if near else ""
        raise CheckpointError(f"{checkpoint}: no such folder; {hint}{EXPECTED[0].upper()}{EXPECTED[1:]}")
    if (checkpoint / MANIFEST).is_file():
        if best:
            raise CheckpointError(f"{checkpoint} is one step already; --best needs the run's folder")
        folder = checkpoint.absolute()
    else:
        steps = checkpoint.absolute() / "checkpoints"
        step = best_step(checkpoint) if best else Checkpoints(steps, keep=1).latest_step()
        if step is None:
            raise CheckpointError(f"{checkpoint}: no complete checkpoint; {EXPECTED}, found {contents(checkpoint)}")
        folder = steps / str(step)
    if problem := defect(folder, hashes=True):
        raise CheckpointError(f"{folder}: cannot be used: {problem}")
    return folder


def names(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def contents(folder: pathlib.Path) -> str:
    """What is in it, for messages."""
    found = names(folder)
    return ", ".join(found[:12]) + (", ..." if len(found) > 12 else "") or "nothing"


def best_step(run: pathlib.Path) -> int:
    path = run / "best_checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found, no validation has competed in this run. Leave out --best for the newest checkpoint"
        )
    step = read_json(path)
    if not isinstance(step, dict) or not isinstance(step.get("step"), int):
        raise CheckpointError(f"{path} names no step: it is damaged. Leave out --best, or name the step's folder")
    return step["step"]


def record_of(folder: pathlib.Path) -> dict[str, Any]:
    """What the run of this step folder wrote down: `config` by dotted key, the time when it `started`, ..."""
    record = folder.parent.parent / "config.json"
    if not record.is_file():
        raise FileNotFoundError(
            f"{record}: not found, so the model the run started from is unknown: name its folder with --model"
        )
    found = read_json(record)
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise CheckpointError(f"{record} is no record of a run: name the model's folder with --model")
    return found


def starting_model(folder: pathlib.Path) -> pathlib.Path:
    """The Hugging Face folder that the run of this step folder started from, by the run's own record."""
    model = pathlib.Path(record_of(folder)["config"]["model.path"])
    if not model.is_dir():
        raise FileNotFoundError(
            f"{model}, where {folder.parent.parent} says the run started from, is not there: name its folder with --model"
        )
    return model


def require_vocabulary(folder: pathlib.Path, model: pathlib.Path) -> None:
    """Raises CheckpointError if `model` is known to number tokens otherwise than the model that this step's run started from."""
    try:
        before = starting_model(folder)
    except FileNotFoundError:
        return  # nothing to compare with: the shapes of the arrays have to tell
    theirs, given = vocabulary_of_model(before), vocabulary_of_model(model)
    if theirs and given and theirs.sha256 != given.sha256:
        raise CheckpointError(
            f"--model={model}: its tokenizer has another vocabulary than {before}, which the run of {folder} started from. "
            "Leave out --model, or name a copy of that model"
        )


def selected_on(folder: pathlib.Path) -> list[str]:
    """Data sets that this step was chosen on as the run's best; none if it is not the best.

    A step that is the best and the newest counts as chosen: whoever looks at it may have looked because of its score.
    """
    path = folder.parent.parent / "best_checkpoint.json"
    if not path.is_file() or best_step(path.parent) != int(folder.name):
        return []
    try:
        config = record_of(folder)["config"]
    except FileNotFoundError:
        return ["unknown: the run's record is gone"]
    return list(config.get("data.selection") or config["data.validation"])
