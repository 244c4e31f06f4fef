"""From a data set's own columns to one kind of row. `NAME:PATH` in the configuration picks a reader by NAME.

Every cell is checked where its file is read (`tables.read` with the reader's schema): what a reader hands on is text that is not
empty, and a key that its grader can take, or None where the row has none.

To add a data set: write a function from the text after `NAME:` to a list of `Row`, and enter it in READERS.
"""

import dataclasses
import decimal
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepgrpo.data import arithmetic, carry_chain, repair, tables
from deepgrpo.data.cells import KEY, LINE, PLAIN, TEXT, DataError, Kind, Maybe, problem, refuse, scalar
from deepgrpo.rewards.answer import canonical
from deepgrpo.rewards.grade import GRADERS
from deepgrpo.rewards.gsm8k import numbers

VERL = {
    "prompt": [{"role": TEXT, "content": LINE}],  # an empty system message is one
    "reward_model": {},
    "data_source": TEXT,
    "extra_info": Maybe({}),
    "agent_name": Maybe(LINE),
}
NUMBER = Kind("a number, or text that holds one", lambda value: scalar(value) and bool(numbers(str(value))))
COMPARED_AS_TEXT = ("deepgrpo.rewards.qa:grade_search", "deepgrpo.rewards.qa:grade_table")
ONE_TURN = frozenset({"reasoning_agent_loop", "treerl_agent_loop", "single_turn_agent"})  # what `loop` is here, by other names
KEYLESS = frozenset({"dabstep"})  # sources whose answers are not public, so that an empty key is no defect


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem before templating.

    messages: the chat messages that the file prescribes (verl's files), else None; `question` is then the last user message.
    ground_truth: None if the file's key is unusable (empty, or a word for nothing); such rows are left out and counted.
    needs: what of the row asks for a rollout of several turns, which does not exist here; "": nothing does.
    """

    question: str
    ground_truth: Any
    data_source: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] | None = None
    needs: str = ""


_FINAL_NUMBER = re.compile(r"####\s*(-?(?=[0-9.,]{1,40}\s*$)(?:[0-9][0-9,]*\.?[0-9]*|\.[0-9]+))\s*$")


def gsm8k(path: str) -> list[Row]:
    """GSM8K's own columns: `question`, and `answer`, whose last line is `#### NUMBER`."""
    rows = tables.read(path, {"question": TEXT, "answer": TEXT})
    keys = [_FINAL_NUMBER.search(row["answer"]) for row in rows]
    form = "answer must end in '#### NUMBER' (at most 40 digits), got"
    refuse(path, [f"row {n}: {form} {rows[n]['answer'][-60:]!r}" for n, key in enumerate(keys) if key is None])
    return [Row(row["question"], key.group(1).replace(",", ""), "GSM8K") for row, key in zip(rows, keys, strict=True)]


def boxed(data_source: str) -> Callable[[str], list[Row]]:
    """A reader of `problem` and `answer`; the answer is text, a number, or a list of accepted answers."""

    def read(path: str) -> list[Row]:
        rows = tables.read(path, {"problem": TEXT, "answer": KEY})
        extras = ("level", "subject", "difficulty")
        return [
            Row(
                row["problem"],
                repair.keys(row["answer"]),
                data_source,
                {name: row[name] for name in extras if scalar(row.get(name))},
            )
            for row in rows
        ]

    return read


def verl(path: str) -> list[Row]:
    """verl's columns: `prompt` (chat messages), `reward_model` with `ground_truth`, `data_source`, perhaps `extra_info`.

    The three with inner fields may also be JSON text. What else `reward_model` holds (expected_file, gold_result, ...), and
    `agent_name`, are found in `extra`.
    """
    rows = tables.read(path, VERL)
    read, wrong = [], []
    for number, row in enumerate(rows):
        key, source = row["reward_model"].get("ground_truth"), row["data_source"]
        key = key["target"] if isinstance(key, Mapping) and key.keys() == {"target"} else key  # as Search-R1 stores it
        read.append(_verl_row(row, usable_key(key, source)))
        others = problem(read[-1].extra, PLAIN, "extra_info") or problem(read[-1].question, TEXT, "prompt, its user's message,")
        if text := problem(key, Maybe(key_kind(source)), "reward_model.ground_truth") or others:
            wrong.append(f"row {number}: {text}")
    refuse(path, wrong)
    return read


def key_kind(source: str) -> Kind:
    """What the grader of a source takes for a key."""
    grader = GRADERS.get(canonical(source))
    if grader is None:
        return PLAIN
    return NUMBER if grader.family == "number" else KEY if grader.family or grader.path in COMPARED_AS_TEXT else PLAIN


def _verl_row(row: Mapping[str, Any], key: Any) -> Row:
    messages = row["prompt"]
    extra = dict(row.get("extra_info") or {})
    extra |= {name: value for name, value in row["reward_model"].items() if name not in ("style", "ground_truth")}
    extra |= {"agent_name": row["agent_name"]} if row.get("agent_name") else {}
    question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])
    return Row(question, key, row["data_source"], storable(extra), messages, several_turns(row))


