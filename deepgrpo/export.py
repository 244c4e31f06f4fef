"""Turns a checkpoint into a Hugging Face folder that transformers and vLLM load.

    python -m deepgrpo.export --checkpoint=runs/my-run --out=exported [--best] [--dtype=bfloat16] [--model=FOLDER]

`--checkpoint` is a run's folder (its newest complete checkpoint, with --best the one of the best validation) or one step's
folder. Config and tokenizer come from the model that the run started from. Works on the CPU, beside a running training.
"""

import argparse
import pathlib

import jax

from deepgrpo.config.streams import tool
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import read_arrays
from deepgrpo.weights.run_folder import require_vocabulary, starting_model, step_folder


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
    require_vocabulary(folder, model)
    config = ModelConfig.from_hf(model)
    hf.save(read_arrays(folder, abstract_params(config), "params."), config, out, dtype, tokenizer_from=model)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deepgrpo.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True, help="folder of a run, or of one of its steps")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--best", action="store_true", help="of a run, the step of the best validation instead of the newest")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--model", type=pathlib.Path, help="Hugging Face folder the run started from (default: the run's record)")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy training
    with tool():
        folder = export(args.checkpoint, args.out, args.model, args.dtype, args.best)
        print(f"{folder} -> {args.out}")


if __name__ == "__main__":
    main()
