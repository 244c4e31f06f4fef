"""Which validation metric decides about the best checkpoint, and which checkpoint that is.

The best of many checkpoints looks better on the set that it was chosen on than it is. So a run may name sets that do nothing but
choose (`data.selection`, metrics below `selection/`); without them the validation sets choose, and the choice is labelled.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

CORE = "val-core/"
SELECTION = "selection/"  # before the metrics of sets that are not reported
LABEL = "selected on a reported set"


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far. label: what a reader of the score has to know."""

    step: int
    score: float
    metric: str
    label: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "label" or value}


def deciding_metric(metrics: Mapping[str, float], configured: str) -> str:
    """The key of the metric that decides.

    Without a configured key: among the averages over sources (`val-core/avg/...`) if there are any, else among all of
    `val-core/...`, the only one, or the only one whose last component is a mean over answers (`mean@N`). Where there are
    metrics of sets that do nothing but choose (`selection/val-core/...`), these alone are looked at, in the same way.

    Raises:
      LookupError: the configured key is absent, or none or several qualify; says which.
    """
    core = [key for key in metrics if key.startswith(SELECTION + CORE)] or [key for key in metrics if key.startswith(CORE)]
    core = sorted(core)
    if configured:
        if configured not in metrics:
            raise LookupError(f"checkpoint.best_metric {configured!r} is not among {', '.join(core) or 'the metrics'}")
        return configured
    candidates = [key for key in core if key.removeprefix(SELECTION).startswith(f"{CORE}avg/")] or core
    means = [key for key in candidates if key.rpartition("/")[2].startswith("mean@")]
    for chosen in (candidates, means):
        if len(chosen) == 1:
            return chosen[0]
    found = ", ".join(means or candidates) or "no val-core metric"
    raise LookupError(f"found {found}, expected one metric that decides: set checkpoint.best_metric")


def better(metrics: Mapping[str, float], step: int, best: Best | None, configured: str, label: str = "") -> Best | None:
    """The new best, or None if this validation does not beat `best` (strictly). label: see `Best`.

    Raises:
      LookupError: as `deciding_metric`, or its value is not a number.
    """
    metric = deciding_metric(metrics, configured)
    score = float(metrics[metric])
    if math.isnan(score):
        raise LookupError(f"{metric} is NaN, expected a number")
    return Best(step, score, metric, label) if best is None or score > best.score else None
