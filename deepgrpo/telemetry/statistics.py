"""Numbers about scored groups: what failed and why in training, the scores of a validation, and the estimators of an evaluation.

In an evaluation, a problem has n answers that were judged; rewards are float64[n]. Answers without a verdict are not among them,
and problems without any are excluded and counted, never taken for wrong.
"""

import collections
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.types import STUDENT, Group

BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 42
AVERAGE = "avg"  # stands where a source stands, so no source may have this name

DRAWS = 10_000  # of a bootstrap
BLOCK = 500  # draws that are held at once
SUBSETS = 500  # random sets of k answers that maj@k is averaged over where k < n
LEVEL = 0.95
INCOMPLETE_SHARE = 0.01  # of problems that are excluded: above it, a result is marked incomplete


def group_statistics(groups: Sequence[Group], threshold: float) -> dict[str, float]:
    """What a step's groups came to; rewards, advantages and lengths are `learner.rows.data_metrics`.

    `rewards/reason_<code>` counts verdicts; `rewards/no_verdict_share` is of all rollouts. `rewards/truncated_negative_share` is
    the share of failures that hit the length limit: they are punished in full though the student may have been on its way.
    `data/<p>/groups_{all_right,all_wrong,mixed}_share` tell how many groups carry a gradient (mixed), p as in `critic/<p>`.
    Branches are no part of the main chains.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failures = [rollout for group in groups for rollout in group.failures(threshold)]
    reasons = collections.Counter(rollout.grade.reason for rollout in rollouts)
    metrics = {f"rewards/reason_{code}": float(count) for code, count in sorted(reasons.items())}
    metrics["rewards/no_verdict_share"] = share(sum(r.reward is None for r in rollouts), len(rollouts))
    truncated = sum(r.completion.finish_reason == "length" for r in failures)
    metrics["rewards/truncated_negative_share"] = share(truncated, len(failures))
    main = [g for g in groups if g.prompt.stream == "main"]
    streams = {
        "main_chain": main,
        "main_chain_original": [g for g in main if not g.prompt.injected],
        "main_chain_synthetic": [g for g in main if g.prompt.injected],
        "branch_chain": [g for g in groups if g.prompt.stream == "branch"],
    }
    for name, members in streams.items():
        counts = [group.successes(threshold) for group in members if group.judged]
        if not counts:
            continue
        right = sum(k == n for k, n in counts)
        wrong = sum(k == 0 for k, n in counts)
        metrics |= {
            f"data/{name}/groups": float(len(counts)),
            f"data/{name}/groups_all_right_share": right / len(counts),
            f"data/{name}/groups_all_wrong_share": wrong / len(counts),
            f"data/{name}/groups_mixed_share": 1.0 - (right + wrong) / len(counts),
            f"data/{name}/success_rate": sum(k for k, _ in counts) / sum(n for _, n in counts),
        }
    return metrics


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


#### Validation


def validation_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Scores of a validation from `dumps.validation_records`.

    Answers belong together when they are of the same group, hence of the same data set row: a question that occurs twice in a
    file stays two problems. Means are over problems; an answer without a verdict is left out of its problem, a problem without
    any verdict out of its source, and both are counted. N is the largest number of answers to a problem of the source.

    `val-core/<source>/reward/{mean@N, best@N/mean, best@N/std}`; everything else under `val-aux`: reward, finished and completed
    with mean@N, std@N, and best@n, worst@n for n = 2, 4, ... N (mean and deviation of 1000 draws with replacement, from a
    generator of its own). With two sources or more, `.../avg/...` is the unweighted mean over the sources that have the key.
    """
    problems: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for answer in records:
        problems.setdefault(answer["data_source"], {}).setdefault(answer["group"], []).append(answer)
    by_source = {source: source_metrics(list(groups.values())) for source, groups in problems.items()}
    if AVERAGE in by_source:
        raise ValueError(f'data source "{AVERAGE}" has the name of the average over sources; rename it')
    metrics = {}
    for source, values in by_source.items():
        metrics |= {f"{section}/{source}/{name}": value for (section, name), value in values.items()}
    # Averaged by (section, name), never by taking a finished key apart: a source's name may hold a slash.
    for section, name in dict.fromkeys(key for values in by_source.values() for key in values):
        found = [values[section, name] for values in by_source.values() if (section, name) in values]
        if len(found) > 1:
            metrics[f"{section}/{AVERAGE}/{name}"] = float(np.mean(found))
    return metrics


