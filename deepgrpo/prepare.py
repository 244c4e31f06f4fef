"""Converts a benchmark's own files into the parquet files that this package and verl train and evaluate on.

    python -m deepgrpo.prepare gsm8k --source DATA --out data/gsm8k
    python -m deepgrpo.train --config=configs/gsm8k_0p5b.py --config.data.template=chat \\
        --config.data.train=verl:data/gsm8k/train.parquet --config.data.validation=verl:data/gsm8k/test.parquet

The source is a folder with the files under their usual names, a file, a data set that Hugging Face's `save_to_disk` wrote, or a
hub name (OWNER/NAME). Beside the parquet files stands report.json: counts, repairs, overlap of training and test questions,
options, and the sha256 of everything read and written. Known defects are repaired, never hidden. docs/data.md says more.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
import rich.markup
import rich.table

from deepgrpo.config.streams import tool
from deepgrpo.data import benchmarks, benchmarks_agents, benchmarks_tables, contamination, dataset, repair, tables
from deepgrpo.data.benchmarks import Benchmark, Context, Converted, Options
from deepgrpo.data.cells import refuse, writable
from deepgrpo.data.tables import Row
from deepgrpo.telemetry.log import Console

BENCHMARKS: dict[str, Benchmark] = {
    **benchmarks.BENCHMARKS,
    **benchmarks_tables.BENCHMARKS,
    **benchmarks_agents.BENCHMARKS,
}
LISTED = 20  # of a kind, in the report


@dataclasses.dataclass(frozen=True)
class Request:
    """What to prepare, from where, and how; fields as the flags of the same name."""

    name: str
    source: str = ""
    out: str = ""
    split: tuple[str, ...] = ()  # NAME or NAME=PATH
    revision: str | None = None
    fixes: str = "auto"  # corrections: auto (the file beside the data) | none | a file
    against: tuple[str, ...] = ()  # NAME:PATH of further held-out sets
    drop_overlap: bool = False
    allow_test_as_train: bool = False
    hold_out: int = 0  # rows of train that become selection.parquet
    max_train: int = 0
    max_test: int = 0
    options: Options = Options()


def prepare(request: Request) -> dict[str, Any]:
    """Writes `<out>/<split>.parquet` and report.json; returns the report.

    Raises:
      ValueError, FileNotFoundError, ConnectionError: what is wrong with the request or the files, before anything is written.
    """
    benchmark = BENCHMARKS[request.name]
    check_request(request, benchmark)
    found = read(request, benchmark)
    done = {name: converted(request, benchmark, name, split) for name, split in found.items()}
    if cuts(request, benchmark):
        (whole,), (source,) = done.values(), found.values()
        done = cut_apart(whole, benchmark.cut, request.options.seed)
        found = dict.fromkeys(done, source)
    limit(done, benchmark, request)
    overlaps = check_overlaps(request, benchmark, done)
    hold_out(done, request)
    if empty := [name for name, part in done.items() if not part.rows]:
        raise ValueError(f"{request.name}: nothing is left of {empty[0]}: {dict(done[empty[0]].dropped)}")
    report = {
        "benchmark": request.name,
        "options": dataclasses.asdict(request) | {"out": ""},  # the report doesn't depend on where it lies
        "splits": {name: split_report(done[name], found.get(name), benchmark.splits.get(name)) for name in done},
        "overlap": overlaps,
    }
    write(pathlib.Path(request.out), done, report)
    return report


#### Request and sources


def check_request(request: Request, benchmark: Benchmark) -> None:
    out, options = pathlib.Path(request.out), request.options
    if not request.out:
        raise ValueError("--out: expected the folder to write to")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: {out} is a file, expected a folder: choose another name")
    if negative := [name for name in ("hold_out", "max_train", "max_test") if getattr(request, name) < 0]:
        raise ValueError(f"--{negative[0].replace('_', '-')}: expected a number of rows, 0 or more")
    if options.prompt_style != "suffix" and not benchmark.styles:
        raise ValueError(f"--prompt-style={options.prompt_style}: {request.name} has a prompt of its own; only suffix fits it")
    if (report := out / "report.json").is_file() and (other := json.loads(report.read_text()).get("benchmark")) != request.name:
        raise ValueError(f"--out: {out} already holds {other}; give {request.name} a folder of its own")
    for spec in request.against:
        dataset.check(spec)


def wanted_splits(request: Request, benchmark: Benchmark) -> dict[str, str]:
    """{split: path, "" if it is to be looked for in the source}, in the benchmark's order."""
    given = dict((text.partition("=")[0], text.partition("=")[2]) for text in request.split)
    if unknown := given.keys() - benchmark.splits.keys() - ({"train"} if cuts(request, benchmark) else set()):
        raise ValueError(f"--split: {request.name} has no {', '.join(sorted(unknown))}; it has {', '.join(benchmark.splits)}")
    if cuts(request, benchmark):
        whole = next(name for name, split in benchmark.splits.items() if not split.train)  # the benchmark's one test file
        return {whole: given.get(whole) or given.get("train", "")}
    named = given or dict.fromkeys(benchmark.splits, "")
    return {name: named[name] for name in benchmark.splits if name in named}


