"""Whatever an endpoint does: no failure is lost, no label is made, what was paid is charged, and it is said once."""

import concurrent.futures
import contextlib
import functools
import logging
import pathlib

import pytest

from configs import carry_chain as experiment
from deepgrpo.curriculum import create
from deepgrpo.data import carry_chain, dataset
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.endpoint import client as client_lib
from deepgrpo.endpoint import health, transport
from deepgrpo.endpoint.client import Client
from deepgrpo.model.config import ModelConfig
from deepgrpo.rewards.grade import grade
from deepgrpo.rollout.engine import Request, Sampling
from deepgrpo.rollout.native import NativeEngine
from deepgrpo.teacher.worker import open_teacher
from deepgrpo.weights import hf
from tests.faults.behaviours import COMMON, KWARGS, ODD, SECRET, choice, refuses, usage
from tests.faults.scripted_endpoint import MODEL, Endpoint, right

PROBLEMS, SAMPLES = 4, 2
LATER = 10_000  # steps: longer than anything is held back


@pytest.fixture(scope="module")
def failed(student):
    """The demo's tokenizer, and of each of its first problems the rollouts of its student, all of which fail."""
    tokenizer = load_tokenizer(str(student))
    problems, _ = dataset.load_problems(f"carry_chain:train:{PROBLEMS}", tokenizer, "chat", 32)
    stop = (tokenizer.eos_token_id,)
    engine = NativeEngine(ModelConfig.from_hf(student), hf.load(student), "float32", len(tokenizer), 16, 8)
    requests = [Request(problem.prompt_ids, tuple(range(SAMPLES))) for problem in problems]
    completions = engine.generate(requests, Sampling(1.0, 1.0, -1, stop, 112))
    engine.close()
    return tokenizer, [(problem, [one.ids for one in ones]) for problem, ones in zip(problems, completions, strict=True)]


class Grading:
    def submit(self, answer):
        future = concurrent.futures.Future()
        future.set_result(grade(answer))
        return future


async def soon(seconds: float) -> None:
    await transport.asyncio.sleep(seconds / 1000)


class Loop:
    """Forest, worker, client and annotator of a run, with the failures waiting."""

    def __init__(self, failed, endpoint: Endpoint, folder: pathlib.Path, stack: contextlib.ExitStack, **teacher):
        tokenizer, groups = failed
        config = experiment.get_config()
        keys = {"base_url": endpoint.base_url, "model": MODEL, "timeout": 60.0, "max_concurrent": 8} | teacher
        config.teacher.update(keys)
        self.forest, self.step, self.endpoint = create(config), 1, endpoint
        self.worker = open_teacher(
            config,
            stack,
            curriculum=self.forest,
            grader=Grading(),
            tokenizer=tokenizer,
            stop_ids=(tokenizer.eos_token_id,),
            folder=folder,
            environments={},
        )
        for problem, responses in groups:
            self.forest.observe_root(problem, 0, SAMPLES, 1, responses)
        self.worker.start()
        stack.callback(self.worker.stop, 20.0)

    def drain(self, times: int = 1) -> dict[str, float]:
        for _ in range(times):
            self.worker.drain(self.step, 60.0)
            self.step += LATER
        return self.worker.metrics()

    def recover(self) -> dict[str, float]:
        """The endpoint works again: drains until nothing waits."""
        self.endpoint.behave = right
        client = self.worker._annotator._client
        client._quiet_until = 0.0  # the hour that was asked for has passed
        client._section.timeout = 60.0  # a busy host has time
        for _ in range(200):
            if (metrics := self.drain())["teacher_worker/total_attempted"] == PROBLEMS * SAMPLES:
                break
            transport.time.sleep(0.01)
        return metrics


@pytest.fixture
def loop(failed, tmp_path, monkeypatch):
    monkeypatch.setattr(client_lib, "Client", functools.partial(Client, sleep=soon))
    monkeypatch.setattr(health, "SECONDS", 0.01)
    monkeypatch.setattr(transport, "BODY_LIMIT", 1 << 20)  # so that what has no end costs little
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the machine's proxy is not for its own traffic
    with contextlib.ExitStack() as stack:
        yield lambda endpoint, **teacher: Loop(failed, stack.enter_context(endpoint), tmp_path, stack, **teacher)


def accepted(metrics: dict[str, float]) -> tuple[float, float]:
    return metrics["teacher_suffix/accepted"], metrics["teacher_worker/total_attempted"]


