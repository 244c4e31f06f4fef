"""Proof by effect that a server generates with the weights it was given. An answer of 200 proves nothing.

Ways of being wrong that have been seen: the weights did not change, or only some of them did; the version says one thing and the
tensors another; the prefix cache still holds keys and values of older weights. A small policy update moves log-probs by less than
bfloat16 rounds them, so a tolerance alone cannot tell neighbouring versions apart. But evaluations with different weights do not
agree to the last bit everywhere: a server whose numbers are exactly those of the version before, while the learner's own have
moved, has not loaded anything.
"""

import dataclasses
import logging
import pathlib

import numpy as np

from deepgrpo.rollout.vllm_control import Control, VllmError
from deepgrpo.types import Ids

GREEDY_TOKENS = 4
MOVED_SHARE = 0.5  # of the probe's tokens must have other log-probs before a server is expected to have moved, too

log = logging.getLogger(__name__)


class ProofError(VllmError):
    """The server answers, but not as the weights would that it was given."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A snapshot, and what proves that an engine has it.

    folder: Hugging Face folder. version: training step.
    probe: int32[P], a text longer than a block of the prefix cache.
    logps: float32[P - 1], the learner's log-probs of probe[1:] at temperature 1, by these weights.
    tolerance: distance (`distance`) of log-probs that two programs may have, by dtype.
    comparable: engine and learner compute in one dtype, so that what moves the learner's numbers moves the engine's.
    """

    folder: pathlib.Path
    version: int
    probe: Ids
    logps: np.ndarray
    tolerance: float
    comparable: bool

    def moved_since(self, older: "Weights") -> bool:
        """Whether the learner's numbers differ so widely from the older version's that an engine's must, too."""
        return self.comparable and older.comparable and np.mean(self.logps != older.logps) >= MOVED_SHARE


@dataclasses.dataclass(frozen=True, eq=False)
class Proof:
    """What a server answered for `weights`: to be compared with what it answers for the next ones."""

    weights: Weights
    scores: np.ndarray  # float32[P - 1], of probe[1:]
    greedy_ids: Ids
    greedy_logps: np.ndarray  # float32[GREEDY_TOKENS], as generated, through the prefix cache


def prove(control: Control, weights: Weights, salt: str, before: Proof | None, deadline: float) -> Proof:
    """Asks the server for its version, a greedy continuation of the probe, and the log-probs of both.

    Args:
      before: what it answered for other weights, if it has had any.

    Raises:
      ProofError: it does not have these weights, or mixes them with others'; says what was found and expected.
      VllmError: it did not answer.
    """
    url, version = control.server.url, weights.version
    if (found := control.weight_version(deadline)) != str(version):
        raise ProofError(f"{url}: serves weights of version {found}, expected version {version}")
    greedy, cached = control.greedy(weights.probe, GREEDY_TOKENS, version, salt, deadline)
    if cached:
        raise ProofError(
            f"{url}: {cached} prompt tokens of the first request of version {version} came from the prefix cache, "
            "which was to be empty: they are keys and values of older weights"
        )
    scores = control.score(np.concatenate([weights.probe, greedy.ids]), deadline)
    prompt = len(weights.probe) - 1
    proof = Proof(weights, scores[:prompt], greedy.ids, greedy.logps)
    _require_close(
        url, proof.scores, weights.logps, weights, "of a fixed text, engine against learner", "these are other weights"
    )
    _require_close(
        url, greedy.logps, scores[prompt:], weights, "of its own greedy answer, as generated against as scored afresh",
        "the prefix cache holds keys and values of older weights",
    )  # fmt: skip
    if before is not None and weights.moved_since(before.weights):
        _require_moved(url, proof, before)
    return proof


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean |difference| of log-probs, in nats, of unlikely tokens as a share of their own: rounding grows with the logits."""
    return float(np.mean(np.abs(found - expected) / np.maximum(1.0, np.abs(expected))))


def _require_close(url: str, found: np.ndarray, expected: np.ndarray, weights: Weights, what: str, so: str) -> None:
    gap = distance(found, expected)
    log.debug("%s: log-probs %s: distance %.2g at version %d", url, what, gap, weights.version)
    if not gap <= weights.tolerance:  # a NaN is not close
        raise ProofError(
            f"{url}: log-probs {what}, differ by {gap:.2g} on average at version {weights.version}, "
            f"expected at most {weights.tolerance:g}: {so}"
        )


def _require_moved(url: str, proof: Proof, before: Proof) -> None:
    """Two versions whose learner's numbers differ must not give an engine's that are the same to the last bit."""
    versions = f"those of version {before.weights.version}, though the learner's moved with version {proof.weights.version}"
    if np.array_equal(proof.scores, before.scores):
        raise ProofError(f"{url}: log-probs of a fixed text are to the last bit {versions}: the weights were not loaded")
    same_text = np.array_equal(proof.greedy_ids, before.greedy_ids)
    if same_text and np.array_equal(proof.greedy_logps, before.greedy_logps):
        raise ProofError(f"{url}: a greedy answer is to the last bit {versions}: it came from a cache")
