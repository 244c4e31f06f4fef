"""The learner's metrics: means over a step's optimizer steps, distance from the rollout engine, work done."""

import concurrent.futures
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.config.errors import ConfigError
from deepgrpo.learner.objective import TEACHER
from deepgrpo.learner.packing import Batch
from deepgrpo.learner.rows import STREAM_NAMES, Row
from deepgrpo.learner.sharding import path_name


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
        for source, name in STREAM_NAMES.items():
            step[f"{name}_chain/mb_tokens"] = tokens[source]
            step[f"{name}_chain/mb_samples"] = sum(row.source == source for row in rows)
            if not tokens[source]:
                step = {key: value for key, value in step.items() if not key.startswith(f"{name}_chain")}
        for key, value in step.items():
            values.setdefault(f"actor/{key}", []).append(float(value))
    metrics = {key: float(np.mean(list_)) for key, list_ in values.items()}
    for source, name in STREAM_NAMES.items():
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


######################################################################################################################
#  What is not finite: which part of an update was the first, and when the run ends.
######################################################################################################################

PATIENCE = 3  # updates in a row without a finite optimizer step, after which the run ends
REMEDY = "lower --config.optim.lr, or set --config.model.dtype=float32 or --config.model.attention=xla; the same command resumes"
# Sums of a loss, in the order in which a step computes them.
TERMS = {
    "logp": "the policy's log-probs of the {} tokens",
    "entropy": "the entropy at the {} tokens",
    "tis": "the importance weights (objective.tis_cap) of the {} tokens",
    "loss": "the loss of the {} tokens",
    "kl": "the KL term of the {} tokens",
}

log = logging.getLogger(__name__)


def weight_name(path: str, layer: int) -> str:
    """A parameter's name in a Hugging Face file, from its path in our tree; `layer` counts where parameters are stacked."""
    parts = path.split("/")
    parts[-1] = "bias" if parts[-1] == "bias" else "weight"
    if parts[0] == "layers":
        parts.insert(1, str(layer))
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def peaks(tree: Any) -> Any:
    """The largest absolute value of each leaf, of each layer where they are stacked; inf for one that holds a NaN."""

    def one(path: tuple, x: jax.Array) -> jax.Array:
        x = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x.astype(jnp.float32)))
        return jnp.max(x, axis=tuple(range(1 if "layers" in path_name(path) else 0, x.ndim)))

    return jax.tree_util.tree_map_with_path(one, tree)


def first_weight(found: Any, backward: bool = False) -> str:
    """The first parameter whose peak is not finite, in the order of the forward pass, or of the backward pass; "" if all are."""
    names = []
    for path, values in jax.tree_util.tree_leaves_with_path(found):
        path, values = path_name(path), np.atleast_1d(values)
        stage = {"embed_tokens": 0, "layers": 1, "norm": 2, "lm_head": 3}[path.partition("/")[0]]
        names += [(stage, layer, weight_name(path, layer)) for layer in np.flatnonzero(~np.isfinite(values))]
    if not names:
        return ""
    further = f" and {len(names) - 1} further tensors" if len(names) > 1 else ""
    return (max if backward else min)(names)[2] + further


def first_of_state(found: Mapping[str, Any]) -> str:
    """What of a learner's state is not finite, from its `peaks`; "" if all is."""
    if name := first_weight(found["params"]):
        return f"the weights of {name}"
    for part, moments in (("optimizer", found["adam"]), ("teacher's optimizer", found.get("teacher_adam", {}))):
        for key in ("mu", "nu"):
            if key in moments and (name := first_weight(moments[key])):
                return f"the {part}'s moments ({key}) of {name}"
    return ""


def first_of_step(found: Mapping[str, Any]) -> str:
    """What of an optimizer step is not finite, from what the program `explain` returns; "" if all is."""
    if not np.isfinite(found["ref_logp"]):
        return "the reference's log-probs (objective.kl_coef)"
    for term, text in TERMS.items():
        sums = found["sums"].get(term, np.zeros(0))
        for source in np.flatnonzero(~np.isfinite(sums)):
            return text.format(STREAM_NAMES[source])
    if name := first_weight(found["gradient"], backward=True):
        return f"the gradient of {name}"
    if not np.isfinite(found["norm"]):
        return "the gradient's norm, which is too large for float32 although every entry is finite"
    return ""


class RefusedSteps:
    """Says once why a step was refused, and ends the run when no step is finite any more."""

    def __init__(self):
        self._barren: Counter[str] = Counter()
        self._said = False

    def look(
        self, kind: str, step: int, results: Sequence[Mapping[str, Any]], explain: Callable[[int], tuple[str, bool]]
    ) -> None:
        """Looks at an update's results.

        Args:
          kind: of the update; each is counted by itself.
          explain: of the number of a refused result: what was the first part that is not finite, and whether it will stay so.

        Raises:
          ConfigError: nothing can be learned any more.
        """
        tried = [n for n, result in enumerate(results) if not result.get("kl_stopped")]
        refused = [n for n in tried if not math.isfinite(results[n]["grad_norm"])]
        if tried:
            self._barren[kind] = self._barren[kind] + 1 if len(refused) == len(tried) else 0
        barren = self._barren[kind] >= PATIENCE
        if not refused or (self._said and not barren):
            return
        cause, lasting = explain(refused[0])
        refusals = f"{len(refused)} of {len(tried)} optimizer steps were refused"
        text = f"step {step}: {refusals}; the first part that is not finite: {cause}"
        if lasting or barren:
            reason = "no later update can be finite" if lasting else f"{PATIENCE} updates in a row had no finite step"
            end_run(f"{text}; {reason}")
        self._said = True
        log.warning(
            "%s. Weights and moments are as before it. Further refused steps are only counted (actor/nonfinite_steps); after %d"
            " updates in a row without a finite one the run ends",
            text,
            PATIENCE,
        )


@contextlib.contextmanager
def end_if_not_finite() -> Iterator[None]:
    """An engine whose log-probs are not finite ends the run as a learner does: with the cause in the log, and no traceback."""
    try:
        yield
    except FloatingPointError as error:
        end_run(str(error))


def end_run(what: str) -> None:
    """Raises ConfigError, after the log has it."""
    message = f"the run ends: {what}. The newest checkpoint, if there is one, is from before it\n  -> {REMEDY}"
    log.error("%s", message)
    raise ConfigError(message)


######################################################################################################################
#  Work that the devices still do while the host goes on: how long it takes, and what it comes to.
######################################################################################################################


class DeviceClock:
    """Devices work in the order of the laps, so a lap begins when it was enqueued or when the one before ended."""

    def __init__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "device-clock")
        self._free = 0.0

    def lap(self, begun: float, results: Any) -> "concurrent.futures.Future[float]":
        """A future of the seconds until `results` are there.

        begun: `time.monotonic()` when the first of their work was enqueued.
        """
        return self._pool.submit(self._wait, begun, results)

    def _wait(self, begun: float, results: Any) -> float:
        jax.block_until_ready(results)
        end = time.monotonic()
        seconds = end - max(begun, self._free)
        self._free = end
        return seconds


class PendingUpdate:
    """An update that the devices may still be working on."""

    def __init__(self, finish: Callable[[], dict[str, float]]):
        self._finish = finish
        self._metrics: dict[str, float] | None = None

    def metrics(self) -> dict[str, float]:
        """Waits for the devices, the first time, and returns the update's metrics."""
        if self._metrics is None:
            self._metrics = self._finish()
            self._finish = None  # what it holds may go
        return dict(self._metrics)
