"""The environment of the lookup-chain task (rewards/steps.py): it knows the question's hidden table."""

import re

from deepgrpo.environments.base import Dialect, Environment, Episode, Reply
from deepgrpo.rewards.steps import hidden_table
from deepgrpo.types import Problem

_ASKED = re.compile(r"(\d\d)\?\Z")


class Lookup(Environment):
    """`?` after a value asks for the next one: "a37?" is answered by "81" and a new line."""

    dialect = Dialect(stop_texts=("?",))
    replay = "pure"
    waits = False

    def open(self, problem: Problem, seed: int) -> Episode:
        return _Lookup(problem.question)


class _Lookup(Episode):
    def __init__(self, question: str):
        self._table = hidden_table(question)

    def step(self, words: str, handed_over: bool) -> Reply:
        if not handed_over:
            return Reply(None)
        asked = _ASKED.search(words)
        if asked is None:
            return Reply("\n", counts={"malformed_calls": 1})
        return Reply(f"{self._table[int(asked[1])]:02d}\n", counts={"calls": 1})
