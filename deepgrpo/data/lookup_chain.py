"""The lookup-chain task: a value, ten times replaced by what a hidden table says; only the environment knows the table.

    37;4821=?    ->    a37?81\\nb81?05\\n...\\nj60?44\\n####44

After a line's label and value the student chooses: `?` hands over, and the environment writes the next value; `:` goes on, and
the student invents one. A guess is right once in a hundred, so the tool is needed, and since the table is a permutation a wrong
value never becomes right again. A *sloppy* solution invents: the flaw that the warm start puts into the student.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deepgrpo.data.carry_chain import CHAT_TEMPLATE, EMBEDDING_ROWS, VOCABULARY
from deepgrpo.data.carry_chain import END as END
from deepgrpo.data.carry_chain import build_tokenizer as build_tokenizer  # the two tasks share a vocabulary
from deepgrpo.rewards import steps
from deepgrpo.rewards.steps import LABELS, LOOKUPS, MARKER, MODULUS, hidden_table, looked_up

QUESTION, solution = steps.LOOKUP_QUESTION, steps.lookup_solution  # the graders' arithmetic is the task's
NAME = "lookup_chain"  # its data_source
STEPS = LOOKUPS
LINE = len("a37?81\n")
CHOICE = LINE - 4  # place of a line's choice: after its label and value

_SEEDS = {"train": 1, "heldout": 2}
_HELD_OUT_SHARE = 8  # one question in so many is never trained on
_VERSION = 1  # of the code that makes the same recipe's text: raise it when that changes


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """12 hex digits that change with the recipe of a student, with the task, and with the code that makes both."""
    task = (_VERSION, STEPS, MODULUS, LABELS, MARKER, VOCABULARY, EMBEDDING_ROWS, CHAT_TEMPLATE, _SEEDS, _HELD_OUT_SHARE)
    return hashlib.sha256(json.dumps([NAME, task, recipe], sort_keys=True).encode()).hexdigest()[:12]


def problems(split: str, count: int) -> list[dict[str, str]]:
    """The first `count` problems of a split: the same for everyone, all different, and never in the other split.

    Returns:
      Rows with `question`, `answer` (the final value, two digits) and `data_source`.

    Raises:
      ValueError: `split` is neither "train" nor "heldout".
    """
    stream, rows = questions(split, seed=0), {}
    while len(rows) < count:
        question = next(stream)
        rows.setdefault(question, {"question": question, "answer": looked_up(question)[-1], "data_source": NAME})
    return list(rows.values())


def questions(split: str, seed: int) -> Iterator[str]:
    """An endless stream of random questions of a split. The question itself decides its split, whatever the seed.

    Raises:
      ValueError: `split` is neither "train" nor "heldout".
    """
    if split not in _SEEDS:
        raise ValueError(f"split of {NAME} must be one of {sorted(_SEEDS)}, got {split!r}")
    return _questions(split, np.random.default_rng((_SEEDS[split], seed)))


def _questions(split: str, rng: np.random.Generator) -> Iterator[str]:
    while True:
        for start, table in rng.integers((MODULUS, 10_000), size=(256, 2)).tolist():
            question = f"{start:02d};{table:04d}=?"
            if (zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0) == (split == "heldout"):
                yield question


def observed(response: Any) -> Any:
    """bool[..., R]: the tokens that the environment wrote, of solutions int32[..., R], one token a character."""
    places = np.arange(response.shape[-1])
    choices = np.minimum(places // LINE * LINE + CHOICE, len(places) - 1)
    return (response[..., choices] == VOCABULARY.index("?")) & (places % LINE > CHOICE) & (places < STEPS * LINE)


def hard_steps(question: str) -> list[bool]:
    """Which steps of a solution the sloppy student gets wrong: each."""
    return [True] * STEPS


def sloppy_solution(question: str, forget: float, rng: np.random.Generator) -> str:
    """An answer text, observations included, that invents each value with probability `forget` in place of asking for it."""
    table, value, lines = hidden_table(question), int(question[:2]), []
    for label, invents, invented in zip(LABELS, rng.random(STEPS) < forget, rng.integers(MODULUS, size=STEPS), strict=True):
        following = int(invented) if invents else table[value]
        lines.append(f"{label}{value:02d}{':' if invents else '?'}{following:02d}\n")
        value = following
    return "".join(lines) + f"{MARKER}{value:02d}"