@pytest.fixture(scope="module")
def without_faults(failed, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        loop = Loop(failed, stack.enter_context(Endpoint()), tmp_path_factory.mktemp("clean"), stack)
        metrics = loop.recover()
    assert metrics["teacher_suffix/accepted"] > 5
    return accepted(metrics)


@pytest.mark.parametrize("name", COMMON)
def test_a_fault_of_all_requests_loses_nothing_and_is_said_once(loop, without_faults, caplog, tmp_path, name):
    behave, counter, says, paid = COMMON[name]
    running = loop(Endpoint(behave), token_budget=10**9, timeout=0.3 if counter == "http_timeout" else 60.0)
    metrics = running.drain(2)
    assert metrics["teacher_worker/total_attempted"] == metrics["teacher_suffix/accepted"] == 0
    assert metrics[f"teacher/{counter}"] > 0 and metrics["teacher/available"] == 0
    spent = sum(metrics[f"teacher/{kind}"] for kind in ("tokens", "http_lost_prompt_tokens", "http_lost_completion_tokens"))
    assert (spent > 0) == paid
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(says in text and "->" in text for text in said), said
    assert len(set(said)) == len(said) <= 3, said  # of the kind, of the opened breaker, of odd numbers
    assert accepted(running.recover()) == without_faults, "what could not be asked is asked again"
    kept = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert SECRET not in kept and not any(SECRET in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ODD)
def test_odd_replies_are_read_and_paid_for(loop, without_faults, caplog, name):
    behave, says = ODD[name]
    running = loop(Endpoint(behave))
    metrics = running.drain(3)
    assert accepted(metrics) == without_faults and metrics["teacher_suffix/reject_request_refused"] == 0
    texts = sum(len(asked["messages"][0]["content"]) for asked in running.endpoint.asked)
    answered = 1.0 if "half" not in name else 0.5
    assert texts / 8 * answered < metrics["teacher/tokens"] < texts
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(says) and all(says in text for text in said)


def test_a_refusal_of_one_question_is_that_questions_own(loop, caplog):
    def behave(exchange):
        refuses("too long")(exchange) if bad in exchange.request_body else right(exchange)

    bad = carry_chain.problems("train", PROBLEMS)[1]["question"].encode()
    metrics = loop(Endpoint(behave), max_concurrent=1).drain(4)
    assert metrics["teacher_suffix/accepted"] == (PROBLEMS - 1) * SAMPLES, "the others'"
    refused, waiting = metrics["teacher_suffix/reject_request_refused"], metrics["teacher_worker/held_back"]
    assert refused > 0 and refused + waiting == SAMPLES, "it waits until a question that was asked after it is answered"
    assert len([record for record in caplog.records if "too long" in record.getMessage()]) == 1


def test_a_common_cause_that_begins_in_the_middle_loses_nothing(loop, without_faults):
    running = loop(Endpoint(lambda e: right(e) if e.ordinal < 5 else refuses(KWARGS)(e)), max_concurrent=1)
    metrics = running.drain(3)
    assert metrics["teacher_suffix/reject_request_refused"] == 0 < metrics["teacher_worker/total_attempted"] <= 5
    assert accepted(running.recover()) == without_faults


@pytest.mark.parametrize(
    "told", ['{"prompt_tokens": 0, "completion_tokens": 0}', '{"prompt_tokens": -9, "completion_tokens": 3}', "{}"]
)
@pytest.mark.parametrize("concurrent", [1, 32])
def test_budgets_hold_within_one_request(loop, told, concurrent):
    running = loop(Endpoint(usage(told)), token_budget=4000, max_concurrent=concurrent, max_tokens=100)
    metrics = running.drain(3)
    one = max(len(asked["messages"][0]["content"]) for asked in running.endpoint.asked) / 3 + 100
    assert 4000 <= metrics["teacher/tokens"] <= 4000 + one and metrics["teacher/budget_refusals"] > 0
    assert metrics["teacher_worker/total_attempted"] < PROBLEMS * SAMPLES, "what was not asked is still queued"


def test_a_limit_under_its_new_name(loop, without_faults):
    def behave(exchange):
        wrong = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        refuses(wrong)(exchange) if "max_tokens" in exchange.asked else right(exchange)

    running = loop(Endpoint(behave), token_budget=10**9)
    assert accepted(running.drain(2)) == without_faults and running.endpoint.asked[-1]["max_completion_tokens"] > 0


def test_an_echoed_key_is_kept_nowhere(loop, tmp_path):
    message = {"role": "assistant", "content": f"[CORRECT_SOLUTION]\nBearer {SECRET}"}
    running = loop(Endpoint(choice(message=message)))
    assert running.drain()["teacher_worker/total_attempted"] == PROBLEMS * SAMPLES, "a rejection of what it says"
    kept = (tmp_path / "replies.jsonl").read_text()
    assert SECRET not in kept and "Bearer [redacted]" in kept
