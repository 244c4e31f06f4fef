"""Question answering over tables: FinQA, HybridQA, OTT-QA, MultiHiertt, WikiTableQuestions.

One frame for all prompts: what the task is, the table and texts, the question, and a last line that starts with `Answer:`.
"""

import csv
import io
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepgrpo.data import repair
from deepgrpo.data.benchmarks import REASONING, Benchmark, Context, Converted, drop, example
from deepgrpo.data.cells import KEY, NOTHING, SCALAR, TEXT, Kind, Maybe, plain, scalar, whole
from deepgrpo.data.tables import Row, Split

ENDING = "Reason step by step. End your response with one line that starts with `Answer:` and holds nothing but the answer."
THINKING = (
    "First reason between <think> and </think>. Then give the answer between <answer> and </answer>, as one line that starts "
    "with `Answer:` and holds nothing but the answer."
)
TASKS = {
    "finqa": "You are given a part of a company's financial report: text, a table, and more text. Answer the question about it; "
    "calculate where it asks for a number that is not stated.",
    "hybridqa": "You are given a table and the texts that its cells link to. Answer the question, which may need both.",
    "ottqa": "You are given a table from an encyclopedia and the texts that its cells link to. "
    "Answer the question, which may need both.",
    "multihiertt": "You are given several tables and paragraphs of a financial report. Answer the question about them; calculate "
    "where it asks for a number that is not stated.",
    "wikitq": "You are given a table. Answer the question about it.",
}


def _prompt(name: str, parts: Iterable[tuple[str, str]], question: str, think: bool = False) -> str:
    sections = [f"{title}:\n{text}" for title, text in parts if text]
    return "\n\n".join([TASKS[name], *sections, f"Question: {question}", THINKING if think else ENDING])


def lines(table: Iterable[Iterable[Any]]) -> str:
    """A table as lines of cells joined by ` | `."""
    return "\n".join(" | ".join(cell_text(cell) for cell in row) for row in table)


def cell_text(cell: Any) -> str:
    """The text of a cell, which some sets store as [text, links]."""
    return str(cell[0] if isinstance(cell, list | tuple) and cell else "" if cell in (None, []) else cell)


def _join(text: Any) -> str:
    text = list(text.values()) if isinstance(text, Mapping) else text
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text or "")


def _table_set(
    name: str, read: Callable[[Row, Context], tuple[str, str, Any, Mapping[str, Any]]], ability: str = "tableqa"
) -> Callable[[Sequence[Row], Context], Converted]:
    """A converter; `read` gives prompt, question, answer and extra_info of one source row."""

    def convert(rows: Sequence[Row], context: Context) -> Converted:
        done = Converted()
        for index, row in enumerate(rows):
            try:
                prompt, question, answer, extra = read(row, context)
            except (KeyError, TypeError, IndexError, AttributeError) as error:
                raise ValueError(
                    f"{context.path}, row {index}: not a row of {name} ({type(error).__name__}: {error}); it has {', '.join(row)}"
                ) from error
            keys = repair.keys(answer)
            if keys is None:
                drop(done, context, "no usable key", index, answer)
                continue
            done.add(
                f"{question}\n{prompt}", example(name, prompt, ability, "|".join(keys), _extra(context, index, extra), REASONING)
            )
        return done

    return convert


def _extra(context: Context, index: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"split": context.split, "index": index, **extra}


def _finqa(row: Row, context: Context):
    qa = row["qa"]
    answer = qa.get("answer")
    answer = qa["exe_ans"] if answer is None or not str(answer).strip() else answer
    parts = [("Text before the table", _join(row["pre_text"])), ("Table", lines(row["table"]))]
    parts.append(("Text after the table", _join(row["post_text"])))
    extra = {"question_id": str(row.get("id", "")), "question": qa["question"]}
    return _prompt("finqa", parts, qa["question"]), qa["question"], answer, extra


def _linked(name: str, extra_name: str):
    """HybridQA and OTT-QA: a table whose cells link to texts."""

    def read(row: Row, context: Context):
        table = row["table"]
        rows = (
            table
            if isinstance(table, list)
            else [_header(table["header"]), *(table["data"] if "data" in table else table["rows"])]
        )
        about = row if isinstance(table, list) else {**table, **row}
        texts = row.get("links") or row.get("passages") or row.get("texts") or row.get("text") or {}
        if isinstance(texts, Mapping):
            texts = [f"{str(path).rstrip('/').rsplit('/', 1)[-1]}: {text}" for path, text in texts.items() if text]
        parts = [
            ("Introduction", _join(about.get("intro") or about.get("introduction"))),
            ("Section", _join(about.get("section_text"))),
            ("Table", lines(rows)),
            ("Linked texts", _join(texts)),
        ]
        question = row["question"]
        answer = row["answer"] if "answer" in row else row["answer-text"]
        extra = {"question_id": str(row["question_id"]), extra_name: question}
        return _prompt(name, parts, question, context.options.think and name == "hybridqa"), question, answer, extra

    return read


def _header(header: list) -> list:
    """One row of cells; of several header rows the first."""
    return header if all(isinstance(cell, str) or _is_linked(cell) for cell in header) else header[0]


def _is_linked(cell: Any) -> bool:
    return isinstance(cell, list) and len(cell) == 2 and isinstance(cell[0], str) and isinstance(cell[1], list)


