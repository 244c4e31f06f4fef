"""What tools answered, kept as it came: a resumed run reads what it was told before; agent.replay repeats a run without tools.

`answers.jsonl` holds one answer a line. Its key is a hash of environment, problem, the rollout's seed and all the words so far,
so that the answers of a tool that says another thing each time stay those of their rollout.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import threading
from collections.abc import Mapping

from deepgrpo.config.errors import ConfigError
from deepgrpo.environments.base import Environment, Episode, Reply
from deepgrpo.types import Grade, Problem

FILE = "answers.jsonl"


class ReplayMiss(RuntimeError):
    """A run that replays another one asks a tool what that one never did."""


class Journal:
    """The answers of a run's tools, and those of the run that is replayed. For any thread."""

    def __init__(self, folder: pathlib.Path, replay: str = ""):
        """Raises ConfigError: the run that is to be replayed has no answers; names the file."""
        self.replaying = bool(replay)
        self._lock, self._known = threading.Lock(), {}
        for place in filter(None, (replay and pathlib.Path(replay), folder)):
            path = place / FILE
            if place == folder and not path.is_file():
                continue
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise ConfigError(f"agent.replay: {path} cannot be read ({error}); expected a run's folder `tools`") from error
            for line in lines:
                if line.endswith("}"):  # the last line of a killed run may be cut
                    entry = json.loads(line)
                    self._known[entry.pop("key")] = entry
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / FILE, "a", encoding="utf-8")

    def find(self, key: str) -> Reply | None:
        with self._lock:
            found = self._known.get(key)
        if found is None and self.replaying:
            raise ReplayMiss("agent.replay: the replayed run never asked this; replay it with the same configuration and data")
        return None if found is None else Reply(**found)

    def keep(self, key: str, reply: Reply) -> None:
        entry = dataclasses.asdict(reply) | {"counts": dict(reply.counts)}
        with self._lock:
            self._known[key] = entry
            self._file.write(json.dumps({"key": key, **entry}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def journalled(
    environments: Mapping[str, Environment], replay: str, folder: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Environment]:
    """The environments, those that wait for something with a journal in `folder`, which is closed with `stack`."""
    if not any(environment.waits for environment in environments.values()):
        return dict(environments)
    kept = stack.enter_context(contextlib.closing(Journal(folder, replay)))
    return {name: Journalled(name, made, kept) if made.waits else made for name, made in environments.items()}


class Journalled(Environment):
    """An environment whose answers are kept."""

    def __init__(self, name: str, environment: Environment, journal: Journal):
        self._name, self._environment, self._journal = name, environment, journal
        self.dialect, self.replay, self.waits = environment.dialect, environment.replay, environment.waits
        self.patience = environment.patience

    def check(self, problem: Problem) -> str:
        return self._environment.check(problem)

    def open(self, problem: Problem, seed: int) -> Episode:
        return _Journalled(self._name, self._environment, self._journal, problem, seed)

    def metrics(self) -> dict[str, float]:
        return self._environment.metrics()

    def close(self) -> None:
        self._environment.close()


class _Journalled(Episode):
    """Asks the tool only what is not known; its own episode begins with the first such question, and is told what was before."""

    def __init__(self, name: str, environment: Environment, journal: Journal, problem: Problem, seed: int):
        self._environment, self._journal, self._problem, self._seed = environment, journal, problem, seed
        self._said = [name, problem.data_source, problem.question, str(seed)]
        self._steps: list[tuple[str, bool]] = []
        self._episode: Episode | None = None

    def step(self, words: str, handed_over: bool) -> Reply:
        self._steps.append((words, handed_over))
        self._said.append(words)
        key = hashlib.blake2b(json.dumps(self._said).encode(), digest_size=16).hexdigest()
        if (known := self._journal.find(key)) is not None:
            return known
        if self._episode is None:
            self._episode = self._environment.open(self._problem, self._seed)
            for before in self._steps[:-1]:
                self._episode.step(*before)  # whatever it says now: what it said then was read
        reply = self._episode.step(words, handed_over)
        if not reply.failed:
            self._journal.keep(key, reply)
        return reply

    def grade(self) -> Grade | None:
        return None if self._episode is None else self._episode.grade()

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
