"""What is not finite: which part of an update was the first, and when the run ends.

An optimizer step whose gradient is not finite changes nothing (`optim.adamw`). One such step is an accident; a run in which no
step is finite any more pays for rollouts and a teacher and learns nothing, so it ends.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.config.errors import ConfigError
from deepgrpo.learner.rows import STREAM_NAMES
from deepgrpo.learner.sharding import path_name

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


class Watch:
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
            stop(f"{text}; {reason}")
        self._said = True
        log.warning(
            "%s. Weights and moments are as before it. Further refused steps are only counted (actor/nonfinite_steps); after %d"
            " updates in a row without a finite one the run ends",
            text,
            PATIENCE,
        )


@contextlib.contextmanager
def told() -> Iterator[None]:
    """An engine whose log-probs are not finite ends the run as a learner does: with the cause in the log, and no traceback."""
    try:
        yield
    except FloatingPointError as error:
        stop(str(error))


def stop(what: str) -> None:
    """Raises ConfigError, after the log has it."""
    message = f"the run ends: {what}. The newest checkpoint, if there is one, is from before it\n  -> {REMEDY}"
    log.error("%s", message)
    raise ConfigError(message)
