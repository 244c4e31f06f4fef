"""Finding a run's checkpoints from outside of it: which step, which model it started from, how it was selected."""

import json
import pathlib
from typing import Any

from deepgrpo.weights.checkpoint import MANIFEST, CheckpointError, Checkpoints, defect


def step_folder(checkpoint: pathlib.Path, best: bool) -> pathlib.Path:
    """The folder of one complete step that `checkpoint`, a run or a step, stands for."""
    if (checkpoint / MANIFEST).is_file():
        if best:
            raise CheckpointError(f"{checkpoint} is one step already; --best needs the run's folder")
        folder = checkpoint.absolute()
    else:
        steps = checkpoint.absolute() / "checkpoints"
        step = best_step(checkpoint) if best else Checkpoints(steps, keep=1, save_best=False, best_metric="").latest_step()
        if step is None:
            raise CheckpointError(
                f"{checkpoint}: no complete checkpoint, expected <step>/{MANIFEST} there or in its checkpoints/"
            )
        folder = steps / str(step)
    if problem := defect(folder, hashes=True):
        raise CheckpointError(f"{folder}: cannot be used: {problem}")
    return folder


def best_step(run: pathlib.Path) -> int:
    path = run / "best_checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found, no validation has competed in this run. Leave out --best for the newest checkpoint"
        )
    return json.loads(path.read_text(encoding="utf-8"))["step"]


def record_of(folder: pathlib.Path) -> dict[str, Any]:
    """The configuration of the run of this step folder, by dotted key, as the run wrote it down."""
    record = folder.parent.parent / "config.json"
    if not record.is_file():
        raise FileNotFoundError(
            f"{record}: not found, so the model the run started from is unknown: name its folder with --model"
        )
    return json.loads(record.read_text(encoding="utf-8"))["config"]


def starting_model(folder: pathlib.Path) -> pathlib.Path:
    """The Hugging Face folder that the run of this step folder started from, by the run's own record."""
    model = pathlib.Path(record_of(folder)["model.path"])
    if not model.is_dir():
        raise FileNotFoundError(
            f"{model}, where {folder.parent.parent} says the run started from, is not there: name its folder with --model"
        )
    return model


def selected_on(folder: pathlib.Path) -> list[str]:
    """Data sets that this step was chosen on as the run's best; none if it is not the best.

    A step that is the best and the newest counts as chosen: whoever looks at it may have looked because of its score.
    """
    path = folder.parent.parent / "best_checkpoint.json"
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8"))["step"] != int(folder.name):
        return []
    try:
        config = record_of(folder)
    except FileNotFoundError:
        return ["unknown: the run's record is gone"]
    return list(config.get("data.selection") or config["data.validation"])
