"""Every variant of the method on the demo's task, at equal student tokens: one table.

    python -m benchmarks.variants [--seeds 3] [--tokens 500000] [--arms plain forest ...] [--runs runs/variants]

Arms are those of configs/ablations.py. The real program trains each in a process of its own, one after the other; a run that is
complete is not run again. Accuracy: greedy, on held-out chains, after the last step, mean over seeds with the 95 % bootstrap
interval. Teacher tokens: prompt and completion, of the rule-based teacher's replies. CPU and wall seconds are of the process,
start and compilation included; wall includes whatever else the machine does.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from configs import ablations
from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.telemetry.plot import TOKENS, read_curve, with_interval

CONFIG = "configs/carry_chain.py"
ARMS = ("plain", "forest", "chain", "flat", "branches_inline", "branches", "suffixes", "luffy", "snis", "sft", "treerl")
COST = "cost.json"  # of a run that is complete, in its folder


def train(arm: str, seed: int, tokens: int, folder: pathlib.Path) -> pathlib.Path:
    """Trains one arm with one seed, unless that is done already; returns the run's folder.

    Raises:
      SystemExit: training failed; names its log.
    """
    run = folder / f"{arm}-s{seed}"
    if (run / COST).is_file():
        return run
    command = [sys.executable, "-m", "deepgrpo.train", f"--config={CONFIG}:{arm}", f"--config.name={run.name}"]
    command += [f"--config.run_dir={folder}", f"--config.seed={seed}", f"--config.train.student_tokens={tokens}"]
    command += ["--config.telemetry.tensorboard=false"]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{run.name}.log", "w") as log:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arm}, seed {seed}: training ended with {process.returncode}; see {log.name}")
    cost = {"cpu_seconds": usage.ru_utime + usage.ru_stime, "wall_seconds": time.monotonic() - start}
    (run / COST).write_text(json.dumps(cost))
    return run


def summary(run: pathlib.Path) -> dict[str, float]:
    """What a finished run reached and what it cost."""
    last = metrics_lib.read(run)[-1]
    return json.loads((run / COST).read_text()) | {
        "before": read_curve(run, "").scores[0],
        "accuracy": read_curve(run, "").scores[-1],
        "steps": last["step"],
        "student_tokens": last[TOKENS],
        "teacher_tokens": last.get("teacher/tokens", 0.0),
    }


def table(results: dict[str, list[dict[str, float]]], tokens: int) -> Table:
    """One row an arm, means over its seeds."""
    made = Table(title=f"variants on carry-chain, {tokens:,} student tokens each")
    names = ("arm", "seeds", "accuracy", "lowest", "steps", "student tokens", "teacher tokens", "CPU s", "wall s")
    for name in names:
        made.add_column(name, justify="left" if name == "arm" else "right")
    for arm, runs in results.items():
        columns = {key: np.array([run[key] for run in runs], np.float64) for key in runs[0]}
        means = (f"{columns[key].mean():,.0f}" for key in ("steps", "student_tokens", "teacher_tokens"))
        costs = (f"{columns[key].mean():.0f}" for key in ("cpu_seconds", "wall_seconds"))
        accuracy = columns["accuracy"]
        made.add_row(arm, str(len(runs)), with_interval(accuracy), f"{accuracy.min():.3f}", *means, *costs)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", nargs="+", default=ARMS, choices=ablations.ARMS, metavar="ARM", help="as in configs/ablations.py"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs an arm, with seeds 0, 1, ...")
    parser.add_argument("--tokens", type=int, default=500_000, help="student tokens a run")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/variants"), help="folder of the run folders")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds={args.seeds}: expected 1 or more")
    folder = args.runs / str(args.tokens)
    subprocess.run([sys.executable, "-m", "deepgrpo.warm_start", f"--config={CONFIG}"], check=True)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(args.seeds):  # every arm has its first seed before any has its second
        for arm in args.arms:
            results.setdefault(arm, []).append(summary(train(arm, seed, args.tokens, folder)))
            print(f"{arm}, seed {seed}: {results[arm][-1]['accuracy']:.3f}", flush=True)
    (folder / "variants.json").write_text(json.dumps(results, indent=1))
    Console(width=None if sys.stdout.isatty() else 140).print(table(results, args.tokens))


if __name__ == "__main__":
    main()
