"""Paired comparison of two arms' evaluations: the same problems under both, one or several results (training seeds) an arm.

All differences are second arm minus first.
"""

import argparse
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.table

from deepgrpo.data.cells import LINE, TEXT, Kind, Maybe, finite, problem, refuse
from deepgrpo.data.tables import document
from deepgrpo.telemetry.evaluation import RESULT, Printed, percent, show
from deepgrpo.telemetry.statistics import BLOCK, DRAWS, generator, interval

# What must agree before two numbers may be compared. Other differences (engine, precision) are told.
PROTOCOL = ("sets", "template", "truncated", "max_new_tokens", "max_model_len", "temperature", "top_p", "n", "grader")
PROTOCOL += ("rubric", "loop")
TOLD = ("engine", "dtype", "stop_ids", "threshold")
SIGNIFICANCE, POWER = 0.05, 0.8
FEW = 5  # seeds an arm below which their spread is hardly known


GIVEN = Kind("given", lambda value: value is not None)
PARTS = {"items": {}, "scores": {}, "selection": {"label": Maybe(LINE)}}
ITEM = {"id": TEXT, "rewards": [Maybe(Kind("a finite number", finite))]}


class NotComparable(ValueError):
    """Two results were not made under one protocol; says what differs."""


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value that wins and losses are equally likely, ties set aside: exact binomial.

    With one right-or-wrong answer a problem this is McNemar's exact test.
    """
    from scipy import stats  # half a second to import

    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def permutation_test(one: Sequence[np.ndarray], other: Sequence[np.ndarray], seed: int) -> float:
    """Two-sided p-value of the difference of the unweighted means over sets.

    It says in how many exchanges of the arms, problem by problem, the difference is as large; the spread of seeds does not count.

    Where every problem that differs moves the mean as far as any other, as with one right-or-wrong answer to each problem of one
    set, this is the sign test.

    Args:
      one, other: float64[seeds, problems] of each set.
    """
    moved = [(b.mean(axis=0) - a.mean(axis=0)) / a.shape[1] / len(one) for a, b in zip(one, other, strict=True)]
    gaps = np.concatenate(moved)
    gaps = gaps[np.abs(gaps) > 1e-12]  # ties move nothing, however they are exchanged
    if not len(gaps) or np.ptp(np.abs(gaps)) < 1e-12:
        return sign_test(int((gaps > 0).sum()), int((gaps < 0).sum()))
    from scipy import stats

    keys = dict(permutation_type="samples", n_resamples=DRAWS, batch=BLOCK, rng=generator(seed, "permutation"))
    return float(
        stats.permutation_test((gaps,), np.sum, vectorized=True, **keys).pvalue
    )  # of one sample: its signs are exchanged


def seeds_needed(difference: float, variances: tuple[float, float], significance: float = SIGNIFICANCE, power: float = POWER):
    """Seeds an arm that a two-sided test needs to find `difference` with probability `power`, or None if it is 0.

        ceil((z_{1-a/2} + z_power)^2 (s1^2 + s2^2) / d^2),  a = significance

    by the normal approximation (too few by about one or two where the answer is below 6).

    Args:
      variances: of one seed's score in each arm, with S - 1 in the denominator.
    """
    if difference == 0:
        return None
    z = statistics.NormalDist().inv_cdf(1 - significance / 2) + statistics.NormalDist().inv_cdf(power)
    return max(1, math.ceil(z**2 * sum(variances) / difference**2 - 1e-9))


def paired_bootstrap(one: Sequence[np.ndarray], other: Sequence[np.ndarray], seed: int, draws: int = DRAWS) -> np.ndarray:
    """Differences of the unweighted mean over sets in resamples: float64[draws].

    Problems are resampled set by set, the same for both arms; where an arm has several seeds, these are resampled too.

    Args:
      one, other: float64[seeds, problems] of each set; the seeds of an arm are the same in all sets.
    """
    rng, found = generator(seed, "compare"), []
    for start in range(0, draws, BLOCK):
        size = min(BLOCK, draws - start)
        arms = [rng.multinomial(len(arm[0]), np.full(len(arm[0]), 1 / len(arm[0])), size) / len(arm[0]) for arm in (one, other)]
        total = np.zeros(size)
        for a, b in zip(one, other, strict=True):
            P = a.shape[1]
            weights = rng.multinomial(P, np.full(P, 1 / P), size) / P  # float64[draws, problems]
            total += ((arms[1] @ b) * weights).sum(axis=1) - ((arms[0] @ a) * weights).sum(axis=1)
        found.append(total / len(one))
    return np.concatenate(found)


#### Results


def problems(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what forbids a comparison, what is worth telling), a line each."""
    first, wrong, told = results[0]["protocol"], [], []
    for name, result in zip(names[1:], results[1:], strict=True):
        other = result["protocol"]
        both = {key: (shown(key, first[key]), shown(key, other[key])) for key in (*PROTOCOL, *TOLD)}
        lines = [(key, f"{key}: {here} in {names[0]}, {there} in {name}") for key, (here, there) in both.items()]
        wrong += [line for key, line in lines if first[key] != other[key] and key in PROTOCOL]
        told += [line for key, line in lines if first[key] != other[key] and key in TOLD]
    told += [f"{name}: incomplete, more than 1 % of a set's problems are missing" for r, name in zip(results, names, strict=True)
             if any(entry["incomplete"] for entry in r["scores"].values())]  # fmt: skip
    told += [f"{name}: {r['selection']['label']}" for r, name in zip(results, names, strict=True) if r["selection"]["label"]]
    return wrong, told


