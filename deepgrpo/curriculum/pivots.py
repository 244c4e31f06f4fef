"""Where a response is branched: its segments, the places between them, what each is worth, and the choice among them.

A chain is the prompt (index 0, the root) and the segments of one response (1, 2, ...). Branching at index i keeps the response up
to the end of segment i. Its position ratio is rho = (i + 1) / (number of segments + 1).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.base import named
from deepgrpo.data.tokenizer import Tokenizer, load_tokenizer
from deepgrpo.types import Ids

ENOUGH = 10  # labels that must be exceeded before the model is fitted
MOST_STEPS = 100  # of Newton's method; about 6 are taken
PIVOTS = 0x91707  # purpose of this module's randomness in (seed, step, purpose, index)
FULL_STOP = "."

Segment = tuple[int, int]  # half-open range of response positions


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """One way of cutting responses into segments.

    method: sp: after each full stop; tp: every `tokens_per_node` tokens; fp: into `n_segments` equal parts.
    stop_ids: sp: the ids that count as a full stop.
    """

    method: str
    tokens_per_node: int = 50
    n_segments: int = 5
    stop_ids: tuple[int, ...] = ()

    def segments(self, ids: Ids) -> list[Segment]:
        """Contiguous segments that cover `ids`, int32[len]; a single (0, 0) without ids.

        A sentence ends after its full stop, and what follows the last one is a segment, too. The last window may be shorter.
        Equal parts, of which there are at most as many as tokens, differ in size by at most one, larger ones first.
        """
        n = len(ids)
        if self.method == "sp":
            ends = (np.flatnonzero(np.isin(ids, self.stop_ids)) + 1).tolist()
        elif self.method == "tp":
            ends = list(range(self.tokens_per_node, n, self.tokens_per_node))
        else:
            parts = max(min(self.n_segments, n), 1)
            ends = np.cumsum([n // parts + (i < n % parts) for i in range(parts)]).tolist()
        bounds = [0, *(end for end in ends if end < n), n]
        return list(zip(bounds[:-1], bounds[1:], strict=True))


def full_stop_id(tokenizer: Tokenizer) -> int:
    """The id of the token that is exactly a full stop (not one with white space or another sign beside it).

    Raises:
      ValueError: this tokenizer has none.
    """
    stop = tokenizer.get_vocab().get(FULL_STOP)
    if stop is None:
        raise ValueError(
            "branches.segment_method=sp cuts after the token of a full stop, but this tokenizer has none; "
            "use branches.segment_method=tp or fp"
        )
    return int(stop)


def create_partition(config: ml_collections.ConfigDict) -> Partition:
    """From the whole configuration; loads the tokenizer only where the method needs it."""
    keys = config.branches
    stop_ids = (full_stop_id(load_tokenizer(config.model.path)),) if keys.segment_method == "sp" else ()
    return Partition(keys.segment_method, keys.tokens_per_node, stop_ids=stop_ids)


@dataclasses.dataclass(frozen=True)
class Pivot:
    """A place to branch. index: in the chain, 0 is the root. chain_length: root and segments. kept: response tokens before it."""

    index: int
    chain_length: int
    kept: int

    @property
    def ratio(self) -> float:
        """rho, in (0, 1)."""
        return (self.index + 1) / self.chain_length


def candidates(
    prompt_len: int, segments: Sequence[Segment], max_model_len: int, *, min_index: int = 0, open_end: bool = False
) -> list[Pivot]:
    """The places where a chain can be branched: the root, and every segment but the last that leaves room for a token.

    Args:
      segments: of the response.
      min_index: 1 leaves the root out, at which a branch is a fresh start.
      open_end: the last segment did not end the response (a loop that goes step by step): it can be branched, too.
    """
    length = 1 + len(segments)
    ends = [0, *(end for _, end in segments)]
    last = length if open_end else length - 1
    return [Pivot(i, length, ends[i]) for i in range(min_index, last) if i == 0 or prompt_len + ends[i] < max_model_len]


def fit_logistic(ratios: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The (w, b) that minimise w^2 / 2 + sum_k log(1 + exp(-s_k (w rho_k + b))), s = 2 label - 1: scikit-learn's logistic
    regression with C = 1, whose intercept is not penalised, solved to machine precision by Newton's method.

    Args:
      ratios: float64[N]. labels: bool[N], of both kinds (else b has no finite optimum).
    """
    features = np.stack([ratios, np.ones_like(ratios)], axis=1)  # float64[N, 2]
    signs = np.where(labels, 1.0, -1.0)
    penalty = np.diag([1.0, 0.0])

    def value(x: np.ndarray) -> float:
        return float(x @ penalty @ x / 2 + np.logaddexp(0.0, -signs * (features @ x)).sum())

    x = np.zeros(2)
    for _ in range(MOST_STEPS):
        p = sigmoid(features @ x)
        gradient = penalty @ x + features.T @ (p - labels)
        hessian = penalty + (features * (p * (1 - p))[:, None]).T @ features
        step = np.linalg.solve(hessian, gradient)
        while value(x - step) > value(x) * (1 + 1e-12):  # the objective is convex: a short enough step goes down
            step = step / 2
        x = x - step
        if np.abs(step).max() < 1e-12:
            break
    return float(x[0]), float(x[1])


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