def _multihiertt(row: Row, context: Context):
    qa = row.get("qa") or row
    tables = [table if isinstance(table, str) else lines(table) for table in row["tables"]]
    described = row.get("table_description") or {}
    described = described.items() if isinstance(described, Mapping) else enumerate(described, 1)
    paragraphs = [f"{number}. {text}" for number, text in enumerate(row.get("paragraphs") or (), 1)]
    parts = [
        ("Tables", "\n\n".join(f"Table {number}:\n{text}" for number, text in enumerate(tables, 1))),
        ("What the cells say", "\n".join(f"{place}: {text}" for place, text in described)),
        ("Paragraphs", "\n".join(paragraphs) or "There are no paragraphs."),
    ]
    extra = {"uid": str(row["uid"]), "question": qa["question"], "question_type": str(qa.get("question_type") or "")}
    return _prompt("multihiertt", parts, qa["question"]), qa["question"], qa["answer"], extra


def _wikitq(row: Row, context: Context):
    options, table = context.options, row["table"]
    header, body = (table["header"], table["rows"]) if isinstance(table, Mapping) else (table[0], table[1:])
    header, body = [cell_text(cell) for cell in header], [[cell_text(cell) for cell in cells] for cells in body]
    header, body = _perturbed(header, body, options.perturbation, f"{options.seed} {row['question']}")
    parts = [("Table", FORMATS[options.table_format](header, body))]
    if options.perturbation != "none":
        parts.append(("Note", "The order of the table's rows or columns may have been changed; it has no meaning."))
    extra = {"question": row["question"]}
    return _prompt("wikitq", parts, row["question"], options.think), row["question"], row["answer"], extra


def _perturbed(header: list[str], body: list[list[str]], kind: str, seed: str) -> tuple[list[str], list[list[str]]]:
    """Shuffled rows and columns, a function of the seed and the question."""
    stream = random.Random(seed)
    if kind in ("row_shuffle", "both_shuffle"):
        body = stream.sample(body, len(body))
    if kind in ("col_shuffle", "both_shuffle"):
        order = stream.sample(range(len(header)), len(header))
        header, body = [header[i] for i in order], [[cells[i] for i in order] for cells in body]
    return header, body


def _markdown(header: list[str], body: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |" for cells in rows)


def _csv(header: list[str], body: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *body])
    return out.getvalue().rstrip("\n")


def _dataframe(header: list[str], body: list[list[str]]) -> str:
    """As a data frame prints: a row number, and columns aligned to the right."""
    rows = [["", *header], *([str(number), *cells] for number, cells in enumerate(body))]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows)


def _is_cell(value: Any) -> bool:
    return value is None or scalar(value) or isinstance(value, list) and plain(value) and (not value or scalar(value[0]))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) and all(map(_is_cell, row)) for row in value)


def _is_table(value: Any) -> bool:
    """Rows of cells, or a header with rows of cells and perhaps the texts that stand around them."""
    if not isinstance(value, Mapping):
        return _is_rows(value)
    around = all(value.get(name) is None or _is_text(value[name]) for name in TEXTS)
    return around and _is_rows([value.get("header")]) and _is_rows(value.get("data", value.get("rows")))


def _is_text(value: Any) -> bool:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return all(scalar(one) and str(one).strip() not in NOTHING for one in values)


TEXTS = ("links", "passages", "texts", "text", "intro", "introduction", "section_text")
PART = Kind("text, or a list or an object of texts", _is_text)
TABLE = Kind("a table: rows of text and finite numbers, perhaps with a header", _is_table)
TABLES = Kind("a list of tables", lambda value: isinstance(value, list) and all(whole(one) or _is_rows(one) for one in value))
ASKED = {"question": TEXT, "answer": KEY}
QA = {"question": TEXT, "answer": Maybe(SCALAR), "exe_ans": Maybe(SCALAR)}
FINQA = {"qa": QA, "table": TABLE, "pre_text": Maybe(PART), "post_text": Maybe(PART)}
LINKED = {"question": TEXT, "table": TABLE, "answer": Maybe(KEY), "answer-text": Maybe(KEY), "question_id": SCALAR}
LINKED |= dict.fromkeys(TEXTS, Maybe(PART))
HIERTT = {"uid": SCALAR, "tables": TABLES, "paragraphs": Maybe(PART), "table_description": Maybe(PART), "qa": Maybe(ASKED)}
FORMATS = {"markdown": _markdown, "csv": _csv, "dataframe": _dataframe}


def _cut(count: int, seed: int) -> dict[str, list[int]]:
    """The reference's parts of one file: shuffled, 1,000 rows for training and the next 100 for testing."""
    order = random.Random(seed).sample(range(count), count)
    return {"train": order[:1000], "test": order[1000:1100]}


def _splits(train: str, test: str) -> dict[str, Split]:
    return {"train": Split((train, "train.json", "train.jsonl"), train=True), "test": Split((test, "test.json", "test.jsonl"))}


BENCHMARKS: dict[str, Benchmark] = {
    "finqa": Benchmark("financial reports", _splits("train.json", "test.json"), _table_set("finqa", _finqa), FINQA, cut=_cut),
    "hybridqa": Benchmark(
        "tables with linked texts",
        _splits("train*.json", "test*.json"),
        _table_set("hybridqa", _linked("hybridqa", "instruction")),
        LINKED,
        cut=_cut,
    ),
    "ottqa": Benchmark(
        "encyclopedia tables with linked texts",
        _splits("train*.json", "dev*.json"),
        _table_set("ottqa", _linked("ottqa", "question")),
        LINKED,
        cut=_cut,
    ),
    "multihiertt": Benchmark(
        "several tables of financial reports",
        _splits("*train*.json", "*test*.json"),
        _table_set("multihiertt", _multihiertt),
        HIERTT,
        cut=_cut,
    ),
    "wikitq": Benchmark(
        "tables of Wikipedia",
        _splits("train.jsonl", "test.jsonl"),
        _table_set("wikitq", _wikitq, "table-qa"),
        ASKED | {"table": TABLE},
        cut=_cut,
    ),
}