def source_of(request: Request, benchmark: Benchmark) -> pathlib.Path:
    source = request.source or benchmark.hub
    if not source:
        raise ValueError(
            f"--source: {request.name} has no repository of its own on the hub; expected a folder, a file or OWNER/NAME"
        )
    return tables.open_source(source, request.revision)


def read(request: Request, benchmark: Benchmark) -> dict[str, tables.Found]:
    """The rows of each wanted split; all of them are read before anything is converted."""
    paths = wanted_splits(request, benchmark)
    place = None if all(paths.values()) else source_of(request, benchmark)
    found = {}
    for name, path in paths.items():
        where = tables.open_source(path) if path else place
        only = bool(path) or len(paths) == 1
        if benchmark.read and (where.is_dir() or not benchmark.columns):
            found[name] = benchmark.read(where, name, request.options)
        else:
            split = benchmark.splits[name]
            found[name] = tables.load(where, name, split, only, benchmark.columns, request.allow_test_as_train)
    fit = [name for name in found if corrections_for(request.fixes, found[name].path, benchmark.splits[name].train)]
    if request.fixes not in ("auto", "none") and not fit:
        raise ValueError(f"--fixes: {request.fixes} fits none of {', '.join(str(one.path) for one in found.values())}")
    return found


def cuts(request: Request, benchmark: Benchmark) -> bool:
    return benchmark.cut is not None and request.allow_test_as_train


def converted(request: Request, benchmark: Benchmark, name: str, found: tables.Found) -> Converted:
    """A split's rows, corrected and converted."""
    rows, repairs, notes = found.rows, [], []
    if corrections := corrections_for(request.fixes, found.path, benchmark.splits[name].train):
        notes = repair.mismatches(rows, corrections)
        rows, repairs = repair.correct(rows, corrections)
        notes.append(f"corrections: {corrections.path}")
    done = benchmark.convert(rows, Context(name, found.path, request.options))
    broken = [row["extra_info"]["index"] for row in done.rows if not writable(row)]
    refuse(found.path, [f"row {index}: its text has a NUL character or a lone surrogate" for index in broken])
    done.repairs[:0], done.notes[:0] = repairs, notes
    return done


def corrections_for(fixes: str, path: pathlib.Path, train: bool) -> repair.Corrections | None:
    """auto: only a file that names the data's own file; a given file is meant for the training split, whatever it is called."""
    if fixes in ("none", "auto"):
        return repair.corrections_beside(path) if fixes == "auto" else None
    corrections = repair.read_corrections(fixes)
    return corrections if train or corrections.file == path.name else None


def cut_apart(whole: Converted, cut: Callable[[int, int], dict[str, list[int]]], seed: int) -> dict[str, Converted]:
    """Training and test part of one benchmark file, as the reference makes them."""
    parts: dict[str, Converted] = {}
    for name, numbers in cut(len(whole.rows), seed).items():
        part = parts[name] = Converted(notes=list(whole.notes), repairs=list(whole.repairs), dropped=whole.dropped.copy())
        if name == "train":
            part.notes.append(
                "WARNING: cut out of the benchmark's own test file: a score on that file means nothing after training"
            )
        for number in numbers:
            row = whole.rows[number]
            part.add(whole.questions[number], {**row, "extra_info": {**row["extra_info"], "split": name}})
    return parts


def limit(done: dict[str, Converted], benchmark: Benchmark, request: Request) -> None:
    for name, part in done.items():
        most = request.max_train if trains(benchmark, name) else request.max_test
        if most and len(part.rows) > most:
            part.dropped["beyond the limit"] += len(part.rows) - most
            part.rows, part.questions = part.rows[:most], part.questions[:most]


def hold_out(done: dict[str, Converted], request: Request) -> None:
    """Moves rows of train into `selection`, for choosing a checkpoint on questions that are neither trained on nor reported."""
    if not request.hold_out:
        return
    if "train" not in done or request.hold_out >= len(done["train"].rows):
        raise ValueError(
            f"--hold-out={request.hold_out}: expected fewer than the rows of train; here are {len_of(done, 'train')}"
        )
    train = done["train"]
    chosen = set(random.Random(request.options.seed).sample(range(len(train.rows)), request.hold_out))
    selection = done["selection"] = Converted()
    for number in sorted(chosen):
        row = train.rows[number]
        selection.add(train.questions[number], {**row, "extra_info": {**row["extra_info"], "split": "selection"}})
    train.leave_out(chosen)
    train.dropped["held out for selection"] += len(chosen)
    doubles = {held for held, _ in contamination.overlap(train.questions, selection.questions).found}
    selection.leave_out(doubles)
    if doubles:
        selection.dropped["also a training question"] += len(doubles)


