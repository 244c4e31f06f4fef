"""Converters from a benchmark's own files to verl's columns: the frame, the mathematical sets and question answering by search.

A converter turns source rows into output rows of one schema (`example`). To add a benchmark: write one, enter it in a BENCHMARKS
table (here, or of the neighbours `benchmarks_tables`, `benchmarks_agents`), and it can be prepared by name.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from deepgrpo.data import repair, tables, templates
from deepgrpo.data.cells import KEY, SCALAR, TEXT, DataError, Maybe, Schema
from deepgrpo.data.tables import Found, Row, Split, sha256

REASONING, DEEP_ANALYZE, SEARCH = "reasoning_agent_loop", "deep_analyze_agent_loop", "search_agent"
SYSTEM = {  # the instruction as a system message
    templates.BOXED_INSTRUCTION: templates.QWEN_MATH_SYSTEM,
    templates.GSM8K_INSTRUCTION: 'Please reason step by step, and put your final answer after "####".',
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What a converter may be told; each field is a flag of `python -m deepgrpo.prepare`."""

    prompt_style: str = "suffix"  # where the instruction stands: suffix (of the question) | system | both | bare (nowhere)
    keys: str = "clean"  # clean: trimmed, without math-mode dollars | stored: as the source has them
    duplicates: str = "keep"  # repeated questions: keep (the released sets hold them) | drop
    boxed_statements: str = "keep"  # problems that contain a box, harmless where only the response is graded: keep | drop
    bad_keys: str = "drop"  # rows without a usable key: drop | refuse
    data_sources: tuple[str, ...] = ()  # of search_qa
    think: bool = False  # table sets: ask for reasoning in think tags
    table_format: str = "markdown"  # wikitq: markdown | csv | dataframe
    perturbation: str = "none"  # wikitq: none | row_shuffle | col_shuffle | both_shuffle
    context_dir: str = ""  # dabstep, dabstep_research: folder of the context files
    workspace: str = ""  # agent sets: folder in which the agent's code will run
    seed: int = 42  # of shuffles


@dataclasses.dataclass(frozen=True)
class Context:
    """split: the output's name. path: what the rows were read from."""

    split: str
    path: pathlib.Path
    options: Options


@dataclasses.dataclass
class Converted:
    """Output rows, their questions without the prompt around them, and what happened on the way."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    questions: list[str] = dataclasses.field(default_factory=list)
    dropped: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # reason: rows
    kinds: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # of mathematical keys: number, words, ...
    repairs: list[repair.Repair] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, question: str, row: Row) -> None:
        self.rows.append(row)
        self.questions.append(question)

    def leave_out(self, numbers: Collection[int]) -> None:
        self.rows = [row for number, row in enumerate(self.rows) if number not in numbers]
        self.questions = [text for number, text in enumerate(self.questions) if number not in numbers]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """about: one line for --help. columns: what every source row must have (`cells`). hub: repository that is read if no source
    is given.

    cut: (number of rows, seed) -> {split: rows}, where the reference cuts its training data out of a benchmark's test file; done
    on demand only. styles: whether the prompt style may be chosen. read: takes the place of `tables.load` where a split is more
    than one file.
    """

    about: str
    splits: Mapping[str, Split]
    convert: Callable[[Sequence[Row], Context], Converted]
    columns: Mapping[str, Schema]
    hub: str = ""
    cut: Callable[[int, int], dict[str, list[int]]] | None = None
    styles: bool = False
    read: Callable[[pathlib.Path, str, Options], Found] | None = None


def example(
    data_source: str, prompt: str | list[Row], ability: str, key: Any, extra: Mapping[str, Any], agent: str = "", **reward: Any
) -> Row:
    """One output row; `prompt` is the user's message, or all messages. Without `agent` there is no such column."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    row = {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": key, **reward},
    }
    return row | ({"agent_name": agent} if agent else {}) | {"extra_info": dict(extra)}


def styled(question: str, instruction: str, style: str) -> list[Row]:
    """The chat messages of a mathematical question."""
    user = f"{question} {instruction}" if style in ("suffix", "both") else question
    system = [{"role": "system", "content": SYSTEM[instruction]}] if style in ("system", "both") else []
    return [*system, {"role": "user", "content": user}]


#### Mathematical sets


def gsm8k(rows: Sequence[Row], context: Context) -> Converted:
    """question and answer, whose final line is `#### NUMBER`; or problem and answer, the bare number (Dr. GRPO's copy)."""
    done = Converted()
    for index, row in enumerate(rows):
        question, answer = row.get("question") or row.get("problem"), str(row.get("answer"))
        if question is None:
            what = f"data: {context.path}, row {index}: question (or problem) must be {TEXT.expected}, got nothing"
            raise DataError(what, f"the row has {', '.join(row)}")
        mark = re.search(r"#### (-?[0-9.,]+)", answer) or re.fullmatch(r"\s*(-?[0-9.,]+)\s*", answer)
        if mark is None:
            drop(done, context, "no '#### NUMBER' in the answer", index, answer[-60:])
            continue
        extra = {"split": context.split, "index": index, "answer": answer, "question": question}
        messages = styled(question, templates.GSM8K_INSTRUCTION, context.options.prompt_style)
        done.add(question, example("GSM8K", messages, "math", mark.group(1).replace(",", ""), extra))
    return _without_duplicates(done, context)


