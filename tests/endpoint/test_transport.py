"""The real HTTP client against a real server that fails as real ones do (with pauses compressed)."""

import asyncio
import random
import threading
import time

from deepgrpo.data import carry_chain
from deepgrpo.endpoint.errors import Unavailable
from deepgrpo.endpoint.transport import LONGEST_WAIT, retry_after
from deepgrpo.teacher.prompts import parse_solution, prefix_aware_prompt
from tests.endpoint.scripted import client, run
from tests.faults.behaviours import breaks_off, refuses, silent
from tests.faults.scripted_endpoint import Endpoint, right

QUESTIONS = [row["question"] for row in carry_chain.problems("train", 60)]
SOLUTIONS = [carry_chain.solution(question) for question in QUESTIONS]
TIMEOUT = 4.0  # seconds: half-open connections wait it out, and no healthy reply takes as long, also under load


async def soon(seconds: float) -> None:
    await asyncio.sleep(seconds / 500)


def client_of(endpoint, **settings):
    return client(endpoint.base_url, **{"temperatures": (0.3, 0.7), "timeout": TIMEOUT, "sleep": soon} | settings)


def ask(client, question=QUESTIONS[0]):
    return client.ask(prefix_aware_prompt(question, "", "no idea"), parse_solution)


async def asked_and_closed(client):
    results = await asyncio.gather(*(ask(client, question) for question in QUESTIONS), return_exceptions=True)
    await client.aclose()
    return results


def test_fault_programme():
    """30 % 429, 10 % 500, 5 % half-open, 5 % truncated: every question is answered, every failure counted in its class."""
    faults = {
        "rate_limit": refuses("slow down", 429, Retry_After="0"),
        "server": refuses("broken", 500),
        "timeout": silent,
        "junk": breaks_off,
        "": right,
    }
    script = random.Random(0).choices(list(faults), [30, 10, 5, 5, 50], k=1000)
    threads = threading.active_count()
    with Endpoint(lambda exchange: faults[script[exchange.ordinal]](exchange)) as endpoint:
        client = client_of(endpoint, max_concurrent=8, failures=20, retries=20)
        assert [result.parsed for result in asyncio.run(asked_and_closed(client))] == SOLUTIONS
        requests = len(endpoint.asked)
    metrics = client.metrics()
    for name in ("rate_limit", "server", "timeout", "junk"):
        assert metrics[f"teacher/http_{name}"] == script[:requests].count(name) > 0
    assert metrics["teacher/http_requests"] == requests == len(QUESTIONS) + metrics["teacher/http_retries"]
    assert metrics["teacher/in_flight"] == 0
    # A server thread reads from each connection until the client closes it: none may be left, nor any of the client's own.
    _until(lambda: threading.active_count() <= threads, "the client's connections and the threads to end")


def _until(condition, what, deadline=120.0):
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline} s for {what}"
        time.sleep(0.02)


def test_permanent_failures_are_not_retried():
    for status, kind in ((400, "refused"), (401, "access")):
        with Endpoint(refuses("a word of its own", status)) as endpoint:
            [error] = run(lambda: ask(client_of(endpoint)))
        assert isinstance(error, Unavailable) and error.kind == kind and "a word of its own" in str(error)
        assert len(endpoint.asked) == 1


def test_absent_endpoint_opens_the_breaker_and_its_return_closes_it():
    with Endpoint() as endpoint:
        pass
    client = client_of(endpoint, failures=3, seconds=0.05)
    [error] = run(lambda: ask(client))
    assert isinstance(error, Unavailable) and endpoint.base_url in str(error) and client.metrics()["teacher/breaker_opened"] == 1
    with Endpoint(port=endpoint.port):
        _until(lambda: client.capacity() == 1, "the breaker to half open")
        assert run(lambda: ask(client))[0].parsed == SOLUTIONS[0]  # in a new event loop, too
        assert client.capacity() == 32


def test_retry_after():
    assert retry_after({"retry-after": "3"}) == 3.0 and retry_after({"retry-after-ms": "250"}) == 0.25
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=40.0) == 60.0
    assert retry_after({"retry-after": "soon"}) is retry_after({}) is None
    assert retry_after({"retry-after": "-5"}) == 0.0 and retry_after({"retry-after": "nan"}) is None
    for absurd in ("1e300", "inf", "Fri, 31 Dec 9999 23:59:59 GMT"):
        assert retry_after({"retry-after": absurd}) == LONGEST_WAIT
