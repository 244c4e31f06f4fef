"""The learner's metrics: means over a step's optimizer steps, distance from the rollout engine, work done."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER
from deepgrpo.learner.packing import Batch
from deepgrpo.learner.rows import Row


def actor_metrics(results: Sequence[dict[str, Any]], mini_batches: Sequence[Sequence[Row]]) -> dict[str, float]:
    """`actor/*`: means over the optimizer steps, of a stream's own metrics over the steps that contained it."""
    values: dict[str, list[float]] = {}
    for n, result in enumerate(results):
        rows, tokens = mini_batches[n % len(mini_batches)], result["tokens"]
        step = result["actor"] | {"grad_norm": result["grad_norm"]}
        for source, name in ((MAIN, "main_chain"), (BRANCH, "branch_chain"), (TEACHER, "teacher_chain")):
            step[f"{name}/mb_tokens"] = tokens[source]
            step[f"{name}/mb_samples"] = sum(row.source == source for row in rows)
            if not tokens[source]:
                step = {key: value for key, value in step.items() if not key.startswith(name)}
        for key, value in step.items():
            values.setdefault(f"actor/{key}", []).append(float(value))
    metrics = {key: float(np.mean(list_)) for key, list_ in values.items()}
    finite = sum(bool(np.isfinite(result["grad_norm"])) for result in results)
    for source, name in ((MAIN, "main"), (BRANCH, "branch"), (TEACHER, "teacher")):
        metrics[f"actor/steps_with_{name}"] = float(sum(result["tokens"][source] > 0 for result in results))
    return metrics | {
        "actor/total_mini_batch_steps": float(len(results)),
        "actor/optimizer_steps": float(finite),
        "actor/nonfinite_steps": float(len(results) - finite),
    }


def batch_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Tokens of the network's input in one epoch over the mini-batches, and the share of padding in what was computed."""
    tokens = sum(batch.tokens for batch in batches)
    _, B, T = batches[0].arrays["tokens"].shape
    return {
        "perf/tokens": float(tokens),
        "perf/padding_fraction": 1.0 - tokens / (sum(batch.used for batch in batches) * B * T),
    }


def mismatch_metrics(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`rollout_mismatch/*` over the mini-batches of one epoch; empty when the engine's log-probs are not known."""
    parts = [result["mismatch"] for result in results]
    tokens = float(sum(part["tokens"] for part in parts))
    if not tokens:
        return {}
    mean = {name: float(sum(part[name] for part in parts)) / tokens for name in ("abs", "k3", "outside")}
    return {
        "rollout_mismatch/abs_mean": mean["abs"],
        "rollout_mismatch/abs_max": float(max(part["max"] for part in parts)),
        "rollout_mismatch/k3": mean["k3"],
        "rollout_mismatch/ratio_outside": mean["outside"],
    }
