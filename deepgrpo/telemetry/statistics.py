"""Numbers about scored groups: what failed and why in training, and the scores of a validation."""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.types import Group

BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 42
AVERAGE = "avg"  # stands where a source stands, so no source may have this name


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
