"""A search engine: the student writes `<search>query</search>`, and passages stand in an information block after it.

Passages come from a service (agent.retriever_url, as the public search agents have it), or from an index over a folder of JSONL
files (agent.corpus; rows with `text`, perhaps `title`), which needs nothing else to run.
"""

import collections
import json
import math
import pathlib
import re
import time
from collections.abc import Iterator, Sequence

import httpx
import ml_collections

from deepgrpo.config.errors import ConfigError
from deepgrpo.data import stdlib
from deepgrpo.environments.base import Dialect, Environment, Episode, Reply
from deepgrpo.types import Problem

TOP = 3  # passages of a query
MAX_CHARACTERS = 1024  # of all passages of a query
ATTEMPTS = 3
REST = 5.0  # seconds in which a service that failed is not asked again
K1, B = 1.2, 0.75  # of BM25 (Robertson and Zaragoza 2009)

_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_WORD = re.compile(r"\w+")


class Search(Environment):
    """What is found depends on the query alone, so states inside a conversation need no restoring."""

    dialect = Dialect(stop_texts=("</search>",))
    replay = "pure"
    patience = 1.5 * ATTEMPTS  # each has the whole time, and there are pauses

    def __init__(self, config: ml_collections.ConfigDict):
        """Raises ConfigError: no retriever and no corpus is named, or it cannot be used."""
        agent = config.agent
        if bool(agent.retriever_url) == bool(agent.corpus):
            raise ConfigError(
                "agent.environment=search needs either agent.retriever_url or agent.corpus, a folder of JSONL files"
            )
        self.find = Service(agent.retriever_url, agent.tool_seconds) if agent.retriever_url else Index(agent.corpus)
        self.waits = bool(agent.retriever_url)

    def open(self, problem: Problem, seed: int) -> Episode:
        return _Search(self.find)

    def close(self) -> None:
        self.find.close()


class _Search(Episode):
    def __init__(self, find: "Service | Index"):
        self._find = find

    def step(self, words: str, handed_over: bool) -> Reply:
        query = _QUERY.search(words)
        if not (handed_over and query and query[1].strip()):
            return Reply(None)  # an answer; or a call without a query, which ends it as in the reference
        try:
            found = self._find(query[1].strip())
        except (httpx.HTTPError, OSError, ValueError, LookupError, TypeError) as error:
            return Reply(None, failed=f"retriever: {type(error).__name__}: {error}"[:200], counts={"calls": 1})
        return Reply(f"\n\n<information>{rendered(found)}</information>\n\n", counts={"calls": 1})


def rendered(passages: Sequence[str]) -> str:
    """Passages as the student reads them; the first line of each is its title."""
    lines = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)[:MAX_CHARACTERS]


class Service:
    """POST {queries, topk, return_scores} -> {result: [[{document: {contents}}]]}. For any thread."""

    def __init__(self, url: str, seconds: float):
        """Raises ConfigError: it does not answer now."""
        self._url, self._client = url, httpx.Client(timeout=seconds, trust_env=False)
        self._down_until = 0.0
        try:
            self("test")
        except (httpx.HTTPError, OSError, ValueError, LookupError, TypeError) as error:
            remedy = "start the retriever, or correct agent.retriever_url"
            raise ConfigError(
                f"agent.retriever_url = {url} does not answer ({type(error).__name__}: {error}): {remedy}"
            ) from error

    def __call__(self, query: str) -> list[str]:
        if time.monotonic() < self._down_until:
            raise OSError("it failed a moment ago")
        for attempt in range(ATTEMPTS):
            try:
                answer = self._client.post(self._url, json={"queries": [query], "topk": TOP, "return_scores": True})
                answer.raise_for_status()
                return [str(entry["document"]["contents"]) for entry in answer.json()["result"][0]]
            except (httpx.HTTPError, OSError):
                if attempt + 1 == ATTEMPTS:
                    self._down_until = time.monotonic() + REST
                    raise
                time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._client.close()


class Index:
    """BM25 over the passages of a folder's JSONL files, in memory. For any thread."""

    def __init__(self, folder: str):
        """Raises ConfigError: no such folder, no passage in it, or a line that is none; names it."""
        self._passages, self._lengths = list(passages(folder)), []
        self._places: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)  # word: (passage, how often)
        for i, passage in enumerate(self._passages):
            counts = collections.Counter(words(passage))
            self._lengths.append(counts.total())
            for word, count in counts.items():
                self._places[word].append((i, count))
        self._mean = sum(self._lengths) / len(self._lengths)

    def __call__(self, query: str) -> list[str]:
        scores: collections.Counter[int] = collections.Counter()
        total = len(self._passages)
        for word in dict.fromkeys(words(query)):
            found = self._places.get(word, ())
            if 2 * len(found) > total > 10:
                continue  # a word of most passages says nothing, and costs a look at all of them
            weight = math.log(1 + (total - len(found) + 0.5) / (len(found) + 0.5))
            for i, count in found:
                scores[i] += weight * count * (K1 + 1) / (count + K1 * (1 - B + B * self._lengths[i] / self._mean))
        best = sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))[:TOP]
        return [self._passages[i] for i, _ in best]

    def close(self) -> None:
        """Nothing is held."""


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def passages(folder: str) -> Iterator[str]:
    """The passages of a folder's JSONL files, or of Python's library ("stdlib"), each with its title as the first line."""
    if folder == stdlib.NAME:
        yield from (f"{title}\n{text}" for title, text in stdlib.passages())
        return
    files, count = sorted(pathlib.Path(folder).glob("*.jsonl")), 0
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            try:
                row = json.loads(line)
                yield f"{row.get('title', '')}\n{row['text']}"
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                expected = 'expected {"title": ..., "text": ...}'
                raise ConfigError(f"agent.corpus: {file}, line {number + 1}: {expected}, found {line[:60]!r}") from error
            count += 1
    if not count:
        raise ConfigError(f"agent.corpus = {folder}: no passage found; expected a folder of JSONL files, a passage a line")