class PivotModel:
    """Chooses pivots by P(success | rho) * rho^gamma, with P learned from what branches came to.

    choosing: utility, or random (uniformly among the candidates). gamma: exponent of the position; higher is deeper.
    model: of P: logistic in rho, or uniform (P = 1), for comparisons with the reference.
    window: newest labels that P is fitted to.

    Not thread-safe: it belongs to the training thread.
    """

    def __init__(self, choosing: str = "utility", gamma: float = 2.0, *, model: str = "logistic", window: int = 10000):
        self.choosing, self.gamma, self.model, self.window = choosing, gamma, model, window
        self.labels: list[tuple[float, bool]] = []  # (rho, a branch succeeded), oldest first
        self.fit: tuple[float, float] | None = None
        self.seen = 0

    def observe(self, ratio: float, success: bool) -> None:
        """Notes what the branches of one pivot came to; the oldest label above the window leaves."""
        self.labels.append((ratio, success))
        del self.labels[: -self.window]
        self.seen += 1

    def refit(self) -> None:
        """Fits P to the window, if it holds more than 10 labels and both kinds; otherwise the fit that there is stays in use."""
        ratios = np.array([ratio for ratio, _ in self.labels])
        labels = np.array([label for _, label in self.labels], bool)
        if self.model == "logistic" and len(labels) > ENOUGH and labels.any() and not labels.all():
            self.fit = fit_logistic(ratios, labels)

    def log_weights(self, pivots: Sequence[Pivot]) -> np.ndarray:
        """log(P(success | rho) rho^gamma) of each pivot, float64[N]; in logarithms, since rho^gamma may leave every range."""
        if self.choosing == "random":
            return np.zeros(len(pivots))
        ratios = np.array([pivot.ratio for pivot in pivots])
        weights = self.gamma * np.log(ratios)
        if self.fit is not None:
            weights = weights - np.logaddexp(0.0, -(self.fit[0] * ratios + self.fit[1]))
        return weights

    def choose(self, pivots: Sequence[Pivot], n: int, random: np.random.Generator) -> list[Pivot]:
        """Draws min(n, N) different pivots one after another, each time in proportion to the weights that are left.

        The n largest of log-weight plus Gumbel noise are such draws (Yellott, 1977).
        """
        keys = self.log_weights(pivots) + random.gumbel(size=len(pivots))
        return [pivots[i] for i in np.argsort(-keys, kind="stable")[:n].tolist()]

    def metrics(self) -> dict[str, float]:
        """`branching/*`: the model's window and, once there is one, its fit."""
        labels = [label for _, label in self.labels]
        values = {"labels": len(labels), "labels_seen": self.seen, "fitted": self.fit is not None}
        if labels:
            values["success_rate"] = sum(labels) / len(labels)
        if self.fit is not None:
            values |= {"weight": self.fit[0], "bias": self.fit[1]}
        return named("branching", values)

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, JSON-serialisable."""
        ratios, labels = ([row[i] for row in self.labels] for i in (0, 1))
        return {"ratios": ratios, "labels": labels, "fit": self.fit and list(self.fit), "labels_seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.labels = list(zip(state["ratios"], state["labels"], strict=True))[-self.window :]
        self.fit = state["fit"] and tuple(state["fit"])
        self.seen = state["labels_seen"]
