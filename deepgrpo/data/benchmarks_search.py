"""Multi-hop question answering with a search engine: the data sets of FlashRAG's collection, one prompt for all."""

import pathlib
from collections.abc import Sequence

from deepgrpo.data import repair, tables
from deepgrpo.data.benchmarks import SEARCH, Benchmark, Context, Converted, Options, drop, example
from deepgrpo.data.cells import KEY, TEXT, Maybe
from deepgrpo.data.sources import Found, Split, sha256
from deepgrpo.data.tables import Row

COLUMNS = {"question": TEXT, "golden_answers": KEY, "data_source": Maybe(TEXT)}
PROMPT = (
    "Answer the question below. Whenever you receive new information, first reason about it between <think> and </think>. If you "
    "lack some knowledge, call the search engine with <search> query </search>; it returns the best results between "
    "<information> and </information>. Search as often as you want. As soon as no further knowledge is needed, give the answer "
    "between <answer> and </answer>, without any explanation, for example <answer> Rome </answer>. Question: {question}\n"
)


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
            PROMPT.format(question=question),
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


def read(place: pathlib.Path, split: str, options: Options) -> Found:
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
        rows += [{**row, "data_source": name} for row in tables.read(str(found[0]), COLUMNS)]
    return Found(rows, place, files)


BENCHMARKS = {
    "search_qa": Benchmark(
        "search QA of FlashRAG: --data-sources hotpotqa,2wikimultihopqa,musique,bamboogle,nq,...",
        {"train": Split(("train.jsonl",), train=True), "test": Split(("test.jsonl", "dev.jsonl"))},
        search_qa,
        COLUMNS,
        "RUC-NLPIR/FlashRAG_datasets",
        read=read,
    )
}
