"""Estimators of an evaluation: scores of answers to problems, with the uncertainty that a finite set of problems leaves.

A problem has n answers that were judged; rewards are float64[n]. Answers without a verdict are not among them, and problems
without any are excluded and counted, never taken for wrong. Everything here is NumPy, and draws from generators of its own.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS = 10_000  # of a bootstrap
BLOCK = 500  # draws that are held at once
SUBSETS = 500  # random sets of k answers that maj@k is averaged over where k < n
LEVEL = 0.95
INCOMPLETE_SHARE = 0.01  # of problems that are excluded: above it, a result is marked incomplete


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems. error: its standard error. low, high: bootstrap interval of LEVEL. problems: how many count."""

    mean: float
    error: float
    low: float
    high: float
    problems: int


#### One problem


def pass_at_k(answers: np.ndarray, right: np.ndarray, k: int) -> np.ndarray:
    """The probability that k of a problem's n answers, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al., Evaluating Large Language Models Trained on Code (2021), as the product
    1 - prod_{i=0}^{k-1} (n-c-i) / (n-i), which does not overflow.

    Args:
      answers, right: int[P], n and c of each problem.

    Returns:
      float64[P]; NaN where n < k, since fewer answers do not tell.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got {k}")
    n, c = np.asarray(answers, np.float64), np.asarray(right, np.float64)
    if (c > n).any() or (c < 0).any():
        raise ValueError("pass@k: a problem has more right answers than answers, or fewer than none")
    i = np.arange(k)
    with np.errstate(divide="ignore", invalid="ignore"):
        wrong = np.prod(np.maximum(n[:, None] - c[:, None] - i, 0) / (n[:, None] - i), axis=1)
    return np.where(n >= k, 1 - wrong, np.nan)


def majority(answers: Sequence[str], rewards: np.ndarray, k: int, rng: np.random.Generator) -> float:
    """maj@k of one problem: the reward of the answer that most of k answers give.

    Answers are compared as extracted, white space folded. One that nothing was extracted from ("") has no vote; if none has
    one, the reward is 0. Of several answers with the most votes each is as likely to win: the result is the mean of their
    rewards. With k < n it is the mean over SUBSETS random sets of k answers, drawn without replacement.

    Returns:
      The reward; NaN with fewer than k answers.
    """
    n = len(answers)
    if n < k:
        return math.nan
    folded = [" ".join(answer.split()) for answer in answers]
    names = {name: i for i, name in enumerate(dict.fromkeys(name for name in folded if name))}
    if not names:
        return 0.0
    ballots = np.zeros((n, len(names)))  # float64[n, classes], a row of zeros has no vote
    for i, name in enumerate(folded):
        if name:
            ballots[i, names[name]] = 1
    rewards = np.asarray(rewards, np.float64)
    worth = ballots.T @ rewards / ballots.sum(axis=0)  # float64[classes], one value a class unless the grader contradicts itself
    chosen = np.ones((1, n)) if k == n else (rng.random((SUBSETS, n)).argsort(axis=1) < k).astype(np.float64)
    votes = chosen @ ballots
    winners = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    return float(np.mean(winners @ worth / np.maximum(winners.sum(axis=1), 1)))


#### Many problems


def bootstrap_means(values: np.ndarray, rng: np.random.Generator, draws: int = DRAWS) -> np.ndarray:
    """Means of `draws` resamples of float64[P], with replacement: float64[draws]."""
    count = len(values)
    means = []
    for start in range(0, draws, BLOCK):
        picked = rng.integers(count, size=(min(BLOCK, draws - start), count))
        means.append(values[picked].mean(axis=1))
    return np.concatenate(means)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Percentile interval of LEVEL."""
    low, high = np.quantile(draws, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def standard_error(values: np.ndarray) -> float:
    """Of the mean over problems as a sample of their kind: s / sqrt(P), with P - 1 in s. NaN for one problem."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def sampling_error(problems: Sequence[np.ndarray]) -> float:
    """Standard error that comes from sampling answers alone, these problems being given: sqrt(sum s_p^2 / n_p) / P.

    NaN if a problem has only one answer: its spread is unknown (greedy answers have none).
    """
    if not problems or min(map(len, problems)) < 2:
        return math.nan
    return math.sqrt(sum(float(np.var(rewards, ddof=1)) / len(rewards) for rewards in problems)) / len(problems)


def estimate(values: np.ndarray, rng: np.random.Generator) -> Estimate | None:
    """Of the mean of float64[P]; NaN values do not count. None if nothing is left.

    Where all problems score 0, or all 1, no resample differs; the interval is then the exact one of a binomial share
    (Clopper-Pearson), so that 0 of 30 does not look certain.
    """
    values = values[~np.isnan(values)]
    P = len(values)
    if not P:
        return None
    low, high = interval(bootstrap_means(values, rng))
    if low == high == 0:
        high = 1 - ((1 - LEVEL) / 2) ** (1 / P)
    elif low == high == 1:
        low = ((1 - LEVEL) / 2) ** (1 / P)
    return Estimate(float(values.mean()), standard_error(values), low, high, P)


def unweighted_mean(parts: Sequence[np.ndarray], rng: np.random.Generator) -> Estimate | None:
    """Of the mean over sets of each set's mean, a set counting alike whatever its size; problems are resampled set by set."""
    parts = [part[~np.isnan(part)] for part in parts]
    if not parts or not all(map(len, parts)):
        return None
    low, high = interval(np.mean([bootstrap_means(part, rng) for part in parts], axis=0))
    if low == high:  # no set's resamples differ: the mean of their exact intervals, which is wider than need be
        found = [estimate(part, rng) for part in parts]
        low, high = float(np.mean([e.low for e in found])), float(np.mean([e.high for e in found]))
    error = math.sqrt(sum(standard_error(part) ** 2 for part in parts)) / len(parts)
    return Estimate(float(np.mean([part.mean() for part in parts])), error, low, high, sum(map(len, parts)))


#### An evaluation


def set_values(items: Sequence[Mapping[str, Any]], n: int, threshold: float, seed: int) -> dict[str, np.ndarray]:
    """float64[P] of every score of one set, by its name; P counts the problems with a verdict.

    Args:
      items: one a problem, with `rewards` (None: no verdict) and `answers` (extracted texts), as long as each other.
      n: answers asked of a problem. threshold: an answer above it is right.
    """
    judged = [[(r, a) for r, a in zip(i["rewards"], i["answers"], strict=True) if r is not None] for i in items]
    judged = [pairs for pairs in judged if pairs]
    rewards = [np.array([r for r, _ in pairs], np.float64) for pairs in judged]
    values = {f"avg@{n}": np.array([r.mean() for r in rewards])}
    if n > 1:
        counts, right = np.array([len(r) for r in rewards]), np.array([int((r > threshold).sum()) for r in rewards])
        sizes = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
        values |= {f"pass@{k}": pass_at_k(counts, right, k) for k in sizes if len(counts)}
        for k in sizes[1:]:
            rng = generator(seed, f"maj@{k}")
            values[f"maj@{k}"] = np.array([
                majority([a for _, a in pairs], r, k, rng) for pairs, r in zip(judged, rewards, strict=True)
            ])  # fmt: skip
    return values


def summarize(sets: Mapping[str, Sequence[Mapping[str, Any]]], left_out: Mapping[str, int], n: int, threshold: float, seed: int):
    """Scores of every set and, under "mean", of the unweighted mean over sets.

    Args:
      sets: items by set, as in `set_values`; `finish_reasons` are counted too. left_out: rows that never became a problem.

    Returns:
      {set: {"problems", "excluded", "left_out", "no_verdict_answers", "truncated_share", "incomplete", "sampling_error",
      "scores": {name: Estimate as a dict}}}; a score that nothing is known of is absent.
    """
    result, values = {}, {}
    for name, items in sets.items():
        values[name] = set_values(items, n, threshold, seed)
        judged = [[r for r in item["rewards"] if r is not None] for item in items]
        reasons = [reason for item in items for reason in item["finish_reasons"]]
        excluded = sum(not rewards for rewards in judged)
        missing = excluded + left_out.get(name, 0)
        result[name] = {
            "problems": len(items) - excluded,
            "excluded": excluded,
            "left_out": left_out.get(name, 0),
            "no_verdict_answers": sum(r is None for item in items for r in item["rewards"]),
            "truncated_share": reasons.count("length") / len(reasons) if reasons else 0.0,
            "incomplete": missing > INCOMPLETE_SHARE * (len(items) + left_out.get(name, 0)),
            "sampling_error": finite(sampling_error([np.array(rewards) for rewards in judged if rewards])),
            "scores": scores({key: estimate(v, generator(seed, f"{name}/{key}")) for key, v in values[name].items()}),
        }
    if len(sets) > 1:
        common = [key for key in next(iter(values.values())) if all(key in v for v in values.values())]
        means = {key: unweighted_mean([v[key] for v in values.values()], generator(seed, f"mean/{key}")) for key in common}
        incomplete = any(entry["incomplete"] for entry in result.values())
        result["mean"] = {"incomplete": incomplete, "scores": scores(means)}
    return result


def scores(estimates: Mapping[str, Estimate | None]) -> dict[str, dict[str, float | None]]:
    """As JSON, which has no NaN."""
    found = {key: dataclasses.asdict(value) for key, value in estimates.items() if value is not None}
    return {key: {field: finite(number) for field, number in entry.items()} for key, entry in found.items()}


def finite(number: float) -> float | None:
    return None if math.isnan(number) else number


def generator(seed: int, purpose: str) -> np.random.Generator:
    """One stream for each (seed, purpose)."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
