"""Where a chain is branched: its candidates, what each is worth, and the choice among them.

A chain is the prompt (index 0, the root) and the segments of one response (1, 2, ...). Branching at index i keeps the response up
to the end of segment i. Its position ratio is rho = (i + 1) / (number of segments + 1).
"""

import dataclasses
import math
from collections.abc import Sequence

import ml_collections
import numpy as np

from deepgrpo.curriculum.partition import Segment

CHOOSING = ("utility", "random")
MODELS = ("logistic", "uniform")
ENOUGH = 10  # labels that must be exceeded before the model is fitted
MOST_STEPS = 100  # of Newton's method; about 6 are taken
PIVOTS = 0x91707  # purpose of this module's randomness in (seed, step, purpose, index)


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
      segments: of the response, from `partition`.
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

    Not thread-safe: it belongs to the training thread.
    """

    def __init__(
        self,
        choosing: str = "utility",
        model: str = "logistic",
        *,
        position_bias: float = 2.0,
        window_size: int = 10000,
    ):
        """Args:
          choosing: utility, or random (uniformly among the candidates).
          model: of P: logistic in rho, or uniform (P = 1).
          position_bias: gamma. window_size: newest labels that P is fitted to.

        Raises:
          ValueError: an unknown choice, or a window that is not positive.
        """
        for key, value, known in (("choose_by", choosing, CHOOSING), ("prob_model", model, MODELS)):
            if value not in known:
                raise ValueError(f"branches.{key} must be one of {', '.join(known)}, got {value!r}")
        if window_size < 1:
            raise ValueError(f"branches.window_size must be positive, got {window_size}")
        self._choosing, self._model, self._gamma, self._window = choosing, model, position_bias, window_size
        self._labels: list[tuple[float, bool]] = []  # (rho, a branch succeeded), oldest first
        self._fit: tuple[float, float] | None = None
        self._seen = 0

    def observe(self, ratio: float, success: bool) -> None:
        """Notes what the branches of one pivot came to; the oldest label above the window leaves."""
        self._labels.append((ratio, success))
        del self._labels[: -self._window]
        self._seen += 1

    def refit(self) -> None:
        """Fits P to the window, if it holds more than 10 labels and both kinds; otherwise the fit that there is stays in use."""
        ratios = np.array([ratio for ratio, _ in self._labels])
        labels = np.array([label for _, label in self._labels], bool)
        if self._model == "logistic" and len(labels) > ENOUGH and labels.any() and not labels.all():
            self._fit = fit_logistic(ratios, labels)

    def log_weights(self, pivots: Sequence[Pivot]) -> np.ndarray:
        """log(P(success | rho) rho^gamma) of each pivot, float64[N]; in logarithms, since rho^gamma may leave every range."""
        ratios = np.array([pivot.ratio for pivot in pivots])
        if self._choosing == "random":
            return np.zeros(len(pivots))
        weights = self._gamma * np.log(ratios)
        if self._fit is not None:
            weights = weights - np.logaddexp(0.0, -(self._fit[0] * ratios + self._fit[1]))
        return weights

    def probabilities(self, pivots: Sequence[Pivot]) -> np.ndarray:
        """Probability of each pivot to be the first that is drawn, float64[N]."""
        weights = self.log_weights(pivots)
        weights = np.exp(weights - weights.max(initial=-math.inf))
        return weights / weights.sum()

    def choose(self, pivots: Sequence[Pivot], n: int, random: np.random.Generator) -> list[Pivot]:
        """Draws min(n, N) different pivots one after another, each time in proportion to the weights that are left.

        The n largest of log-weight plus Gumbel noise are such draws (Yellott, 1977).
        """
        keys = self.log_weights(pivots) + random.gumbel(size=len(pivots))
        return [pivots[i] for i in np.argsort(-keys, kind="stable")[:n].tolist()]

    def metrics(self) -> dict[str, float]:
        """`branching/*`: the model's window and, once there is one, its fit."""
        labels = [label for _, label in self._labels]
        values = {"labels": len(labels), "labels_seen": self._seen, "fitted": self._fit is not None}
        if labels:
            values["success_rate"] = sum(labels) / len(labels)
        if self._fit is not None:
            values |= {"weight": self._fit[0], "bias": self._fit[1]}
        return {f"branching/{name}": float(value) for name, value in values.items()}

    def state(self) -> dict[str, object]:
        """Everything that `restore` needs, JSON-serialisable."""
        ratios, labels = ([row[i] for row in self._labels] for i in (0, 1))
        return {"ratios": ratios, "labels": labels, "fit": self._fit and list(self._fit), "labels_seen": self._seen}

    def restore(self, state: dict) -> None:
        self._labels = list(zip(state["ratios"], state["labels"], strict=True))[-self._window :]
        self._fit = state["fit"] and tuple(state["fit"])
        self._seen = state["labels_seen"]


def create(config: ml_collections.ConfigDict) -> PivotModel:
    """From the whole configuration."""
    keys = config.branches
    return PivotModel(keys.choose_by, position_bias=keys.position_bias)
