"""Stand-ins for what surrounds the annotator and the worker, a byte-level tokenizer, and the golden cases of the teacher."""

import asyncio
import concurrent.futures
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs import common
from deepgrpo.curriculum.base import Correction, Failure
from deepgrpo.teacher.annotate import ACCEPTED, Outcome
from deepgrpo.teacher.splice import Codec
from deepgrpo.teacher.worker import TeacherWorker
from deepgrpo.types import Grade, Problem, as_ids
from tests.conftest import golden_files


class NumberCodec:
    """Texts are lists of numbers: ids and text are the same thing."""

    special_ids = frozenset()

    def __init__(self, eos_token_id: Any):
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if word != "empty"]

    def decode(self, ids) -> str:
        return " ".join(str(int(i)) for i in ids)

    text = decode


class InstantGrader:
    """Gives every answer the same grade (or raises, or never answers) and keeps what it was asked."""

    def __init__(self, grade: Grade | Exception | None):
        self.grade, self.answers = grade, []

    def submit(self, answer) -> "concurrent.futures.Future[Grade]":
        self.answers.append(answer)
        future = concurrent.futures.Future()
        if isinstance(self.grade, Exception):
            future.set_exception(self.grade)
        elif self.grade is not None:
            future.set_result(self.grade)
        return future


def failure(
    prompt=(1,), response=(5, 6, 7, 8), *, event=0, locked=(), step=0, question="2 + 3 = ?", source="arithmetic", truth="5"
):
    problem = Problem(0, source, as_ids(list(prompt)), truth, question)
    return Failure(event, problem, as_ids([*prompt, *locked]), as_ids(list(response)), step)


class Queue:
    """A curriculum of failures alone: first in, first out; what is put back goes to its front."""

    def __init__(self, failures: list[Failure]):
        self.waiting, self.in_flight = list(failures), {}
        self.results: list[tuple[Any, bool]] = []
        self.useless: set[Any] = set()  # events in flight whose answer nobody can use any more
        self.crashes = 0  # next dispatches that raise

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        if self.crashes:
            self.crashes -= 1
            raise RuntimeError("planted crash of dispatch")
        taken = [self.waiting.pop(0) for _ in range(min(max_items, 2, len(self.waiting)))]  # at most two a call
        self.in_flight |= {f.failure_id: f for f in taken}
        return taken

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        del self.in_flight[failure.failure_id]
        self.results.append((failure.failure_id, correction is not None))
        return "done"

    def requeue(self, failure: Failure) -> None:
        self.waiting.insert(0, self.in_flight.pop(failure.failure_id))

    def rest(self, failure: Failure) -> None:
        assert failure.failure_id in self.in_flight

    def withdraw(self, failure: Failure) -> bool:
        return self.in_flight.pop(failure.failure_id, None) is not None if failure.failure_id in self.useless else False

    def pending(self) -> int:
        return len(self.waiting)


class Script:
    """An annotator that does what a function of the failure says: an outcome, an exception, or a coroutine that gives one."""

    def __init__(self, say: Callable[[Failure], Any], capacity: int = 64):
        self.say, self.room, self.retry = say, capacity, float("inf")
        self.calls, self.recorded, self.running, self.most = [], [], 0, 0

    async def annotate(self, failure: Failure, step: int) -> Outcome:
        self.calls.append(failure.failure_id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            said = self.say(failure)
            return await said if asyncio.iscoroutine(said) else said
        finally:
            self.running -= 1

    def record(self, outcome: Outcome) -> None:
        self.recorded.append(outcome.reason)

    def capacity(self) -> int:
        return self.room

    def retry_in(self) -> float:
        return self.retry

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    async def aclose(self) -> None:
        pass


def corrected(failure: Failure, match: int = 2, suffix=(90, 91)) -> Outcome:
    ids = failure.response_ids
    return Outcome(ACCEPTED, Correction(ids[:match], as_ids(list(suffix)), 1.0, ids[match:]))


DOWN = Outcome("breaker_open", deferred=True)
NO_VERDICT = Outcome("no_verdict", deferred=True)


def until(condition, what, deadline=120.0):
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline} s for {what}"
        time.sleep(0.002)


def worker_on(queue, script, **settings):
    settings = {"max_concurrent": 4, "pause": 0.01, "outage": 0.01} | settings
    worker = TeacherWorker(queue, script, **settings)
    worker.start()
    return worker


def failures(n):
    return [failure(event=i) for i in range(n)]


def configured(limits):
    """The whole configuration, with these limits of a cut."""
    config = common.get_config()
    names = ("min_prefix_match_tokens", "min_prefix_match_ratio", "min_suffix_len")
    config.teacher.update({name: getattr(limits, name) for name in names})
    config.rollout.max_model_len, config.curriculum.min_remaining_tokens = limits.max_model_len, limits.min_remaining_tokens
    return config


#### A tokenizer like those of Qwen and SmolLM2: an id may hold half a character, a text has many tokenisations

TEXTS = [
    "The sum is 12 + 30 = 42 units.\n\nSo the answer is 42.",
    "die Größe π ≈ 3.14 € 😀 日本語",
    "a+6=63\nb+9=72\n#### 72",
] * 4


@functools.cache
def _trained() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def byte_level_codec() -> Codec:
    """A codec over a fresh tokenizer instance; ids 0..2 are special, 2 is the stop id."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(_trained()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    return Codec(tokenizer)


#### Golden cases of the teacher (`pools_*_teacher*.json`) as test parameters

MARKS = {  # kind: what its cases' arguments or results have and no other kind's; a scenario may have any name
    "suffix_alignment": "teacher_ids",
    "append_eos": "mask",
    "parse_solution_reply": "solution",
    "parse_index_reply": "index",
    "client_retry": "temperature_schedule",
    "worker_modes": "worker_step",
}


def teacher_cases(kind: str) -> list:
    """Cases of one kind over all files of the pattern, or one skipped case if there is no file."""
    files = golden_files("pools_*_teacher*.json")
    cases = [
        pytest.param(case["args"], case["result"], id=f"{path.stem}-{found['name']}-{i}")
        for path in files
        for found in json.loads(path.read_text())["scenarios"]
        for i, case in enumerate(found["cases"])
        if MARKS[kind] in {*case["args"], *(case["result"] or ())}
    ]
    assert cases or not files, f"no case of the kind {kind} in {files}"
    absent = pytest.mark.skip(reason="golden cases pools_*_teacher*.json are absent: set DEEPGRPO_GOLDEN")
    return cases or [pytest.param(None, None, marks=absent, id="absent")]
