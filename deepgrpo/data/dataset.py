"""Problems ready for rollout, and their order: a function of (seed, epoch), with a cursor that resumes exactly."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepgrpo.data import readers, templates
from deepgrpo.data.cells import DataError
from deepgrpo.data.contamination import overlap
from deepgrpo.data.tokenizer import Tokenizer
from deepgrpo.types import Ids, Problem

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
    spec: str, tokenizer: Tokenizer, template: str, max_prompt_length: int, limit: int = 0
) -> tuple[list[Problem], Report]:
    """Reads, templates and tokenises one entry of `data.train` or `data.validation`.

    Args:
      spec: `NAME:PATH` or `NAME:SPLIT:COUNT`, NAME one of `readers.READERS`.
      template: one of `templates.TEMPLATES`. Files that prescribe their chat messages (verl's) take "chat" only.
      max_prompt_length: longer prompts are left out, never cut. limit: keep so many at most; 0: all.

    Raises:
      ValueError, FileNotFoundError: what is wrong with the file, the template or their combination; or nothing was left.
    """
    if template not in templates.TEMPLATES:
        raise ValueError(f"data.template {template!r} is not one of {', '.join(templates.TEMPLATES)}")
    problems: list[Problem] = []
    bad_keys, overlong, seen = [], [], 0
    for number, row in enumerate(usable_rows(spec, template)):
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


def prompt_ids(row: readers.Row, template: str, tokenizer: Tokenizer) -> Ids:
    """The prompt of a row: its own chat messages where the file prescribes them, else its question in the template.

    Raises:
      ValueError: the tokenizer has no chat template, or it refuses the messages.
    """
    if row.messages is None:
        return templates.TEMPLATES[template](row.question, tokenizer)
    return templates.messages_prompt(row.messages, tokenizer)


def load_sets(data: Any, key: str, tokenizer: Tokenizer) -> list[Problem]:
    """The problems of all sets that `data`, a section of the configuration, names under `key`; what was left out is logged."""
    loaded = []
    for spec in data[key]:
        limit = data.limit if key == "train" else data.validation_limit
        problems, report = load_problems(spec, tokenizer, data.template, data.max_prompt_length, limit)
        log.info("data: %s", report)
        loaded += problems
    return loaded


def usable_rows(spec: str, template: str) -> list[readers.Row]:
    """The rows of a set that a run with this template can answer and grade, those without a key included; no tokenizer is needed.

    Raises:
      DataError, FileNotFoundError: the file, or some of its rows, cannot be used.
    """
    rows = readers.read_for_rollouts(spec)
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

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int, shuffle: bool = True):
        if not 1 <= batch_size <= len(problems):
            raise ValueError(
                f"data.batch_size={batch_size} can't be drawn from {len(problems)} problems: set it between 1 and their number"
            )
        self._problems, self._batch_size, self._seed, self._shuffle = list(problems), batch_size, seed, shuffle
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
                "data.train, data.template, data.max_prompt_length, data.limit and seed, or start a new run"
            )
        self.epoch, self._cursor, self._order = state["epoch"], state["cursor"], order

    def _identity(self) -> dict[str, Any]:
        order = _digest(self._order)
        return {"fingerprint": self._fingerprint, "problems": len(self._problems), "seed": self._seed, "order": order}

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """int64[problems]: a permutation that depends on (seed, epoch) alone."""
        if not self._shuffle:
            return np.arange(len(self._problems))
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
