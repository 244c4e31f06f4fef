"""The real HTTP client against a real server that fails as real ones do (with pauses compressed)."""

import asyncio
import random
import threading
import time

import pytest

from deepgrpo.endpoint.errors import Unavailable
from deepgrpo.endpoint.transport import LONGEST_WAIT, retry_after
from deepgrpo.teacher.oracle import Oracle
from deepgrpo.teacher.prompts import parse_solution, prefix_aware_prompt
from tests.endpoint.scripted import client, run
from tests.teacher.faulty_oracle import FaultyOracle

TIMEOUT = 4.0  # seconds: half-open connections wait it out, and no healthy reply takes as long, also under load


async def soon(seconds: float) -> None:
    await asyncio.sleep(seconds / 500)


def client_of(oracle, **settings):
    settings = {"temperatures": (0.3, 0.7), "timeout": TIMEOUT, "sleep": soon} | settings
    return client(oracle.base_url, **settings)


def ask(client, question="2 + 3 = ?"):
    return client.ask(prefix_aware_prompt(question, "", "2 + 3 = 6"), parse_solution)


async def asked_and_closed(client, n):
    results = await asyncio.gather(*(ask(client, f"{i} + 3 = ?") for i in range(n)), return_exceptions=True)
    await client.aclose()
    return results


def test_fault_programme():
    """30 % 429, 10 % 500, 5 % half-open, 5 % truncated: every question is answered, every failure counted in its class."""
    draw = random.Random(0)
    script = [draw.choices(["429", "500", "half_open", "truncated", ""], [30, 10, 5, 5, 50])[0] for _ in range(1000)]
    threads = threading.active_count()
    with FaultyOracle("arithmetic", faults=script.__getitem__) as oracle:
        client = client_of(oracle, max_concurrent=8, failures=20, retries=20)
        results = asyncio.run(asked_and_closed(client, 60))
        assert [r.parsed for r in results] == [f"{i} + 3 = {i + 3}\n#### {i + 3}" for i in range(60)]
        seen = script[: oracle.requests]
        metrics = client.metrics()
        for fault, name in (("429", "rate_limit"), ("500", "server"), ("half_open", "timeout"), ("truncated", "junk")):
            assert metrics[f"teacher/http_{name}"] == seen.count(fault) > 0
        assert metrics["teacher/http_requests"] == oracle.requests == 60 + metrics["teacher/http_retries"]
        assert metrics["teacher/in_flight"] == 0
    # A server thread reads from each connection until the client closes it: none may be left, nor any of the client's own.
    _until(lambda: threading.active_count() <= threads, "the client's connections and the threads to end")


def _until(condition, what, deadline=120.0):
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline} s for {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["think", "echo", "fenced", "slow"])
def test_odd_replies_are_read(fault):
    with FaultyOracle("arithmetic", faults=lambda n: fault) as oracle:
        client = client_of(oracle, timeout=60.0)
        assert run(lambda: ask(client))[0].parsed == "2 + 3 = 5\n#### 5"


@pytest.mark.parametrize("fault", ["no_header", "empty"])
def test_unusable_replies_are_asked_again_at_the_next_temperature(fault):
    with FaultyOracle("arithmetic", faults=lambda n: fault if n == 0 else "") as oracle:
        client = client_of(oracle, timeout=60.0)
        [reply] = run(lambda: ask(client))
        assert (reply.parsed, reply.temperature) == ("2 + 3 = 5\n#### 5", 0.7)


def test_permanent_failures_are_not_retried():
    with FaultyOracle("arithmetic", faults=["400", "401"].__getitem__) as oracle:
        client = client_of(oracle)
        [refused] = run(lambda: ask(client))
        [denied] = run(lambda: ask(client))
        assert isinstance(refused, Unavailable) and refused.kind == "refused" and "scripted 400" in str(refused)
        assert isinstance(denied, Unavailable) and denied.kind == "access" and "scripted 401" in str(denied)
        assert oracle.requests == 2


def test_absent_endpoint_opens_the_breaker_and_its_return_closes_it():
    with Oracle("arithmetic") as oracle:
        port, url = int(oracle.base_url.split(":")[2].split("/")[0]), oracle.base_url
    client = client_of(oracle, failures=3, seconds=0.05)
    [error] = run(lambda: ask(client))
    assert isinstance(error, Unavailable) and url in str(error) and client.metrics()["teacher/breaker_opened"] == 1
    with Oracle("arithmetic", port=port):
        _until(lambda: client.capacity() == 1, "the breaker to half open")
        assert run(lambda: ask(client))[0].parsed == "2 + 3 = 5\n#### 5"  # in a new event loop, too
        assert client.capacity() == 32


def test_retry_after():
    assert retry_after({"retry-after": "3"}) == 3.0 and retry_after({"retry-after-ms": "250"}) == 0.25
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=40.0) == 60.0
    assert retry_after({"retry-after": "soon"}) is retry_after({}) is None
    assert retry_after({"retry-after": "-5"}) == 0.0 and retry_after({"retry-after": "nan"}) is None
    for absurd in ("1e300", "inf", "Fri, 31 Dec 9999 23:59:59 GMT"):
        assert retry_after({"retry-after": absurd}) == LONGEST_WAIT