def boxed(data_source: str, question_in_extra: str = "prompt") -> Callable[[Sequence[Row], Context], Converted]:
    """A converter of problem and answer (text, a number, or a list of accepted answers).

    question_in_extra: what extra_info.question holds: prompt (with the instruction, as verl's converters do) or problem.
    """

    def convert(rows: Sequence[Row], context: Context) -> Converted:
        done, clean = Converted(), context.options.keys == "clean"
        for index, row in enumerate(rows):
            keys = repair.keys(row["answer"], clean)
            if keys is None:
                drop(done, context, "no usable key", index, row["answer"])
                continue
            if context.options.boxed_statements == "drop" and repair.has_box(row["problem"]):
                done.dropped["box in the statement"] += 1
                continue
            done.repairs += _key_repairs(index, row["answer"], keys)
            kinds = [repair.kind(key) for key in keys]
            done.kinds.update(kinds)
            if "other notation" in kinds:
                done.notes.append(
                    f"row {index}: the typed grader doesn't know the notation of the key {keys}; it is compared as text"
                )
            messages = styled(row["problem"], templates.BOXED_INSTRUCTION, context.options.prompt_style)
            question = messages[-1]["content"] if question_in_extra == "prompt" else row["problem"]
            extra = {"split": context.split, "index": index, "question": question, "answer": keys}
            done.add(row["problem"], example(data_source, messages, "math", keys, extra, REASONING))
        _remark(done)
        return _without_duplicates(done, context)

    return convert


def _key_repairs(index: int, stored: Any, keys: list[str]) -> list[repair.Repair]:
    before = [str(one) for one in (stored if isinstance(stored, list) else [stored])]
    if before == keys:
        return []
    trimmed = list(dict.fromkeys(one.strip() for one in before)) == keys
    return [repair.Repair(index, "key trimmed" if trimmed else "key rewritten", before, keys)]


def drop(done: Converted, context: Context, reason: str, index: int, found: Any) -> None:
    if context.options.bad_keys == "refuse":
        raise ValueError(
            f"{context.path}, row {index}: {reason}, found {found!r}. Correct it with a corrections file (--fixes=FILE), "
            "or leave such rows out (--bad-keys=drop)"
        )
    done.dropped[reason] += 1
    done.notes.append(f"row {index} dropped: {reason}, found {found!r}")


def _remark(done: Converted) -> None:
    """Notes on what is kept and a person should know."""
    boxed = [row["extra_info"]["index"] for row, text in zip(done.rows, done.questions, strict=True) if repair.has_box(text)]
    if boxed:
        listed = ", ".join(map(str, boxed[:10])) + (", ..." if len(boxed) > 10 else "")
        done.notes.append(
            f"{len(boxed)} statements contain a box of their own (rows {listed}); graders must read the response only"
        )
    for change in done.repairs:
        if isinstance(change.before, list) and any(repair.unbalanced(key) for key in change.before):
            done.notes.append(
                f"row {change.row}: unbalanced dollars or braces in the key {change.before}, read as {change.after}"
            )


def _without_duplicates(done: Converted, context: Context) -> Converted:
    """Repeated questions: a note, and with duplicates=drop only the first stays; one with another key is always noted."""
    repeated = repair.duplicates(done.questions)
    for row, earlier in repeated.items():
        here, there = done.rows[row], done.rows[earlier]
        same = here["reward_model"]["ground_truth"] == there["reward_model"]["ground_truth"]
        verb = "dropped" if context.options.duplicates == "drop" else "kept"
        done.notes.append(
            f"row {here['extra_info']['index']} repeats the question of row {there['extra_info']['index']}"
            f"{'' if same else ' with another key'}: {verb}"
        )
    if repeated and context.options.duplicates == "drop":
        done.dropped["repeated question"] += len(repeated)
        done.leave_out(repeated)
    return done


def _test(*names: str, rows: int = 0) -> dict[str, Split]:
    return {"test": Split((*names, "test.jsonl", "test.json", "test.parquet", "*test-*.parquet", "data/test-*.parquet"), rows)}


def _train(*names: str, rows: int = 0) -> dict[str, Split]:
    usual = ("train", "train.jsonl", "train.json", "train.parquet", "train-*.parquet", "data/train-*.parquet")
    return {"train": Split((*names, *usual), rows, train=True)}


def _suite(name: str, folder: str = "", rows: int = 0) -> dict[str, Split]:
    """The test split of a set of Dr. GRPO's evaluation suite, whose folder there may have another name."""
    folder = folder or name
    return _test(f"{name}.jsonl", f"evaluation_suite/{folder}", *dict.fromkeys((folder, name)), rows=rows)


def _boxed_set(about: str, splits: Mapping[str, Split], data_source: str = "MATH", hub: str = "") -> Benchmark:
    return Benchmark(about, splits, boxed(data_source), PROBLEM, hub, styles=True)