def len_of(done: Mapping[str, Converted], name: str) -> int:
    return len(done[name].rows) if name in done else 0


#### Overlap of training and held-out questions


def check_overlaps(request: Request, benchmark: Benchmark, done: dict[str, Converted]) -> dict[str, Any]:
    """Compares every training split with every other and with the sets of `against`; takes out what overlaps, if asked to."""
    held_out = {name: (part.questions, sources_rows(part)) for name, part in done.items() if not trains(benchmark, name)}
    for spec in request.against:
        questions = [row.question for row in dataset.read(spec)]
        held_out[spec] = (questions, list(range(len(questions))))
    reports = {}
    for name in [name for name in done if trains(benchmark, name)]:
        part = done[name]
        for other, (questions, numbers) in held_out.items():
            found = contamination.overlap(part.questions, questions)
            reports[f"{name} and {other}"] = overlap_report(found, part, questions, numbers)
            while request.drop_overlap and found.found:  # once more: of several doubles of one question each look names one
                doubles = {row for _, row in found.found}
                part.dropped["also a held-out question"] += len(doubles)
                part.leave_out(doubles)
                found = contamination.overlap(part.questions, questions)
    return reports


def trains(benchmark: Benchmark, name: str) -> bool:
    return name == "train" or (name in benchmark.splits and benchmark.splits[name].train)


def sources_rows(part: Converted) -> list[Any]:
    """The row of the source that each output row was made from."""
    return [row["extra_info"]["index"] for row in part.rows]


def overlap_report(
    found: contamination.Overlap, part: Converted, held_out: Sequence[str], numbers: Sequence[Any]
) -> dict[str, Any]:
    rows = sources_rows(part)

    def pairs(listed: contamination.Pairs) -> list[dict[str, Any]]:
        return [
            {"held_out_row": numbers[h], "train_row": rows[t], "held_out": held_out[h], "train": part.questions[t]}
            for h, t in listed[:LISTED]
        ]

    counts = {"exact": len(found.exact), "near": len(found.near), "similar": len(found.similar)}
    return counts | {"examples": {"exact": pairs(found.exact), "near": pairs(found.near), "similar": pairs(found.similar)}}


#### Output


ASKED_FOR = (
    "beyond the limit",
    "held out for selection",
    "also a held-out question",
    "repeated question",
    "box in the statement",
)


def split_report(done: Converted, found: tables.Found | None, split: tables.Split | None) -> dict[str, Any]:
    """found: None for a part of another split. A number of rows that is not the official one is a warning, unless asked for."""
    expected = split.rows if split else 0
    source = found and {"path": str(found.path), "rows": len(found.rows), "sha256": dict(found.files)}
    notes = list(done.notes)
    rows = len(done.rows) + sum(done.dropped[reason] for reason in ASKED_FOR)
    if expected and rows != expected:
        notes.insert(0, f"WARNING: {rows} rows, the official number is {expected} ({rows - expected:+d})")
    return {
        "rows": len(done.rows),
        "expected_rows": expected,
        "source": source,
        "dropped": dict(done.dropped),
        "key_kinds": dict(done.kinds.most_common()),
        "repaired": dict(repair.summary(done.repairs)),
        "repairs": [dataclasses.asdict(one) for one in done.repairs],
        "notes": notes,
    }


