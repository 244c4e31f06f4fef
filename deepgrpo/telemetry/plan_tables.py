"""The plan of a run as tables for a terminal."""

from collections.abc import Iterator
from typing import Any

import rich.console
import rich.table


def show(found: dict[str, Any], console: rich.console.Console) -> None:
    """Prints what `deepgrpo.plan` has found."""
    model, device, store, learner, rollout = (found[key] for key in ("model", "device", "memory", "learner", "rollout"))
    console.print(
        f"{model['parameters'] / 1e6:,.1f} million parameters ({model['model_type']}, L={model['num_layers']} D={model['width']}"
        f" N={model['num_heads']} K={model['num_kv_heads']} V={model['vocab_size']}) on {device['count']} x {device['name']},"
        f" mesh {tuple(device['mesh'].values())}, attention {device['attention']}"
    )
    of = " x ".join(str(store["of_shape"][key]) for key in "ABT")
    rows = [(name, gigabytes(size)) for name, size in store["bytes_by_part"].items() if size]
    fits = {
        None: "",
        True: f" of {gigabytes(store['device_bytes'])}",
        False: f": does NOT fit {gigabytes(store['device_bytes'])}",
    }
    table(
        console,
        f"Memory of a device, at [A, B, T] = {of}",
        rows + [("together", gigabytes(store["bytes"]) + fits[store["fits"]])],
    )
    rows = [(f"T = {s['T']}", f"{s['A']} micro-batches of {s['B']} rows, context {s['C']}") for s in found["shapes"]]
    table(console, "Shapes that are compiled", rows)
    work = found["work"]
    rows = [
        ("rollouts", f"{rollout['sequences']:,} of {rollout['tokens'] / rollout['sequences']:,.0f} tokens sampled on average"),
        ("rows that train", f"{learner['rows']:,} in {learner['optimizer_steps']} optimizer steps"),
        ("tokens in the network", f"{learner['tokens']:,}, padding {learner['padding_share']:.0%} of what is computed"),
        ("spared by shared prefixes", f"{learner['spared_by_shared_prefixes']:,}"),
        *((f"FLOPs, {key.removeprefix('flops_')}", f"{value:.3g}") for key, value in learner.items() if key.startswith("flops_")),
        *((f"seconds, {key}", clock(value)) for key, value in found["seconds"].items()),
        ("steps of the run", f"{work['steps']:,}" if work["steps"] else "not known"),
        ("passes over the data", f"{work['passes']:.2f}" if work["passes"] else "not known"),
    ]
    table(console, "A step", rows)
    slots = rollout["sequences_at_once_per_engine"]
    rows = [
        ("engines", f"{rollout['engines']} ({rollout['engine']}), {slots} sequences at once in each"),
        ("weights of one", gigabytes(rollout["weight_bytes_per_engine"])),
        ("keys and values, a token", f"{rollout['kv_bytes_per_token']:,} bytes"),
        ("all sequences at full length", gigabytes(rollout["kv_bytes_per_engine_at_full_length"])),
        ("at mean length", gigabytes(rollout["kv_bytes_per_engine_at_mean_length"])),
    ]
    table(console, "Rollout engine", rows)
    if found["teacher"]:
        table(console, "Teacher, before its budgets and cached replies", list(teacher_lines(found["teacher"])))
    if found.get("compiled"):
        c = found["compiled"]
        ratio = f"{c['estimate_over_xla']:.3f}"
        rows = [
            ("on", c["on"]),
            ("estimate", gigabytes(c["bytes_estimated"])),
            ("XLA", gigabytes(c["bytes_xla"])),
            ("ratio", ratio),
        ]
        table(console, f"Compiled: {c['program']}, T = {c['of_shape']['T']}", rows)
    console.print("Assumed:" + "".join(f"\n - {note}" for note in found["assumptions"]), markup=False)


def teacher_lines(teacher: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("per_step", "per_run"):
        if spent := teacher[name]:
            yield (
                name.replace("_", " "),
                (
                    f"{spent['corrections']:,.0f} corrections, {spent['prompt_tokens']:,.0f} prompt and"
                    f" {spent['completion_tokens']:,.0f} completion tokens"
                    + (f", money {spent['money']:,.2f}" if spent["money"] else "")
                ),
            )
    if teacher["rule_based"]:
        yield "endpoint", "the rule-based teacher, which costs nothing"
    if teacher["budget_lasts_steps"] is not None:
        yield "budget lasts", f"{teacher['budget_lasts_steps']:,.0f} steps"


def table(console: rich.console.Console, title: str, rows: list[tuple[str, str]]) -> None:
    made = rich.table.Table("", "", title=title, title_justify="left", show_header=False)
    for row in rows:
        made.add_row(*row)
    console.print(made)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 5e6 else f"{size / 1e6:,.3f} MB"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else f"{seconds:,.1f} s"
