"""Rows out of data sets, the problems made of them, and their order.

`NAME:PATH` in the configuration picks a reader by NAME. Every cell is checked where its file is read (`tables.read` with the
reader's schema), so that a reader hands on text that is not empty and a key that its grader can take, or None where the row has
none. The order is a function of (seed, epoch), with a cursor that resumes exactly.

To add a data set: write a function from the text after `NAME:` to a list of `Row`, and enter it in READERS.
"""

import dataclasses
import decimal
import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.data import carry_chain, cells, lookup_chain, reasoning_gym, repair, stdlib, tables, templates
from deepgrpo.data.cells import KEY, LINE, PLAIN, TEXT, DataError, Kind, Maybe, refuse, scalar
from deepgrpo.data.contamination import overlap
from deepgrpo.data.tokenizer import Tokenizer
from deepgrpo.environments.base import AGENT_NAMES, ENVIRONMENTS, ONE_TURN
from deepgrpo.rewards.answer import canonical
from deepgrpo.rewards.grade import GRADERS
from deepgrpo.rewards.gsm8k import numbers
from deepgrpo.types import Ids, Problem

VERL = {
    "prompt": [{"role": TEXT, "content": LINE}],  # an empty system message is one
    "reward_model": {},
    "data_source": TEXT,
    "extra_info": Maybe({}),
    "agent_name": Maybe(LINE),
}
NUMBER = Kind("a number, or text that holds one", lambda value: scalar(value) and bool(numbers(str(value))))
COMPARED_AS_TEXT = ("deepgrpo.rewards.qa:grade_search", "deepgrpo.rewards.qa:grade_table")
KEYLESS = frozenset({"dabstep"})  # sources whose answers are not public, so that an empty key is no defect


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem before templating.

    messages: the chat messages that the file prescribes (verl's files), else None; `question` is then the last user message.
    ground_truth: None if the file's key is unusable (empty, or a word for nothing); such rows are left out and counted.
    needs: what of the row asks for a rollout of several turns; "": nothing does.
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
        others = cells.problem(read[-1].extra, PLAIN, "extra_info") or cells.problem(
            read[-1].question, TEXT, "prompt, its user's message,"
        )
        if text := cells.problem(key, Maybe(key_kind(source)), "reward_model.ground_truth") or others:
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


def lookup_chains(argument: str) -> list[Row]:
    """`SPLIT:COUNT` generated problems."""
    split, count = _split_and_numbers("lookup_chain", argument, "SPLIT:COUNT", 1)
    return _generated(lookup_chain.problems(split, *count))


def stdlib_questions(argument: str) -> list[Row]:
    """`SPLIT:COUNT` questions about Python's library, for the search agent."""
    (split, count), agent = _split_and_numbers(stdlib.NAME, argument, "SPLIT:COUNT", 1), {"agent_name": "search"}
    made = [(row["question"], row["answer"], row["data_source"]) for row in stdlib.problems(split, *count)]
    prompts = [[{"role": "user", "content": templates.SEARCH_PROMPT.format(question=question)}] for question, *_ in made]
    return [Row(*row, agent, prompt, several_turns(agent)) for row, prompt in zip(made, prompts, strict=True)]


def sums(argument: str) -> list[Row]:
    """`SPLIT:COUNT` or `SPLIT:COUNT:DIGITS` generated sums of three numbers."""
    split, numbers = _split_and_numbers("arithmetic", argument, "SPLIT:COUNT or SPLIT:COUNT:DIGITS", 2)
    return _generated(carry_chain.sums(split, *numbers))


def _generated(rows: Sequence[Mapping[str, str]]) -> list[Row]:
    return [Row(row["question"], row["answer"], row["data_source"], row.get("extra", {})) for row in rows]


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
    "lookup_chain": lookup_chains,
    "stdlib": stdlib_questions,
    "reasoning_gym": lambda argument: _generated(reasoning_gym.problems(argument)),
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


def read_for_rollouts(spec: str, agents: bool = False) -> list[Row]:
    """The rows of a set that is to be answered, by training or evaluation. agents: with loop=agent.

    Raises:
      DataError: some want a rollout of several turns, which would silently be one of a single turn, or an environment that does
        not exist. Otherwise as `read`.
    """
    rows, known = read(spec), [*ENVIRONMENTS, *AGENT_NAMES]
    able = {f"agent_name {name!r}" for name in known} if agents else ()
    unable = [(n, row.needs) for n, row in enumerate(rows) if row.needs not in ("", *able)]
    wrong = [f"row {n}: {needs} asks for a rollout of several turns" for n, needs in unable]
    if agents:
        refuse(spec.partition(":")[2], wrong, f"take these rows out, or set agent_name to one of {', '.join(known)}")
    remedy = f"set loop=agent for agent_name {', '.join(known)}; take other rows out, or set agent_name to"
    refuse(spec.partition(":")[2], wrong, f"{remedy} {', '.join(sorted(ONE_TURN))} or leave it out where one answer is meant")
    return rows


def check(spec: str) -> None:
    """Raises ValueError unless `spec` is NAME:... with the name of a reader."""
    name, _, argument = spec.partition(":")
    if name not in READERS or not argument:
        known = ", ".join(READERS)
        raise DataError(f"data: {spec!r} is not NAME:PATH (or NAME:SPLIT:COUNT) with NAME one of {known}", "correct the name")


log = logging.getLogger(__name__)

NAMED = 5  # overlapping questions that the log shows
TEMPLATE_REMEDY = "mend the chat template of the model's folder, or set --config.data.template to one that the model knows"
PURPOSE = 0x0D47A  # keeps the order's random stream apart from all others of the same seed


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a file's rows: rows looked at, problems kept, and the numbers of the rows that were left out.

    bad_keys: without a usable key. overlong: longer than the prompt limit.
    """

    spec: str
    rows: int
    kept: int
    bad_keys: Sequence[int]
    overlong: Sequence[int]

    def __str__(self) -> str:
        reasons = (("without a usable answer", self.bad_keys), ("too long", self.overlong))
        told = ", ".join(f"{len(numbers)} {reason} ({listed(numbers)})" for reason, numbers in reasons if numbers)
        left = f"{self.rows - self.kept} left out: {told}" if told else "none left out"
        return f"{self.spec}: {self.kept} of {self.rows} problems ({left})"


def listed(numbers: Sequence[int]) -> str:
    """Numbers of rows in words, the first few of many."""
    more = ", ..." if len(numbers) > NAMED else ""
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:NAMED]))}{more}"


def load_problems(
    spec: str, tokenizer: Tokenizer, template: str, max_prompt_length: int, limit: int = 0, agents: bool = False
) -> tuple[list[Problem], Report]:
    """Reads, templates and tokenises one entry of `data.train` or `data.validation`.

    Args:
      spec: `NAME:PATH` or `NAME:SPLIT:COUNT`, NAME one of READERS.
      template: one of `templates.TEMPLATES`. Files that prescribe their chat messages (verl's) take "chat" only.
      max_prompt_length: longer prompts are left out, never cut. limit: keep so many at most; 0: all. agents: with loop=agent.

    Raises:
      ValueError, FileNotFoundError: what is wrong with the file, the template or their combination; or nothing was left.
    """
    if template not in templates.TEMPLATES:
        raise ValueError(f"data.template {template!r} is not one of {', '.join(templates.TEMPLATES)}")
    problems: list[Problem] = []
    bad_keys, overlong, seen = [], [], 0
    for number, row in enumerate(usable_rows(spec, template, agents)):
        if limit and len(problems) == limit:
            break
        seen += 1
        if row.ground_truth is None:
            bad_keys.append(number)
            continue
        try:
            ids = prompt_ids(row, template, tokenizer)
        except ValueError as error:
            raise DataError(f"data: {spec}, row {number}: {error}", TEMPLATE_REMEDY) from error
        if len(ids) > max_prompt_length:
            overlong.append(number)
            continue
        told = templates.told(template, row.question, row.messages)
        problems.append(Problem(len(problems), row.data_source, ids, row.ground_truth, row.question, row.extra, told))
    report = Report(spec, seen, len(problems), bad_keys, overlong)
    if not problems:
        limit_key = f"data.max_prompt_length (now {max_prompt_length} tokens)"
        raise DataError(f"data: nothing is left of {report}", f"raise --config.{limit_key}, or check the file")
    return problems, report


def prompt_ids(row: Row, template: str, tokenizer: Tokenizer) -> Ids:
    """The prompt of a row: its own chat messages where the file prescribes them, else its question in the template.

    Raises:
      ValueError: the tokenizer has no chat template, or it refuses the messages.
    """
    if row.messages is None:
        return templates.TEMPLATES[template](row.question, tokenizer)
    return templates.messages_prompt(row.messages, tokenizer)


def load_sets(config: Any, key: str, tokenizer: Tokenizer) -> list[Problem]:
    """The problems of all sets that the configuration's section `data` names under `key`; what was left out is logged."""
    loaded, data = [], config.data
    for spec in data[key]:
        limit = 0 if key == "train" else data.validation_limit
        problems, report = load_problems(spec, tokenizer, data.template, data.max_prompt_length, limit, config.loop == "agent")
        log.info("data: %s", report)
        loaded += problems
    return loaded


def usable_rows(spec: str, template: str, agents: bool = False) -> list[Row]:
    """The rows of a set that a run with this template can answer and grade, those without a key included; no tokenizer is needed.

    Raises:
      DataError, FileNotFoundError: the file, or some of its rows, cannot be used.
    """
    rows = read_for_rollouts(spec, agents)
    if template != "chat" and any(row.messages is not None for row in rows):
        what = f"data: {spec} prescribes its own chat messages, so data.template={template} can't apply"
        raise DataError(what, "set it to chat: --config.data.template=chat")
    if all(row.ground_truth is None for row in rows):
        raise DataError(f"data: nothing is left of {spec}: none of its {len(rows)} rows has a usable answer", "check the file")
    return rows


def contamination(train: Sequence[Problem], held_out: Sequence[Problem]) -> int:
    """Number of held-out problems whose question is also a training question, spelled or worded alike (`contamination.overlap`).

    The first few go to the log, so that it can be judged what is refused or allowed.
    """
    found = overlap([problem.question for problem in train], [problem.question for problem in held_out]).found
    for held, row in found[:NAMED]:
        log.warning(
            "data: held-out %s question %r is also training question %r",
            held_out[held].data_source,
            held_out[held].question[:200],
            train[row].question[:200],
        )
    if len(found) > NAMED:
        log.warning("data: and %d more held-out questions", len(found) - NAMED)
    return len(found)


def refuse_overlap(
    train: Sequence[Problem], held_out: Sequence[Problem], choosing: Sequence[Problem], allow_overlap: bool
) -> None:
    """Ends the program when a set that must be unseen shares questions with one that is seen; `allow_overlap` only counts them.

    Args:
      train, held_out, choosing: problems of data.train, data.validation and data.selection.
    """
    if (shared := contamination(train, held_out)) and not allow_overlap:
        raise SystemExit(
            f"{shared} training questions are also in data.validation: every score would be too good. "
            "Take them out, or set --config.data.allow_overlap=true"
        )
    if (shared := contamination([*train, *held_out], choosing)) and not allow_overlap:
        raise SystemExit(
            f"{shared} questions of data.selection are also in data.train or data.validation: the best would be chosen on "
            "what it has seen or on what is reported. Take them out, or set --config.data.allow_overlap=true"
        )


class Dataset:
    """Endless batches of problems. Each epoch is a fresh order of all of them; what is left of a batch at its end is dropped.

    epoch: of the batch that `next` returned last (0 before the first).
    """

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int):
        if not 1 <= batch_size <= len(problems):
            raise ValueError(
                f"data.batch_size={batch_size} can't be drawn from {len(problems)} problems: set it between 1 and their number"
            )
        self._problems, self._batch_size, self._seed = list(problems), batch_size, seed
        self._fingerprint = fingerprint(problems)
        self.epoch, self._cursor = 0, 0
        self._order = self._epoch_order(0)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._problems) // self._batch_size

    def passes(self, least: int | None = None) -> int:
        """Passes over the problems that are complete: too few are left for a batch of `least` problems (default: a full one)."""
        least = self._batch_size if least is None else least
        return self.epoch + (self._cursor + least > len(self._problems))

    def metrics(self) -> dict[str, float]:
        """The present pass over the problems, and the passes so far with the part of the present one."""
        part = min(1.0, self._cursor / (self.batches_per_epoch * self._batch_size))
        return {"training/epoch": self.epoch, "training/passes": self.epoch + part}

    def next(self, count: int | None = None) -> list[Problem]:
        """The next `count` problems (default: a full batch; fewer where hard states take their places).

        Raises:
          ValueError: `count` is negative or above the batch size.
        """
        count = self._batch_size if count is None else count
        if not 0 <= count <= self._batch_size:
            raise ValueError(f"a batch holds 0 to {self._batch_size} problems, {count} were asked for")
        if self._cursor + count > len(self._problems):
            self.epoch, self._cursor = self.epoch + 1, 0
            self._order = self._epoch_order(self.epoch)
        picked = self._order[self._cursor : self._cursor + count]
        self._cursor += count
        return [self._problems[index] for index in picked]

    def state(self) -> dict[str, Any]:
        """A JSON-serialisable position; `restore` continues behind it, over the end of an epoch too."""
        return {"epoch": self.epoch, "cursor": self._cursor, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the position of `state`.

        Raises:
          ValueError: the state is of other data, another order or another seed; says what differs.
        """
        order = self._epoch_order(state["epoch"])
        now = {**self._identity(), "order": _digest(order)}
        if changed := [f"{name}: {state[name]} then, {now[name]} now" for name in now if state[name] != now[name]]:
            raise ValueError(
                "the checkpoint's data position belongs to another data set or order ("
                + "; ".join(changed)
                + "). Resume with the same "
                "data.train, data.template, data.max_prompt_length and seed, or start a new run"
            )
        self.epoch, self._cursor, self._order = state["epoch"], state["cursor"], order

    def _identity(self) -> dict[str, Any]:
        order = _digest(self._order)
        return {"fingerprint": self._fingerprint, "problems": len(self._problems), "seed": self._seed, "order": order}

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """int64[problems]: a permutation that depends on (seed, epoch) alone."""
        return np.random.Generator(np.random.PCG64((PURPOSE, self._seed, epoch))).permutation(len(self._problems))


def fingerprint(problems: Sequence[Problem]) -> str:
    """A digest of everything about the problems that training depends on."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(problem.prompt_ids.tobytes())
        digest.update(json.dumps([problem.data_source, problem.ground_truth]).encode())
    return digest.hexdigest()[:16]


def _digest(order: np.ndarray) -> str:
    """Notices a NumPy whose permutations differ from those of the run's beginning."""
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16]