def write(out: pathlib.Path, done: Mapping[str, Converted], report: dict[str, Any]) -> None:
    """Parquet files and the report, each under a temporary name first: what stands there is complete."""
    import pyarrow.parquet

    out.mkdir(parents=True, exist_ok=True)
    for name, part in done.items():
        path = out / f"{name}.parquet"
        partial = path.with_suffix(".partial")
        pyarrow.parquet.write_table(as_table(part.rows), partial)
        os.replace(partial, path)
        report["splits"][name] |= {"file": path.name, "sha256": tables.sha256(path)}
    partial = out / "report.partial"
    partial.write_text(json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(partial, out / "report.json")


def as_table(rows: Sequence[Row]):
    """An Arrow table. Columns whose objects differ too much from row to row for one type are written as JSON text."""
    import pyarrow

    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
            if name in ("data_source", "prompt", "ability", "reward_model", "extra_info"):
                raise ValueError(f"column {name}: its values are of several types ({error}); correct the source") from error
            arrays[name] = pyarrow.array([json.dumps(value, ensure_ascii=False) for value in values])
    return pyarrow.table(arrays)


def show(report: Mapping[str, Any], out: str, console: rich.console.Console) -> None:
    """What was done, in a few lines."""
    table = rich.table.Table("file", "rows", "source rows", "dropped", "repaired", title=f"{report['benchmark']} in {out}")
    for split in report["splits"].values():
        found = str(split["source"]["rows"]) if split["source"] else ""
        lists = [", ".join(f"{count} {what}" for what, count in split[kind].items()) for kind in ("dropped", "repaired")]
        table.add_row(split["file"], str(split["rows"]), found, *lists)
    console.print(table)
    for name, split in report["splits"].items():
        for note in split["notes"][:LISTED]:
            console.print(f"{name}: {rich.markup.escape(note)}", highlight=False)
        if more := len(split["notes"]) - LISTED:
            console.print(f"{name}: {more} more notes in report.json") if more > 0 else None
    for pair, counts in report["overlap"].items():
        found = counts["exact"] + counts["near"]
        mark = f"WARNING: questions in both: {found} ({counts['exact']} word for word, {counts['near']} reworded)"
        text = mark if found else "no question is in both"
        console.print(f"{rich.markup.escape(pair)}: {text}; {counts['similar']} look alike", highlight=False)
    uses: dict[str, list[str]] = {}
    for name, split in report["splits"].items():
        uses.setdefault(name if name in ("train", "selection") else "validation", []).append(f"verl:{out}/{split['file']}")
    flags = " ".join(f"--config.data.{use}={','.join(files)}" for use, files in uses.items())
    console.print(rich.markup.escape(f"to use: {flags} --config.data.template=chat"), highlight=False)


#### Command line


def parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<24}{benchmark.about} ({', '.join(benchmark.splits)})" for name, benchmark in BENCHMARKS.items())
    made = argparse.ArgumentParser(
        prog="python -m deepgrpo.prepare",
        description=__doc__,
        epilog=f"names and their splits:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", metavar="NAME", choices=BENCHMARKS, help="the benchmark, see below")
    made.add_argument("--source", default="", help="folder, file or hub name (default: the benchmark's hub repository)")
    made.add_argument("--out", required=True, help="folder for the parquet files and report.json")
    made.add_argument("--split", action="append", default=[], metavar="NAME[=PATH]", help="only this split, from this path")
    made.add_argument("--revision", help="of the hub repository")
    made.add_argument("--fixes", default="auto", help="corrections file; auto: the one beside the data, if any; none")
    made.add_argument("--against", action="append", default=[], metavar="NAME:PATH", help="further held-out set to compare with")
    made.add_argument("--drop-overlap", action="store_true", help="leave out training questions that are held-out questions")
    made.add_argument("--allow-test-as-train", action="store_true", help="let test files become training data")
    made.add_argument("--hold-out", type=int, default=0, metavar="N", help="move N training rows to selection.parquet")
    made.add_argument("--max-train", type=int, default=0, help="first rows kept of train; 0: all")
    made.add_argument("--max-test", type=int, default=0, help="first rows kept of other splits; 0: all")
    made.add_argument("--prompt-style", choices=("suffix", "system", "both", "bare"), default="suffix", help="of the instruction")
    made.add_argument("--keys", choices=("clean", "stored"), default="clean", help="clean: trimmed, without math-mode dollars")
    made.add_argument("--duplicates", choices=("keep", "drop"), default="keep", help="repeated questions")
    made.add_argument("--boxed-statements", choices=("keep", "drop"), default="keep", help="problems that contain a box")
    made.add_argument("--bad-keys", choices=("drop", "refuse"), default="drop", help="rows without a usable key")
    made.add_argument("--data-sources", default="", help="search_qa: comma-separated (default hotpotqa)")
    made.add_argument("--think", action="store_true", help="table sets: ask for reasoning in think tags")
    made.add_argument("--table-format", choices=("markdown", "csv", "dataframe"), default="markdown", help="wikitq")
    shuffles = ("none", "row_shuffle", "col_shuffle", "both_shuffle")
    made.add_argument("--perturbation", choices=shuffles, default="none", help="wikitq: order of the table")
    made.add_argument("--context-dir", default="", help="dabstep, dabstep_research: folder of the context files")
    made.add_argument("--workspace", default="", help="agent sets: folder in which the agent's code will run")
    made.add_argument("--seed", type=int, default=42, help="of shuffles")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    args = vars(parser().parse_args(argv))
    args["data_sources"] = tuple(name.strip() for name in args["data_sources"].split(",") if name.strip())
    args["split"], args["against"] = tuple(args["split"]), tuple(args["against"])
    fields = {field.name for field in dataclasses.fields(Options)}
    options = Options(**{name: value for name, value in args.items() if name in fields})
    with tool():
        report = prepare(Request(options=options, **{name: value for name, value in args.items() if name not in fields}))
        show(report, args["out"], Console(file=sys.stdout, soft_wrap=True))


if __name__ == "__main__":
    main()