def usable_key(key: Any, source: str) -> Any:
    """A key as graders take it, or None where the row has none."""
    if isinstance(key, decimal.Decimal):
        return str(key)
    return None if isinstance(key, str | list) and source not in KEYLESS and repair.keys(key) is None else key


def several_turns(row: Mapping[str, Any]) -> str:
    """What of a verl row asks for another rollout than one answer to a text: an agent's loop, tools, pictures. "": nothing."""
    extra = row.get("extra_info") or {}
    agent = row.get("agent_name") or extra.get("agent_name")
    if agent and agent not in ONE_TURN:
        return f"agent_name {agent!r}"
    if extra.get("need_tools_kwargs", True) and _filled(extra.get("tools_kwargs")):
        return "extra_info.tools_kwargs"
    for name, value in (("extra_info.interaction_kwargs", extra.get("interaction_kwargs")), ("tools", row.get("tools"))):
        if _filled(value):
            return name
    if found := next((name for name in ("images", "videos", "audios") if _filled(row.get(name))), ""):
        return f"column {found}"
    if any(_filled(message.get("tool_calls")) for message in row["prompt"]):
        return "a message with tool_calls"
    last = row["prompt"][-1]["role"]
    other = next((m["role"] for m in row["prompt"] if m["role"] in ("tool", "function")), "")
    return f"a message of role {other!r}" if other else f"a last message of role {last!r}" if last == "assistant" else ""


def _filled(value: Any) -> bool:
    """Whether anything is in a value: Parquet fills the fields that other rows have with nulls."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return any(map(_filled, inner)) if inner is not None else value not in (None, "", False)


def storable(value: Any) -> Any:
    """A value of `extra` as JSON can hold it: a number that is none is a gap (null), and other types become their text."""
    if isinstance(value, Mapping):
        return {str(name): storable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [storable(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


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
        raise DataError(f"data: {name}:{argument} is no data set", f"expected {name}:{shape} with positive numbers")
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


def read_for_rollouts(spec: str) -> list[Row]:
    """The rows of a set that is to be answered, by training or evaluation.

    Raises:
      DataError: some want a rollout of several turns, which would silently be one of a single turn. Otherwise as `read`.
    """
    rows = read(spec)
    wrong = [f"row {n}: {row.needs} asks for a rollout of several turns" for n, row in enumerate(rows) if row.needs]
    remedy = f"no such loop exists here; take these rows out, or set agent_name to {', '.join(sorted(ONE_TURN))} or leave it out"
    refuse(spec.partition(":")[2], wrong, f"{remedy} where one answer to the prompt is meant")
    return rows


def check(spec: str) -> None:
    """Raises ValueError unless `spec` is NAME:... with the name of a reader."""
    name, _, argument = spec.partition(":")
    if name not in READERS or not argument:
        known = ", ".join(READERS)
        raise DataError(f"data: {spec!r} is not NAME:PATH (or NAME:SPLIT:COUNT) with NAME one of {known}", "correct the name")
