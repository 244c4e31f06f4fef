"""Compares runs: validation scores over student tokens as a PNG, and a table.

    python -m deepgrpo.telemetry.plot runs/demo-forest-s0 runs/demo-plain-s0 --out demo.png

Runs whose names differ only in a closing `-s<seed>` are one arm: its curve is the mean over seeds with a bootstrap interval.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import rich.table

from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.telemetry.log import Console

TOKENS = "training/student_tokens"
INTERVAL = (2.5, 97.5)  # percentiles
BOOTSTRAP_DRAWS = 10_000
GRID_POINTS = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """One run's validations. tokens: float64[points], rising. scores: float64[points]. steps: of the last training step."""

    name: str
    tokens: np.ndarray
    scores: np.ndarray
    steps: int


def read_curve(run: pathlib.Path, metric: str) -> Curve:
    """Reads a run's validations.

    metric: a key of metrics.jsonl; "" takes `val-core/avg/...`, or the only source's.

    Raises:
      SystemExit: the run has no such metric; the message lists those it has.
    """
    if not (run / metrics_lib.FILE).is_file():
        raise SystemExit(f"{run} is no run folder: it has no {metrics_lib.FILE}")
    records = metrics_lib.read(run)
    keys = dict.fromkeys(key for record in records for key in record if key.startswith("val-core/") and "/reward/mean@" in key)
    chosen = metric or next((key for key in keys if key.startswith("val-core/avg/")), next(iter(keys), ""))
    points = [(record, record[chosen]) for record in records if chosen in record]
    if not points:
        raise SystemExit(f"{run} has no validation {metric or 'score'}; it has: {', '.join(keys) or 'none'}")
    # A validation before training has no token count of its own: nothing was sampled yet.
    tokens = [record[TOKENS] if TOKENS in record else 0.0 for record, _ in points]
    scores = [score for _, score in points]
    return Curve(run.name, np.array(tokens, np.float64), np.array(scores, np.float64), int(records[-1]["step"]))


def arms_of(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Groups runs by name without the seed, in the order given."""
    arms: dict[str, list[Curve]] = {}
    for curve in curves:
        arms.setdefault(re.sub(r"-s\d+$", "", curve.name), []).append(curve)
    return arms


def bootstrap_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean over seeds: float64[seeds, ...] -> two float64[...]; with one seed it has no width."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(values), size=(BOOTSTRAP_DRAWS, len(values)))
    weights = np.stack([(draws == i).sum(axis=1) for i in range(len(values))], axis=1) / len(values)  # float64[draws, seeds]
    low, high = np.percentile(np.tensordot(weights, values, axes=1), INTERVAL, axis=0)
    return low, high


def arm_curve(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Puts an arm's seeds on one axis, as far as all of them go: tokens float64[points], scores float64[seeds, points].

    A single run keeps its own points; several are interpolated linearly between their validations.
    """
    if len(curves) == 1:
        return curves[0].tokens, curves[0].scores[None]
    grid = np.linspace(max(c.tokens[0] for c in curves), min(c.tokens[-1] for c in curves), GRID_POINTS)
    return grid, np.stack([np.interp(grid, c.tokens, c.scores) for c in curves])


def draw(arms: Mapping[str, Sequence[Curve]], out: pathlib.Path, label: str) -> None:
    """Writes the curves of all arms as a PNG."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")  # not pyplot: no global state, no display
    axes = figure.add_subplot()
    for name, curves in arms.items():
        tokens, scores = arm_curve(curves)
        seeds = f" ({len(curves)} seeds, 95% interval)" if len(curves) > 1 else ""
        (line,) = axes.plot(
            tokens, scores.mean(axis=0), marker="o" if len(curves) == 1 else None, markersize=3, label=name + seeds
        )
        if len(curves) > 1:
            axes.fill_between(tokens, *bootstrap_interval(scores), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("response tokens sampled from the student")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def table(arms: Mapping[str, Sequence[Curve]], label: str) -> rich.table.Table:
    """One row an arm: validation before and after, with the interval over seeds where there are several."""
    result = rich.table.Table(title=label)
    for column in ("arm", "seeds", "steps", "student tokens", "before", "after"):
        result.add_column(column, justify="left" if column == "arm" else "right")
    for name, curves in arms.items():
        columns = [np.array([curve.scores[i] for curve in curves]) for i in (0, -1)]
        steps, tokens = np.mean([c.steps for c in curves]), np.mean([c.tokens[-1] for c in curves])
        result.add_row(name, str(len(curves)), f"{steps:.0f}", f"{tokens:,.0f}", *(with_interval(values) for values in columns))
    return result


def with_interval(values: np.ndarray) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    low, high = bootstrap_interval(values)
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="PNG to write")
    parser.add_argument("--metric", default="", help="key of metrics.jsonl; by default the average over validation sources")
    args = parser.parse_args()
    arms = arms_of([read_curve(run, args.metric) for run in args.runs])
    label = args.metric or "validation score"
    width = None if sys.stdout.isatty() else 120  # a log has no width to fit into
    Console(width=width).print(table(arms, label))
    draw(arms, args.out, label)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
