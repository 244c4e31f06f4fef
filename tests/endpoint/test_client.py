"""Retries by class, temperatures, deadline, budget and breaker, on a scripted transport."""

import asyncio
import math

import pytest

from deepgrpo.endpoint.client import BACKOFF_JITTER, extra_body
from deepgrpo.endpoint.errors import Refused, Unavailable
from tests.endpoint.scripted import Scripted, completion, ok, run
from tests.teacher.fakes import teacher_cases

DOWN = Unavailable("transport", "no route")


def ask(scripted, prompt="q", **settings):
    return asyncio.run(scripted.client(**settings).ask(prompt, ok))


@pytest.mark.parametrize("args, result", teacher_cases("client_retry"))
def test_golden_client_retry(args, result):
    scripted = Scripted([DOWN if reply == "ERR" else completion(reply) for reply in args["replies"]])
    env = args["env"]
    reply = ask(
        scripted,
        temperatures=[t for t in args["temperature_schedule"] for _ in range(args["max_attempts_per_temperature"])],
        deadline=math.inf,
        extra_body=extra_body(env.get("TEACHER_ENABLE_THINKING", ""), env.get("TEACHER_CHAT_TEMPLATE_KWARGS", "")),
        strict_reference=True,
    )
    requests = [
        {
            "temperature": r["temperature"],
            "timeout": r["timeout"],
            "extra_body": r.get("extra_body"),
            "roles": [m["role"] for m in r["messages"]],
            "has_max_tokens": "max_tokens" in r,
        }
        for r in scripted.requests
    ]
    assert (reply.parsed, reply.text, requests) == (result["parsed"], result["last_reply"], result["requests"])
    assert len(scripted.pauses) == len(result["base_delays"])
    for pause, base in zip(scripted.pauses, result["base_delays"], strict=True):
        assert base <= pause <= base + BACKOFF_JITTER


def test_unparsed_replies_move_through_the_temperatures_without_a_pause():
    scripted = Scripted([completion("bad"), completion("ok")])
    reply = ask(scripted)
    assert (reply.parsed, reply.temperature, scripted.pauses) == ("OK", 0.7, [])
    assert ask(Scripted([completion("bad")])).parsed is None


def test_failures_are_retried_by_class():
    told = Unavailable("rate_limit", "slow down", retry_after=17.0)
    scripted = Scripted([told, Unavailable("server", "500"), "<html>", DOWN, completion("ok")])
    assert ask(scripted).parsed == "OK"
    assert scripted.pauses[0] == 17.0
    assert [round(p - 0.1) for p in scripted.pauses[1:]] == [1, 2, 4]
    assert {r["temperature"] for r in scripted.requests} == {0.3}, "an endpoint's failure does not use up a temperature"

    scripted = Scripted([Refused("refused", "too long")])
    with pytest.raises(Unavailable, match="too long"):
        ask(scripted)
    assert (len(scripted.requests), scripted.pauses) == (1, [])

    scripted = Scripted([Unavailable("access", "401", retryable=False)])
    with pytest.raises(Unavailable, match="401"):
        ask(scripted)
    assert len(scripted.requests) == 1

    scripted = Scripted([DOWN])
    with pytest.raises(Unavailable, match="no route"):
        ask(scripted, retries=2)
    assert (len(scripted.requests), len(scripted.pauses)) == (3, 2), "no pause after the last try"


def test_deadline_covers_tries_and_pauses():
    scripted = Scripted([DOWN], seconds=3.0)
    with pytest.raises(Unavailable, match="deadline of 10 s") as caught:
        ask(scripted, deadline=10.0)
    assert caught.value.kind == "deadline" and scripted.now <= 10.0
    assert scripted.requests[-1]["timeout"] <= 10.0 - 3.0
    with pytest.raises(Unavailable, match="deadline"):
        ask(Scripted([Unavailable("rate_limit", "", retry_after=3600.0)]), deadline=60.0)


def test_budget_is_exceeded_by_no_more_than_what_is_in_flight():
    scripted = Scripted([completion("ok", 10, 5)])
    client = scripted.client(token_budget=100, max_concurrent=4, prices=(2e6, 4e6))
    results = run(*(lambda i=i: client.ask(f"q{i}", ok) for i in range(40)))
    metrics = client.metrics()
    assert 100 <= metrics["teacher/tokens"] <= 100 + 4 * 15
    refused = [r for r in results if isinstance(r, Unavailable)]
    assert len(refused) == metrics["teacher/budget_refusals"] == 40 - metrics["teacher/replies"]
    assert {r.kind for r in refused} == {"budget_exhausted"}
    assert metrics["teacher/money"] == metrics["teacher/replies"] * (10 * 2 + 5 * 4)
    assert client.capacity() == 0 and math.isinf(client.retry_in())

    fresh = Scripted([completion("ok")]).client(token_budget=100)
    fresh.restore(client.state())
    assert fresh.capacity() == 0, "a resumed run has spent what it had spent"


def test_breaker_opens_probes_and_closes():
    scripted = Scripted([DOWN])
    client = scripted.client(failures=3, seconds=30.0, retries=0)
    for _ in range(3):
        run(lambda: client.ask("q", ok))
    assert client.metrics()["teacher/breaker_state"] == 1.0 and client.capacity() == 0
    [refused] = run(lambda: client.ask("q", ok))
    assert refused.kind == "breaker_open" and len(scripted.requests) == 3, "nothing is sent while it is open"

    scripted.now += client.retry_in()
    assert client.metrics()["teacher/breaker_state"] == 0.5 and client.capacity() == 1
    results = run(*(lambda: client.ask("q", ok) for _ in range(5)))
    assert sorted(r.kind for r in results) == ["breaker_open"] * 4 + ["transport"], "one probe; it failed"
    assert client.metrics()["teacher/breaker_opened"] == 2

    scripted.now += client.retry_in()
    scripted.replies = [completion("ok")]
    assert run(lambda: client.ask("q", ok))[0].parsed == "OK"
    assert client.metrics()["teacher/breaker_state"] == 0.0 and client.capacity() == 32


def test_rate_limits_do_not_open_the_breaker():
    scripted = Scripted([Unavailable("rate_limit", "", retry_after=1.0)])
    client = scripted.client(failures=2)
    run(lambda: client.ask("q", ok))
    assert client.metrics()["teacher/breaker_state"] == 0.0


def test_extra_body_words():
    assert extra_body("unset") is extra_body("NULL") is extra_body("") is None
    assert extra_body("On") == {"chat_template_kwargs": {"enable_thinking": True}}
    for word, kwargs in (("maybe", ""), ("", "[1]"), ("", "{")):
        with pytest.raises(ValueError):
            extra_body(word, kwargs)