def repeated(arm: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """Whether two results of an arm are one: the same weights and the same sampling are no second seed."""
    seen: dict[tuple, str] = {}
    for name, result in zip(names, arm, strict=True):
        protocol = result["protocol"]
        key = (result["model"]["weights"], protocol["temperature"] == 0 or result["seed"])
        if key in seen:
            return f"{name} and {seen[key]} are answers of the same weights with the same sampling: they count as one"
        seen[key] = name
    return None


def few_seeds(seeds: int) -> list[str]:
    """What so many training seeds an arm leave open."""
    if seeds == 1:
        return ["one seed an arm: interval and p are about these models, not about the methods that made them"]
    few = f"{seeds} seeds an arm: so few understate how far seeds spread; the interval is too narrow, and p is about these runs"
    return [few] * (seeds < FEW)


def shown(key: str, value: Any) -> str:
    if key == "sets":
        return ", ".join(f"{name} ({entry['problems']} problems, {entry['digest']})" for name, entry in value.items())
    return repr(value)


def item_scores(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{set: {problem: mean reward of its answers with a verdict}}."""
    return {
        name: {item["id"]: float(np.mean(judged)) for item in items if (judged := [r for r in item["rewards"] if r is not None])}
        for name, items in result["items"].items()
    }


def compare(
    one: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    names: tuple[Sequence[str], Sequence[str]],
    force: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Compares two arms, each of one or more results of `evaluate`.

    Returns:
      {"sets": {set: row}, "mean": row (with several sets), "notes": lines}. A row has difference, low, high, wins, losses, ties
      (of problems, by their mean over answers and seeds), p (`permutation_test`), problems, one,
      other (the arms' scores) and, where both arms have several seeds, seed_error, seeds_needed and more_seeds.

    Raises:
      NotComparable: other protocols and not `force`; a result counted twice; no problem in common.
    """
    wrong, notes = problems([*one, *other], [*names[0], *names[1]])
    wrong += [line for arm, its in zip((one, other), names, strict=True) if (line := repeated(arm, its))]
    if wrong and not force:
        raise NotComparable("these results were not made alike:\n  " + "\n  ".join(wrong) + "\n--force compares what they share")
    notes = [*(f"not alike: {line}" for line in wrong), *notes]
    scores = [[item_scores(result) for result in arm] for arm in (one, other)]
    everything = [result for arm in scores for result in arm]
    tables: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in everything[0]:
        shared = [item for item in everything[0][name] if all(item in result.get(name, {}) for result in everything)]
        missing = len(set().union(*(result.get(name, {}) for result in everything))) - len(shared)
        if missing:
            notes.append(f"{name}: {missing} problems have no verdict in one of the results and are left out")
        if shared:
            tables[name] = tuple(np.array([[result[name][item] for item in shared] for result in arm]) for arm in scores)
    if not tables:
        raise NotComparable("the results have no problem in common")
    notes += few_seeds(min(len(one), len(other)))
    rows = {name: row([a], [b], seed) for name, (a, b) in tables.items()}
    found = {"sets": rows, "notes": notes}
    if len(tables) > 1:
        found["mean"] = row([a for a, _ in tables.values()], [b for _, b in tables.values()], seed)
    return found


def row(one: Sequence[np.ndarray], other: Sequence[np.ndarray], seed: int) -> dict[str, Any]:
    """One line of a comparison. one, other: float64[seeds, problems] of each set."""
    by_seed = [np.mean([part.mean(axis=1) for part in arm], axis=0) for arm in (one, other)]  # float64[seeds]
    gaps = np.concatenate([b.mean(axis=0) - a.mean(axis=0) for a, b in zip(one, other, strict=True)])
    wins, losses = int((gaps > 1e-12).sum()), int((gaps < -1e-12).sum())
    difference = float(by_seed[1].mean() - by_seed[0].mean())
    low, high = interval(paired_bootstrap(one, other, seed))
    found = {
        "problems": len(gaps),
        "one": float(by_seed[0].mean()),
        "other": float(by_seed[1].mean()),
        "difference": difference,
        "low": low,
        "high": high,
        "wins": wins,
        "losses": losses,
        "ties": len(gaps) - wins - losses,
        "p": permutation_test(one, other, seed),
    }
    if min(map(len, by_seed)) > 1:
        variances = tuple(float(np.var(scores, ddof=1)) for scores in by_seed)
        needed = seeds_needed(difference, variances)
        found["seed_error"] = math.sqrt(sum(v / len(s) for v, s in zip(variances, by_seed, strict=True)))
        found["seeds_needed"] = needed
        found["more_seeds"] = None if needed is None else max(0, needed - min(map(len, by_seed)))
    return found


def comparison_table(found: Mapping[str, Any], one: str, other: str) -> Printed:
    """A row a set; differences are in points (hundredths), second arm minus first."""
    table = rich.table.Table(title=f"{other} against {one} (points)")
    table.add_column("set")
    columns = ("problems", "first", "second", "difference", "95 % interval", "wins", "losses", "ties", "p", "more seeds")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in [*found["sets"].items(), *([("mean", found["mean"])] if "mean" in found else [])]:
        more = row.get("more_seeds", "?")
        table.add_row(
            name,
            str(row["problems"]),
            percent(row["one"]),
            percent(row["other"]),
            f"{100 * row['difference']:+.1f}",
            f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}",
            *(str(row[key]) for key in ("wins", "losses", "ties")),
            f"{row['p']:.2g}",
            "-" if more is None else str(more),
        )
    seeds = "more seeds: each arm's further training seeds to find this difference with power 80 % at the 5 % level"
    unknown = all("more_seeds" not in row for row in found["sets"].values())
    lines = [seeds + ("; unknown (?) from fewer than two seeds an arm" if unknown else "")]
    return table, [*lines, *found["notes"]]


#### The command


def read_arm(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Results and their names from FOLDER_OR_FILE[,FOLDER_OR_FILE ...].

    Raises:
      FileNotFoundError, DataError: no result there, or none that can be read.
    """
    paths = [pathlib.Path(name) for name in text.split(",") if name]
    paths = [path / RESULT if path.is_dir() else path for path in paths]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: expected the result of a finished evaluation, or its folder")
    return [read_result(path) for path in paths], [str(path) for path in paths]


def read_result(path: pathlib.Path) -> dict[str, Any]:
    """A result with all that a comparison looks at; its rewards are numbers or null."""
    found = document(
        path, {"protocol": dict.fromkeys((*PROTOCOL, *TOLD), GIVEN), "seed": GIVEN, "model": {"weights": GIVEN}, **PARTS}
    )
    sets = {name: problem(items, [ITEM], f"items.{name}") for name, items in found["items"].items()}
    refuse(path, [text for text in sets.values() if text], "evaluate again, or --regrade its folder")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepgrpo.evaluate compare", description=__doc__)
    parser.add_argument("one", metavar="A[,A2 ...]", help="folders (or result files) of the first arm")
    parser.add_argument("other", metavar="B[,B2 ...]", help="of the second; a positive difference means that this one is better")
    parser.add_argument(
        "--force", action="store_true", help="compare what they share, though they were made under other protocols"
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the comparison")
    args = parser.parse_args(argv)
    (one, names), (other, other_names) = read_arm(args.one), read_arm(args.other)
    if not one or not other:
        parser.error("each arm needs at least one result")
    found = compare(one, other, (names, other_names), args.force)
    show(comparison_table(found, args.one, args.other))
    if args.out:
        args.out.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0