def choosing_metrics(sources: Iterable[str], n: int, prefix: str = "") -> list[str]:
    """The validation metrics of these sources, with `n` answers to a problem, whose highest value is the best: of what may choose
    a checkpoint."""
    answer = dict.fromkeys(("reward", "finished", "completed", "response_length"), 0.0) | {"finish_reason": "stop"}
    records = [answer | {"data_source": source, "group": source} for source in dict.fromkeys(sources) for _ in range(n)]
    highest = re.compile(r"/(reward|finished|completed)/(mean@\d+|(best|worst)@\d+/mean)$")
    return [prefix + name for name in validation_metrics(records) if highest.search(name)]


def source_metrics(problems: Sequence[Sequence[Mapping[str, Any]]]) -> dict[tuple[str, str], float]:
    """Returns {(section, name): value} of one data source, given the answers of each of its problems."""
    answers = [answer for problem in problems for answer in problem]
    metrics = {
        ("val-aux", "problems"): float(len(problems)),
        ("val-aux", "no_verdict_share"): share(sum(a["reward"] is None for a in answers), len(answers)),
        ("val-aux", "truncated_share"): share(sum(a["finish_reason"] == "length" for a in answers), len(answers)),
        ("val-aux", "response_length/mean"): float(np.mean([a["response_length"] for a in answers])),
    }
    if turns := [sum(turn["who"] == STUDENT for turn in a["turns"]) for a in answers if "turns" in a]:
        metrics["val-aux", "num_turns/mean"] = float(np.mean(turns))
    judged = [[a for a in problem if a["reward"] is not None] for problem in problems]
    judged = [problem for problem in judged if problem]
    most = max((len(problem) for problem in problems), default=0)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    for variable in ("reward", "finished", "completed"):
        values = [np.array([float(a[variable]) for a in problem]) for problem in judged]
        if not values:
            continue
        for name, value in answer_statistics(values, most, rng).items():
            core = variable == "reward" and name.startswith(("mean@", "best@")) and f"@{most}" in name
            metrics["val-core" if core else "val-aux", f"{variable}/{name}"] = value
    return metrics


def answer_statistics(problems: Sequence[np.ndarray], most: int, rng: np.random.Generator) -> dict[str, float]:
    """mean@N, std@N, best@n and worst@n of one variable, averaged over problems; each array is float64[answers]."""
    metrics = {f"mean@{most}": float(np.mean([p.mean() for p in problems]))}
    if most == 1:
        return metrics
    metrics[f"std@{most}"] = float(np.mean([p.std() for p in problems]))
    sizes = [2**i for i in range(1, most.bit_length()) if 2**i < most] + [most]
    for n in sizes:
        draws = [p[rng.integers(len(p), size=(BOOTSTRAP_DRAWS, n))] for p in problems]  # each float64[1000, n]
        for name, extremes in (("best", [d.max(axis=1) for d in draws]), ("worst", [d.min(axis=1) for d in draws])):
            metrics[f"{name}@{n}/mean"] = float(np.mean([e.mean() for e in extremes]))
            metrics[f"{name}@{n}/std"] = float(np.mean([e.std() for e in extremes]))
    return metrics


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems. error: its standard error. low, high: bootstrap interval of LEVEL. problems: how many count."""

    mean: float
    error: float
    low: float
    high: float
    problems: int


#### Estimators of one problem


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


#### Estimators over problems


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


#### An evaluation's scores


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
