"""From a data set's own columns to one kind of row. `NAME:PATH` in the configuration picks a reader by NAME.

To add a data set: write a function from the text after `NAME:` to a list of `Row`, and enter it in READERS.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepgrpo.data import arithmetic, carry_chain, repair, tables

KEYLESS = frozenset({"dabstep"})  # sources whose answers are not public, so that an empty key is no defect


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem before templating.

    messages: the chat messages that the file prescribes (verl's files), else None; `question` is then the last user message.
    ground_truth: None if the file's key is unusable (empty, or the word None); such rows are left out and counted.
    """

    question: str
    ground_truth: Any
    data_source: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] | None = None


def gsm8k(path: str) -> list[Row]:
    """GSM8K's own columns: `question`, and `answer`, whose last line is `#### NUMBER`."""
    rows = []
    for number, row in enumerate(tables.read(path, ("question", "answer"))):
        key = re.search(r"####\s*(-?[\d.,]+)\s*$", row["answer"])
        if key is None:
            raise ValueError(
                f"data: {path}, row {number}: the answer does not end in '#### NUMBER' but in {row['answer'][-60:]!r}"
            )
        rows.append(Row(row["question"], key.group(1).replace(",", ""), "GSM8K"))
    return rows


def boxed(data_source: str) -> Callable[[str], list[Row]]:
    """A reader of `problem` and `answer`; the answer is text, a number, or a list of accepted answers."""

    def read(path: str) -> list[Row]:
        rows = tables.read(path, ("problem", "answer"))
        extras = ("level", "subject", "difficulty")
        return [
            Row(
                row["problem"],
                repair.keys(row["answer"]),
                data_source,
                {name: row[name] for name in extras if row.get(name) is not None},
            )
            for row in rows
        ]

    return read


def verl(path: str) -> list[Row]:
    """verl's columns: `prompt` (chat messages), `reward_model` with `ground_truth`, `data_source`, perhaps `extra_info`.

    What else `reward_model` holds (expected_file, gold_result, ...), and `agent_name`, are found in `extra`.
    """
    rows = []
    for number, row in enumerate(tables.read(path, ("prompt", "reward_model", "data_source"))):
        messages, reward = row["prompt"], dict(row["reward_model"] or {})
        key = reward.pop("ground_truth", None)
        if not isinstance(messages, list) or not messages or any({"role", "content"} - message.keys() for message in messages):
            raise ValueError(
                f"data: {path}, row {number}: prompt must be a list of messages with role and content, got {messages!r}"
            )
        unusable = key is None or (isinstance(key, str | list) and repair.keys(key) is None and row["data_source"] not in KEYLESS)
        extra = (row.get("extra_info") or {}) | {name: value for name, value in reward.items() if name != "style"}
        extra |= {"agent_name": row["agent_name"]} if row.get("agent_name") else {}
        extra = json.loads(json.dumps(extra, default=str))
        question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])
        rows.append(Row(question, None if unusable else key, row["data_source"], extra, messages))
    return rows


def carry_chains(argument: str) -> list[Row]:
    """`SPLIT:COUNT` generated problems of the carry-chain task."""
    split, count = _split_and_numbers("carry_chain", argument, "SPLIT:COUNT", 1)
    return _generated(carry_chain.problems(split, *count))


def sums(argument: str) -> list[Row]:
    """`SPLIT:COUNT` or `SPLIT:COUNT:DIGITS` generated sums of three numbers."""
    split, numbers = _split_and_numbers("arithmetic", argument, "SPLIT:COUNT or SPLIT:COUNT:DIGITS", 2)
    return _generated(arithmetic.problems(split, *numbers))


def _generated(rows: Sequence[Mapping[str, str]]) -> list[Row]:
    return [Row(row["question"], row["answer"], row["data_source"]) for row in rows]


def _split_and_numbers(name: str, argument: str, shape: str, most: int) -> tuple[str, list[int]]:
    split, *numbers = argument.split(":")
    if not 1 <= len(numbers) <= most or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"data: expected {name}:{shape} with positive numbers, got {name}:{argument}")
    return split, [int(number) for number in numbers]


READERS: dict[str, Callable[[str], list[Row]]] = {
    "gsm8k": gsm8k,
    "math": boxed("MATH"),
    "aime24": boxed("AIME24"),
    "amc": boxed("AMC"),
    "minerva": boxed("Minerva"),
    "olympiad_bench": boxed("OlympiadBench"),
    "deepscaler": boxed("DeepScaleR"),
    "verl": verl,
    "carry_chain": carry_chains,
    "arithmetic": sums,
}


def read(spec: str) -> list[Row]:
    """The rows that a `NAME:...` of the configuration stands for.

    Raises:
      ValueError: no such reader; names the known ones.
    """
    check(spec)
    name, _, argument = spec.partition(":")
    return READERS[name](argument)


def check(spec: str) -> None:
    """Raises ValueError unless `spec` is NAME:... with the name of a reader."""
    name, _, argument = spec.partition(":")
    if name not in READERS or not argument:
        raise ValueError(f"data: {spec!r} is not NAME:PATH (or NAME:SPLIT:COUNT) with NAME one of {', '.join(READERS)}")
