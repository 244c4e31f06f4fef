"""What a run must not do silently: numbers that are out of range are logged as warnings, once a step."""

import logging
from collections.abc import Mapping

# Mean |log-prob difference| between engine and learner that rounding explains, by the coarser dtype of the two.
EXPECTED_MISMATCH = {"float32": 1e-3, "bfloat16": 0.05}
STALE_MISMATCH = 0.2  # of rollouts by an older policy, which differ by what it has learned since

DROPS = {  # counters of what a bound has dropped, and the key that raises it
    "teacher/events_dropped_capacity": "failures: curriculum.max_events_per_parent, max_events, max_nodes_per_tree",
    "forest/nodes_refused": "states: curriculum.max_nodes_per_tree",
    "failed_pool/dropped_capacity": "failures: curriculum.max_events_per_parent, max_events; suffixes: MAX_SIZE",
    "failed_pool/dropped_age": "failures: curriculum/failed_pool.py MAX_AGE",
    "synthetic_pool/dropped_capacity": "states: flat.FlatPool.max_size",
    "teacher_pool/dropped_capacity": "corrected failures: suffixes.MAX_SIZE",
    "buffer/dropped_capacity": "places to branch: branches.MAX_SIZE",
}

log = logging.getLogger(__name__)


def rollout_mismatch(metrics: Mapping[str, float], threshold: float, *dtypes: str) -> dict[str, float]:
    """`rollout_mismatch/alert`: 1 where engine and learner disagree by more than `threshold`, which is also logged.

    Empty when the step has no measurement. dtypes: of learner and engine, "" for the same; they decide if the threshold is 0 and
    the rollouts are not stale.
    """
    mean = metrics.get("rollout_mismatch/abs_mean")
    if mean is None:
        return {}
    expected = max(EXPECTED_MISMATCH[dtype] for dtype in dtypes if dtype)
    limit = threshold or (STALE_MISMATCH if metrics.get("rollout_mismatch/staleness") else expected)
    if mean <= limit:
        return {"rollout_mismatch/alert": 0.0}
    log.warning(
        "engine and learner disagree about the sampled tokens: |log-prob difference| is %.2g on average (largest %.2g), "
        "above %.2g; %.1f %% of the ratios are outside [0.5, 2]. Gradients are biased: compare the dtypes of both, "
        "or set objective.tis_cap=2",
        mean,
        metrics["rollout_mismatch/abs_max"],
        limit,
        100 * metrics["rollout_mismatch/ratio_outside"],
    )
    return {"rollout_mismatch/alert": 1.0}


class Drops:
    """Says what bounds drop: the first time, and each time that it has grown tenfold."""

    def __init__(self):
        self._next = dict.fromkeys(DROPS, 1.0)

    def look(self, metrics: Mapping[str, float]) -> None:
        for name, what in DROPS.items():
            count = metrics.get(name, 0.0)
            if count >= self._next[name]:
                log.warning(
                    "a bound has dropped %d %s (%s). The teacher may be too slow for the failures that come", count, what, name
                )
                while self._next[name] <= count:
                    self._next[name] *= 10
