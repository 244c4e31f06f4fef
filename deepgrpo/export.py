"""Turns a checkpoint into a Hugging Face folder that transformers and vLLM load.

    python -m deepgrpo.export --checkpoint=runs/my-run --out=exported [--best] [--dtype=bfloat16] [--model=FOLDER]

`--checkpoint` is a run's folder (its newest complete checkpoint, with --best the one of the best validation) or one step's
folder. Config and tokenizer come from the model that the run started from. Works on the CPU, beside a running training.
"""

import argparse
import json
import pathlib

import jax

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import MANIFEST, CheckpointError, Checkpoints, defect, read_arrays


def export(
    checkpoint: pathlib.Path, out: pathlib.Path, model: pathlib.Path | None = None, dtype: str = "bfloat16", best: bool = False
):
    """Writes `out` and returns the step's folder that was exported.

    Raises:
      CheckpointError: no complete checkpoint there, or not one of this model.
      FileNotFoundError: the model that the run started from is not where it was.
    """
    folder = step_folder(checkpoint, best)
    model = model or starting_model(folder)
    config = ModelConfig.from_hf(model)
    hf.save(read_arrays(folder, abstract_params(config), "params."), config, out, dtype, tokenizer_from=model)
    return folder


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
        raise CheckpointError(f"{folder}: cannot be exported: {problem}")
    return folder


def best_step(run: pathlib.Path) -> int:
    path = run / "best_checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found, no validation has competed in this run. Leave out --best for the newest checkpoint"
        )
    return json.loads(path.read_text(encoding="utf-8"))["step"]


def starting_model(folder: pathlib.Path) -> pathlib.Path:
    """The Hugging Face folder that the run of this step folder started from, by the run's own record."""
    record = folder.parent.parent / "config.json"
    if not record.is_file():
        raise FileNotFoundError(
            f"{record}: not found, so the model the run started from is unknown: name its folder with --model"
        )
    model = pathlib.Path(json.loads(record.read_text(encoding="utf-8"))["config"]["model.path"])
    if not model.is_dir():
        raise FileNotFoundError(f"{model}, where {record} says the run started from, is not there: name its folder with --model")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deepgrpo.export", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True, help="folder of a run, or of one of its steps")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--best", action="store_true", help="of a run, the step of the best validation instead of the newest")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--model", type=pathlib.Path, help="Hugging Face folder the run started from (default: the run's record)")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy training
    try:
        folder = export(args.checkpoint, args.out, args.model, args.dtype, args.best)
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{folder} -> {args.out}")


if __name__ == "__main__":
    main()
