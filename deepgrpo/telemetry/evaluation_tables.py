"""What an evaluation and a comparison print: numbers with their uncertainty, and the protocol that they depend on."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table

from deepgrpo.telemetry.log import Console

Printed = tuple[rich.table.Table, Sequence[str]]  # and the lines below it


def of_result(result: Mapping[str, Any]) -> Printed:
    """A row a set; the last is the unweighted mean over sets. Scores in percent, with standard error and 95 % interval."""
    protocol, scores = result["protocol"], result["scores"]
    every = next(iter(scores.values()))["scores"]  # pass@1 is avg@n where an answer is right or wrong
    names = [key for key in every if key != "pass@1"] or [f"avg@{protocol['n']}"]
    table = rich.table.Table(title=f"{result['model']['path']}, seed {result['seed']} (scores in %)")
    table.add_column("set")
    columns = ["problems", f"{titled(names[0], protocol)} ± s.e.", "95 % interval", *names[1:]]
    second = [f"by {result['second_grader']}"] if result["second_grader"] else []
    for column in [*columns, *second, "truncated %", "tokens", "no verdict"]:
        table.add_column(column, justify="right")
    for name, entry in scores.items():
        found = [entry["scores"].get(key) for key in names]
        first = "-" if found[0] is None else f"{percent(found[0]['mean'])} ± {percent(found[0]['error'])}"
        bounds = "-" if found[0] is None else f"{percent(found[0]['low'])} - {percent(found[0]['high'])}"
        others = ["-" if score is None else percent(score["mean"]) for score in found[1:]]
        others += [percent(entry["second"] and entry["second"]["mean"])] if second else []
        if name == "mean":
            table.add_section()
            counts = ["", first, bounds, *others, "", "", ""]
        else:
            lost = f"{entry['excluded']} + {entry['left_out']} left out" if entry["left_out"] else str(entry["excluded"])
            shares = [percent(entry["truncated_share"]), f"{entry['response_tokens']:.0f}", lost]
            counts = [str(entry["problems"]), first, bounds, *others, *shares]
        table.add_row(name + (" INCOMPLETE" if entry["incomplete"] else ""), *counts)
    return table, lines_of(result)


def titled(name: str, protocol: Mapping[str, Any]) -> str:
    return "greedy" if protocol["temperature"] == 0 else name


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """The protocol, in words."""
    p = result["protocol"]
    limit = f"{p['max_new_tokens']} new tokens, " if p["max_new_tokens"] else ""
    cut = "score 0" if p["truncated"] == "zero" else "are graded like others"
    drawn = "greedy" if p["temperature"] == 0 else f"temperature {p['temperature']:g}, top_p {p['top_p']:g}, top_k {p['top_k']}"
    lines = [
        f"template {p['template']}; stop ids {', '.join(map(str, p['stop_ids']))}; {drawn}, answers a problem: {p['n']}",
        f"limit {limit}context {p['max_model_len']}; answers that it cuts off {cut}",
        f"grader {p['rubric']['grader']}, version {p['grader']}",
        f"engine {p['engine']}, {p['dtype']}; weights {result['model']['weights']}",
    ]
    if result["selection"]["label"]:
        lines.append(f"checkpoint {result['selection']['label']}: {', '.join(result['selection']['sets'])}")
    if any(entry["incomplete"] for entry in result["scores"].values()):
        lines.append(
            "INCOMPLETE: more than 1 % of a set's problems have no verdict or were left out; do not report these numbers"
        )
    return lines


def of_comparison(found: Mapping[str, Any], one: str, other: str) -> Printed:
    """A row a set; differences are in points (hundredths), second arm minus first."""
    table = rich.table.Table(title=f"{other} against {one} (points)")
    table.add_column("set")
    for column in (
        "problems",
        "first",
        "second",
        "difference",
        "95 % interval",
        "wins",
        "losses",
        "ties",
        "p",
        "more seeds",
    ):
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


def percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f}"


def show(printed: Printed) -> None:
    width = None if sys.stdout.isatty() else 160  # a log has no width to fit into
    console = Console(width=width, highlight=False)
    console.print(printed[0])
    for line in printed[1]:
        console.print(line, markup=False, soft_wrap=True)
