"""Problems ready for rollout, and their order: a function of (seed, epoch), with a cursor that resumes exactly."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepgrpo.data import readers, templates
from deepgrpo.data.contamination import overlap
from deepgrpo.data.tokenizer import Tokenizer
from deepgrpo.types import Ids, Problem

log = logging.getLogger(__name__)

NAMED = 5  # overlapping questions that the log shows
PURPOSE = 0x0D47A  # keeps the order's random stream apart from all others of the same seed


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a file's rows: rows looked at, kept, without a usable key, longer than the prompt limit."""

    spec: str
    rows: int
    kept: int
    bad_keys: int
    overlong: int

    def __str__(self) -> str:
        left_out = (
            f"{self.bad_keys} without a usable answer, {self.overlong} too long" if self.kept < self.rows else "none left out"
        )
        return f"{self.spec}: {self.kept} of {self.rows} problems ({left_out})"


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
    seen = bad_keys = overlong = 0
    for row in readers.read(spec):
        if limit and len(problems) == limit:
            break
        seen += 1
        if row.ground_truth is None:
            bad_keys += 1
            continue
        ids = _prompt_ids(row, tokenizer, template, spec)
        if len(ids) > max_prompt_length:
            overlong += 1
            continue
        problems.append(Problem(len(problems), row.data_source, ids, row.ground_truth, row.question, row.extra))
    if not problems:
        raise ValueError(
            f"data: nothing is left of {spec}: {seen} rows, {bad_keys} without a usable answer, {overlong} with prompts above "
            f"data.max_prompt_length={max_prompt_length} tokens. Raise the limit or check the file"
        )
    return problems, Report(spec, seen, len(problems), bad_keys, overlong)


def _prompt_ids(row: readers.Row, tokenizer: Tokenizer, template: str, spec: str) -> Ids:
    if row.messages is None:
        return templates.TEMPLATES[template](row.question, tokenizer)
    if template != "chat":
        raise ValueError(
            f"data: {spec} prescribes its own chat messages, so data.template={template} can't apply; set it to chat"
        )
    return templates.messages_prompt(row.messages, tokenizer)


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

    @property
    def last_of_epoch(self) -> bool:
        """Whether the batch that `next` returned last has left too few problems for another full one."""
        return self._cursor + self._batch_size > len(self._problems)

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
                "data.train, data.template, data.max_prompt_length, data.limit, data.shuffle and seed, or start a new run"
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
