"""The learner's metrics: means over a step's optimizer steps, distance from the rollout engine, work done."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER
from deepgrpo.learner.packing import Batch
from deepgrpo.learner.rows import Row

STREAM_NAMES = ((MAIN, "main"), (BRANCH, "branch"), (TEACHER, "teacher"))


def count_steps(results: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(optimizer steps that changed the parameters, steps refused for a gradient that is not finite)."""
    tried = [result for result in results if not result.get("kl_stopped")]
    finite = sum(bool(np.isfinite(result["grad_norm"])) for result in tried)
    return finite, len(tried) - finite


def actor_metrics(results: Sequence[dict[str, Any]], mini_batches: Sequence[Sequence[Row]], grad_clip: float) -> dict[str, float]:
    """`actor/*`: means over the optimizer steps, of a stream's own metrics over the steps that contained it.

    Steps that objective.kl_stop made void are only counted.
    """
    values: dict[str, list[float]] = {}
    tried = [(n, result) for n, result in enumerate(results) if not result.get("kl_stopped")]
    for n, result in tried:
        rows, tokens = mini_batches[n % len(mini_batches)], result["tokens"]
        step = result["actor"] | {"grad_norm": result["grad_norm"], "grad_clipfrac": result["grad_norm"] > grad_clip}
        for source, name in STREAM_NAMES:
            step[f"{name}_chain/mb_tokens"] = tokens[source]
            step[f"{name}_chain/mb_samples"] = sum(row.source == source for row in rows)
            if not tokens[source]:
                step = {key: value for key, value in step.items() if not key.startswith(f"{name}_chain")}
        for key, value in step.items():
            values.setdefault(f"actor/{key}", []).append(float(value))
    metrics = {key: float(np.mean(list_)) for key, list_ in values.items()}
    for source, name in STREAM_NAMES:
        metrics[f"actor/steps_with_{name}"] = float(sum(result["tokens"][source] > 0 for _, result in tried))
    done, nonfinite = count_steps(results)
    if any("kl_stopped" in result for result in results):
        metrics["actor/kl_stopped_steps"] = float(len(results) - len(tried))
    return metrics | {
        "actor/total_mini_batch_steps": float(len(results)),
        "actor/optimizer_steps": float(done),
        "actor/nonfinite_steps": float(nonfinite),
    }


def teacher_metrics(results: Sequence[dict[str, Any]], mini_batches: Sequence[Sequence[Row]], lr: float) -> dict[str, float]:
    """`actor/teacher_chain/*` and counts of optimizer steps on teacher rows alone; means over these steps."""
    done, nonfinite = count_steps(results)
    metrics = {"actor/post_sft_optimizer_steps": float(done), "actor/post_sft_nonfinite_steps": float(nonfinite)}
    if not results:
        return metrics
    values = [
        result["actor"] | {"post_sft_grad_norm": result["grad_norm"], "mb_tokens": result["tokens"][TEACHER]}
        for result in results
    ]
    metrics |= {f"actor/teacher_chain/{key}": float(np.mean([value[key] for value in values])) for key in values[0]}
    samples = float(np.mean([len(rows) for rows in mini_batches]))
    return metrics | {"actor/teacher_chain/post_sft_lr": lr, "actor/teacher_chain/mb_samples": samples}


def skipped_update(no_rows: bool, skipped: int) -> dict[str, float]:
    """Metrics of an update without a mini-batch. skipped: updates so far that had none."""
    nothing = dict.fromkeys(("actor/optimizer_steps", "actor/total_mini_batch_steps", "actor/lr_scheduler_step"), 0.0)
    return nothing | {"training/all_chains_empty_skip": float(no_rows), "training/skipped_updates": float(skipped)}


def batch_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Tokens of the network's input in one epoch over the mini-batches, the share of padding in what was computed, and the share
    of the rows' tokens that shared prefixes spared."""
    tokens, spared = sum(batch.tokens for batch in batches), sum(batch.spared for batch in batches)
    padded = sum(batch.used * batch.shape.B * batch.shape.T for batch in batches)
    return {
        "perf/tokens": float(tokens),
        "perf/padding_fraction": 1.0 - tokens / padded,
        "perf/spared_fraction": spared / (tokens + spared),
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
