"""Whatever a judge's endpoint does: no verdict, never a label; the same client, the same words."""

import asyncio
import contextlib
import functools
import logging

import ml_collections
import pytest

from configs import common
from deepgrpo.endpoint import client as client_lib
from deepgrpo.endpoint import transport
from deepgrpo.endpoint.client import Client
from deepgrpo.rewards.agents import external, judges
from deepgrpo.rewards.answer import Answer
from tests.faults.behaviours import COMMON, SECRET, choice
from tests.faults.scripted_endpoint import Behaviour, Endpoint

WORTH = "<Analyze></Analyze><Answer>42</Answer>"


async def soon(seconds: float) -> None:
    await asyncio.sleep(seconds / 1000)


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """Grades four answers with the judge of a configuration whose endpoint behaves so; returns the grades and the metrics."""
    monkeypatch.setattr(client_lib, "Client", functools.partial(Client, sleep=soon))
    monkeypatch.setattr(transport, "BODY_LIMIT", 1 << 20)  # so that what has no end costs little
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    def grades(behave: Behaviour, **keys):
        config = common.get_config()
        with Endpoint(behave) as endpoint, contextlib.ExitStack() as stack:
            config.judge.update(ml_collections.ConfigDict({"base_url": endpoint.base_url, "model": "m", **keys}))
            judge = judges.open_judge(config, stack, tmp_path / str(len(list(tmp_path.iterdir()))))
            with external.ExternalGrading(["datatask"], judge=judge) as grading:
                answers = [Answer("datatask", f"What is {i}?", "", WORTH, "stop", "42", {}) for i in range(4)]
                return [future.result(60) for future in [grading.submit(answer) for answer in answers]], grading.metrics()

    return grades


# The client is the teacher's, on which all faults are tried (test_endpoints.py): of each kind the first.
KINDS = {counter: name for name, (_, counter, *_) in reversed(COMMON.items())}


@pytest.mark.parametrize("name", KINDS.values())
def test_a_fault_of_all_requests_is_no_verdict_and_is_said_once(graded, caplog, name):
    behave, counter, says, _ = COMMON[name]
    # What a message says of the teacher's keys it says of the judge's.
    grades, metrics = graded(behave, timeout=0.3 if counter == "http_timeout" else 60.0)
    assert all(grade.reward is None and grade.reason.startswith("judge_") for grade in grades)
    assert metrics[f"judge/{counter}"] > 0 and metrics["judge/available"] == 0 and metrics["judge/no_verdict"] == 4
    said = [record.getMessage() for record in caplog.records if record.name.startswith("deepgrpo.endpoint")]
    assert any(says.replace("teacher.", "judge.") in text for text in said) and len(set(said)) == len(said) <= 2, said
    assert not any(SECRET in record.getMessage() for record in caplog.records if record.levelno >= logging.INFO)


@pytest.mark.parametrize(
    "text, reward", [("Final Score: 1", 0.5), ("Final Score: 0", 0.0), ("Final Score: " + "9" * 400, None), ("Yes.", None)]
)
def test_a_verdict_is_what_a_whole_reply_says(graded, text, reward):
    message = {"role": "assistant", "content": text}
    assert [grade.reward for grade in graded(choice(message=message))[0]] == [reward] * 4
    cut, _ = graded(choice(message=message, finish_reason="length"))
    assert [grade.reward for grade in cut] == [None] * 4


def test_a_budget_is_kept_by_requests_in_flight(graded):
    message = {"role": "assistant", "content": "Final Score: 1"}
    _, metrics = graded(choice(message=message), token_budget=10)
    assert metrics["judge/http_requests"] == 1 and metrics["judge/no_verdict_budget_exhausted"] == 3
