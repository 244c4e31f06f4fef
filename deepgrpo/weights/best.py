"""Which validation metric decides about the best checkpoint, and which checkpoint that is."""

import dataclasses
import math
from collections.abc import Mapping

CORE = "val-core/"
AVERAGE = "val-core/avg/"


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far."""

    step: int
    score: float
    metric: str


def deciding_metric(metrics: Mapping[str, float], configured: str) -> str:
    """The key of the metric that decides.

    Without a configured key: among the averages over sources (`val-core/avg/...`) if there are any, else among all of
    `val-core/...`, the only one, or the only one whose last component is a mean over answers (`mean@N`).

    Raises:
      LookupError: the configured key is absent, or none or several qualify; says which.
    """
    core = sorted(key for key in metrics if key.startswith(CORE))
    if configured:
        if configured not in metrics:
            raise LookupError(f"checkpoint.best_metric {configured!r} is not among {', '.join(core) or 'the metrics'}")
        return configured
    candidates = [key for key in core if key.startswith(AVERAGE)] or core
    means = [key for key in candidates if key.rpartition("/")[2].startswith("mean@")]
    for chosen in (candidates, means):
        if len(chosen) == 1:
            return chosen[0]
    found = ", ".join(means or candidates) or "no val-core metric"
    raise LookupError(f"found {found}, expected one metric that decides: set checkpoint.best_metric")


def better(metrics: Mapping[str, float], step: int, best: Best | None, configured: str) -> Best | None:
    """The new best, or None if this validation does not beat `best` (strictly).

    Raises:
      LookupError: as `deciding_metric`, or its value is not a number.
    """
    metric = deciding_metric(metrics, configured)
    score = float(metrics[metric])
    if math.isnan(score):
        raise LookupError(f"{metric} is NaN, expected a number")
    return Best(step, score, metric) if best is None or score > best.score else None