PROBLEM: Mapping[str, Schema] = {"problem": TEXT, "answer": KEY}
MATH_TEST = _test("math500.jsonl", "evaluation_suite/math", "math500", "math", "MATH500", rows=500)

BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        "grade-school word problems",
        _train("gsm8k_train.jsonl", "main/train-*.parquet", "gsm8k/train", rows=7473)
        | _test("gsm8k_test.jsonl", "main/test-*.parquet", "gsm8k/test", rows=1319),
        gsm8k,
        {"question": Maybe(TEXT), "problem": Maybe(TEXT), "answer": Maybe(SCALAR)},
        "openai/gsm8k",
        styles=True,
    ),
    "math": _boxed_set(
        "MATH levels 3 to 5 (SimpleRL's 8k) for training, MATH500 for testing",
        _train("math_lvl3to5_8k_train.jsonl", "train/math_lvl3to5_8k", "math_lvl3to5_8k", rows=8523) | MATH_TEST,
    ),
    "math500": _boxed_set("500 problems of MATH", MATH_TEST, hub="HuggingFaceH4/MATH-500"),
    "math_12k": _boxed_set(
        "all of MATH but MATH500 for training",
        _train("math_12k_rebuilt.jsonl", "math_12k_train.jsonl", "train/math_12k", "math_12k", rows=12000) | MATH_TEST,
    ),
    "aime24": _boxed_set("AIME 2024", _suite("aime24", "aime", rows=30), "AIME24"),
    "amc": _boxed_set("AMC 12 of 2022 and 2023", _suite("amc", rows=83), "AMC"),
    "minerva": _boxed_set("undergraduate science questions", _suite("minerva", rows=272), "Minerva"),
    "olympiad_bench": _boxed_set("olympiad problems with text answers", _suite("olympiad_bench", rows=675), "OlympiadBench"),
    "asdiv": _boxed_set(
        "elementary word problems (ASDiv, 2k of Dr. GRPO)", _train("asdiv_2k.jsonl", "train/asdiv_2k", "asdiv_2k", rows=1788)
    ),
    "deepscaler": Benchmark(
        "DeepScaleR's competition problems",
        _train("deepscaler.json", "deepscaler.jsonl", "deepscaler"),
        boxed("DeepScaleR", question_in_extra="problem"),
        PROBLEM,
        "agentica-org/DeepScaleR-Preview-Dataset",
        styles=True,
    ),
}


SEARCH_COLUMNS = {"question": TEXT, "golden_answers": KEY, "data_source": Maybe(TEXT)}


def search_qa(rows: Sequence[Row], context: Context) -> Converted:
    """question and golden_answers (a list); the source's own columns stay, under the schema's."""
    done = Converted()
    for index, row in enumerate(rows):
        answers = row["golden_answers"]
        keys = repair.keys(answers)
        if keys is None:
            drop(done, context, "no usable key", index, row["golden_answers"])
            continue
        question = row["question"].strip()
        question += "" if question.endswith("?") else "?"
        extra = {"split": context.split, "index": index}
        made = example(
            row.get("data_source") or only_source(context),
            templates.SEARCH_PROMPT.format(question=question),
            "fact-reasoning",
            keys,
            extra,
            SEARCH,
        )
        done.add(question, row | made)
    return done


def only_source(context: Context) -> str:
    if len(context.options.data_sources) != 1:
        raise ValueError(f"{context.path}: its rows name no data_source; say which they are: --data-sources=NAME (one)")
    return context.options.data_sources[0]


def read_search(place: pathlib.Path, split: str, options: Options) -> Found:
    """Rows of the data sets that `options` names, `<place>/<name>/<split>.jsonl`, one after the other.

    A data set without a test split is tested on its dev split; on its training split only if told to (--split test=PATH).

    Raises:
      FileNotFoundError: a data set has no such file; says what was looked for.
    """
    rows: list[Row] = []
    files: dict[str, str] = {}
    for name in options.data_sources or ("hotpotqa",):
        folder = place / name if (place / name).is_dir() else place
        wanted = ("train",) if split == "train" else ("test", "dev")
        tried = [folder / f"{part}{suffix}" for part in wanted for suffix in (".jsonl", ".json", ".parquet")]
        if not (found := [path for path in tried if path.is_file()]):
            raise FileNotFoundError(f"source: {name} has no {' or '.join(wanted)} split: looked for {', '.join(map(str, tried))}")
        files[f"{name}/{found[0].name}"] = sha256(found[0])
        rows += [{**row, "data_source": name} for row in tables.read(str(found[0]), SEARCH_COLUMNS)]
    return Found(rows, place, files)


BENCHMARKS["search_qa"] = Benchmark(
    "search QA of FlashRAG: --data-sources hotpotqa,2wikimultihopqa,musique,bamboogle,nq,...",
    {"train": Split(("train.jsonl",), train=True), "test": Split(("test.jsonl", "dev.jsonl"))},
    search_qa,
    SEARCH_COLUMNS,
    "RUC-NLPIR/FlashRAG_datasets",
    read=read_search,
)
