"""Client of an OpenAI-compatible chat endpoint, for the teacher and for judges.

One question is one `ask`: temperatures are tried in turn until a reply can be parsed; below that, failures of the endpoint are
retried by class (429 waits as told; 5xx, time-outs, transport errors and junk back off; other 4xx fail at once). A circuit
breaker, a token and money budget, and a cache of replies sit in front of the wire. Nothing queues behind a dead endpoint: the
caller is told.
"""

import asyncio
import collections
import contextlib
import dataclasses
import inspect
import json
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from deepgrpo.endpoint import breaker as breakers
from deepgrpo.endpoint.cache import ReplyCache, request_key
from deepgrpo.endpoint.errors import Refused, TryAgain, Unavailable

BACKOFF_BASE, BACKOFF_CAP, BACKOFF_JITTER = 0.5, 8.0, 0.2  # seconds
TRUE, FALSE, UNSET = {"1", "true", "yes", "y", "on"}, {"0", "false", "no", "n", "off"}, {"", "null", "none", "unset"}
PERCENTILES = (50, 90, 99)
LATENCIES_KEPT = 1024  # newest replies that the latency percentiles are over

Payload = dict[str, Any]  # text, prompt_tokens, completion_tokens, latency: what is kept of a reply
Transport = Callable[[Mapping[str, Any], float], Awaitable[str]]  # (request, timeout) -> body; raises Unavailable or Refused


@dataclasses.dataclass(frozen=True)
class Reply:
    """parsed: what the parser returned, None when no reply could be parsed. text: the last reply received, stripped, or ""."""

    parsed: Any
    text: str
    temperature: float | None
    latency: float | None


class Client:
    """One endpoint and what is known about its health and cost. Used from one event loop at a time; `metrics` from any thread."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key_env: str,
        temperatures: Sequence[float],
        attempts: int = 0,
        timeout: float = 1800.0,
        deadline: float = 3600.0,
        max_tokens: int = 0,
        max_concurrent: int = 32,
        token_budget: int = 0,
        money_budget: float = 0.0,
        prompt_price: float = 0.0,
        completion_price: float = 0.0,
        breaker_failures: int = 8,
        breaker_seconds: float = 30.0,
        retries: int = 6,
        extra_body: Mapping[str, Any] | None = None,
        cache: ReplyCache | None = None,
        strict_reference: bool = False,
        seed: int = 0,
        name: str = "teacher",
        transport: Transport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Keywords up to `breaker_seconds` are the keys of `config.teacher` (0 budgets: none; prices a million tokens).

        Args:
          attempts: replies asked for one question, at the next temperature each (after the last, the first); 0: one at each.
          retries: times a failed request is sent again before the caller is told (at the same temperature).
          extra_body: sent along with every request; see `extra_body`.
          cache: replies are looked up in it and kept in it.
          strict_reference: every failure moves on to the next temperature, after a pause that follows the last one too.
          seed: of the back-off's jitter (it changes when something is sent, never what).
          name: first part of the metric names.
          transport, sleep, clock: what reaches the wire and the time; tests bring their own.
        """
        if not temperatures or attempts < 0:
            raise ValueError(f"need a temperature and attempts >= 0, got {tuple(temperatures)} and {attempts}")
        self._base_url, self._model, self._api_key_env = base_url, model, api_key_env
        self._schedule = [temperatures[i % len(temperatures)] for i in range(attempts or len(temperatures))]
        self._timeout, self._deadline, self._max_tokens = timeout, deadline, max_tokens
        self._max_concurrent, self._retries, self._strict = max_concurrent, 0 if strict_reference else retries, strict_reference
        self._token_budget, self._money_budget = token_budget, money_budget
        self._prices = {"prompt_tokens": prompt_price / 1e6, "completion_tokens": completion_price / 1e6}
        self._extra_body = dict(extra_body) if extra_body else None
        self._breaker = breakers.CircuitBreaker(breaker_failures, breaker_seconds, clock)
        self._cache, self._name = cache, name
        self._transport, self._sleep, self._clock = transport, sleep, clock
        self._jitter = random.Random(seed)
        self._lock = threading.Lock()  # counters are read by the training thread
        self._counts: collections.Counter[str] = collections.Counter()
        self._latencies: collections.deque[float] = collections.deque(maxlen=LATENCIES_KEPT)
        self._in_flight = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None
        self._flights: dict[str, asyncio.Future] = {}  # requests being asked now, by key: an equal one waits for the same reply

    #### Asking

    async def ask(self, prompt: str, parse: Callable[[str], Any]) -> Reply:
        """Sends `prompt` as one user message until `parse(reply)` raises no ValueError or the schedule is used up.

        `parse` may be a coroutine function; it raises TryAgain for a reply that could be read but is of no use.

        Raises:
          Unavailable: the endpoint could not be reached, or must not be now; nothing is known about the question.
          Refused: the endpoint turns this very request down.
          ReplayMiss: replaying a run that never asked this.
        """
        self._bind()
        deadline_at = self._clock() + self._deadline
        text = ""
        for attempt, temperature in enumerate(self._schedule):
            request = self._request(prompt, temperature)
            try:
                payload = await self._reply(request, attempt, deadline_at)
            except (Unavailable, Refused):
                if not self._strict:
                    raise
            else:
                text = payload["text"].strip()
                try:
                    parsed = parse(text)
                    parsed = await parsed if inspect.isawaitable(parsed) else parsed
                    return Reply(parsed, text, temperature, payload["latency"])
                except TryAgain:
                    self._count("tried_again")
                except ValueError:
                    self._count("unparsed")
            if self._strict:
                await self._sleep(self._backoff(attempt + 1))
        return Reply(None, text, None, None)

    async def aclose(self) -> None:
        """Closes the sockets of the running event loop. The client can be used again."""
        close = getattr(self._transport, "aclose", None)
        if close is not None:
            await close()

    def _bind(self) -> None:
        """Makes what belongs to an event loop in the running one: a restarted worker brings a new loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots, self._flights = loop, asyncio.Semaphore(self._max_concurrent), {}
        if self._transport is None:
            from deepgrpo.endpoint.transport import OpenAITransport  # here: importing the SDK takes half a second

            # vLLM asks for no key, the SDK insists on one.
            self._transport = OpenAITransport(self._base_url, os.environ.get(self._api_key_env) or "EMPTY")

    def _request(self, prompt: str, temperature: float) -> dict[str, Any]:
        request = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "temperature": temperature}
        if self._max_tokens:
            request["max_tokens"] = self._max_tokens
        if self._extra_body:
            request["extra_body"] = self._extra_body
        return request

    #### One reply: cache, budget, retries

    async def _reply(self, request: Mapping[str, Any], attempt: int, deadline_at: float) -> Payload:
        if self._cache is None:
            payload = await self._fetch(request, deadline_at)
            self._charge(payload)
            return payload
        key = request_key(request, attempt)
        while key in self._flights:
            await asyncio.wait([self._flights[key]], timeout=self._remaining(deadline_at))
        if self._cache.charged(key):
            self._count("cache_hits")
            return self._cache.find(request, attempt)
        with self._flight(key):
            self._refuse_over_budget()
            payload = self._cache.find(request, attempt)
            if payload is None:
                payload = await self._fetch(request, deadline_at)
                self._cache.add(request, attempt, payload)
            self._charge(payload)
            return payload

    @contextlib.contextmanager
    def _flight(self, key: str) -> Iterator[None]:
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._flights[key]
            if not flight.done():
                flight.set_result(None)

    async def _fetch(self, request: Mapping[str, Any], deadline_at: float) -> Payload:
        for tries in range(1, self._retries + 2):
            try:
                return await self._send(request, deadline_at)
            except Unavailable as error:
                if not error.retryable or tries > self._retries:
                    raise
                pause = self._backoff(tries) if error.retry_after is None else error.retry_after
                if pause >= self._remaining(deadline_at):
                    raise self._too_late(f"the next try was due in {pause:.1f} s, after: {error}") from error
            self._count("http_retries")
            await self._sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _send(self, request: Mapping[str, Any], deadline_at: float) -> Payload:
        """One request on the wire, as far as breaker and free slots let it."""
        try:
            async with asyncio.timeout(self._remaining(deadline_at)):
                await self._slots.acquire()
        except TimeoutError as error:
            raise self._too_late(f"waited for one of {self._max_concurrent} request slots") from error
        try:
            self._refuse_over_budget()  # here again: others may have spent it while this one waited for its slot
            if not self._breaker.acquire():
                self._count("breaker_refusals")
                raise Unavailable("breaker_open", f"{self._base_url}: circuit breaker is {self._breaker.state}", retryable=False)
            return await self._measured(request, min(self._timeout, self._remaining(deadline_at)))
        finally:
            self._slots.release()

    async def _measured(self, request: Mapping[str, Any], timeout: float) -> Payload:
        started = self._clock()
        self._in_flight += 1
        self._count("http_requests")
        verdict = self._breaker.abandon  # cancelled: nothing learned
        try:
            payload = self._read(await self._transport(request, timeout), request)
            verdict = self._breaker.success
            return payload | {"latency": round(self._clock() - started, 6)}
        except Unavailable as error:
            self._count(f"http_{error.kind}")
            # "Slow down" is a living endpoint's word.
            verdict = self._breaker.abandon if error.kind == "rate_limit" else self._breaker.failure
            raise
        except Refused:
            self._count("http_refused")
            verdict = self._breaker.success
            raise
        finally:
            self._in_flight -= 1
            verdict()

    def _read(self, body: str, request: Mapping[str, Any]) -> Payload:
        """Returns what is kept of a response body. Without usage, tokens are estimated, so that a budget still ends.

        Raises:
          Unavailable: kind "junk", the body is not a chat completion (truncated, an error page, another schema).
        """
        try:
            response = json.loads(body)
            text = response["choices"][0]["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError(f"content is a {type(text).__name__}")
            if usage := response.get("usage"):
                tokens = {kind: int(usage[kind]) for kind in ("prompt_tokens", "completion_tokens")}
            else:
                self._count("http_no_usage")
                tokens = {"prompt_tokens": _estimate(json.dumps(request["messages"])), "completion_tokens": _estimate(text)}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            detail = f"{self._base_url}: not a chat completion ({type(error).__name__}: {error}): {body[:200]!r}"
            raise Unavailable("junk", detail) from error
        return {"text": text} | tokens

    def _backoff(self, k: int) -> float:
        """Seconds before the next try, after the k-th failure (k >= 1): min(cap, base * 2^(k-1)) + U(0, jitter)."""
        return min(BACKOFF_CAP, BACKOFF_BASE * 2.0 ** (k - 1)) + self._jitter.uniform(0.0, BACKOFF_JITTER)

    def _remaining(self, deadline_at: float) -> float:
        remaining = deadline_at - self._clock()
        if remaining <= 0:
            raise self._too_late("its time is used up")
        return remaining

    def _too_late(self, what: str) -> Unavailable:
        self._count("deadlines")
        return Unavailable(
            "deadline", f"{self._base_url}: no reply within the deadline of {self._deadline:g} s; {what}", retryable=False
        )

    #### Cost

    def _refuse_over_budget(self) -> None:
        if self._over_budget():
            self._count("budget_refusals")
            raise Unavailable("budget_exhausted", f"{self._name}: {self._spent()}; nothing more is asked", retryable=False)

    def _over_budget(self) -> bool:
        tokens = self._counts["prompt_tokens"] + self._counts["completion_tokens"]
        return bool(
            (self._token_budget and tokens >= self._token_budget) or (self._money_budget and self._money() >= self._money_budget)
        )

    def _money(self) -> float:
        return sum(self._counts[kind] * price for kind, price in self._prices.items())

    def _spent(self) -> str:
        tokens = self._counts["prompt_tokens"] + self._counts["completion_tokens"]
        return (
            f"spent {tokens} of {self._token_budget or 'any'} tokens, money {self._money():.4f} of {self._money_budget or 'any'}"
        )

    def _charge(self, payload: Payload) -> None:
        with self._lock:
            self._counts["replies"] += 1
            for kind in ("prompt_tokens", "completion_tokens"):
                self._counts[kind] += payload[kind]
            self._latencies.append(payload["latency"])

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    #### Health, metrics, state

    def capacity(self) -> int:
        """Questions that may be asked now: none while the breaker is open or the budget spent, one to probe a half-open one."""
        if not self._breaker.ready() or self._over_budget():
            return 0
        return self._max_concurrent if self._breaker.state == breakers.CLOSED else 1

    def retry_in(self) -> float:
        """Seconds until `capacity` may rise from 0; inf once the budget is spent."""
        return math.inf if self._over_budget() else self._breaker.retry_in()

    def metrics(self) -> dict[str, float]:
        """Cumulative counters and the present state. `http_*` count what went over the wire in fact; the others do not depend on
        whether a reply came from there or from the cache of an earlier process. Reading changes nothing."""
        with self._lock:
            counts, latencies = dict(self._counts), sorted(self._latencies)
        metrics = {name: float(counts.get(name, 0)) for name in COUNTERS}
        metrics |= {"money": self._money(), "tokens": metrics["prompt_tokens"] + metrics["completion_tokens"]}
        metrics |= {"in_flight": float(self._in_flight), "available": float(self.capacity() > 0)}
        metrics |= {"breaker_state": breakers.LEVELS[self._breaker.state], "breaker_opened": float(self._breaker.times_opened)}
        for percent in PERCENTILES if latencies else ():
            metrics[f"latency_p{percent}"] = latencies[math.ceil(percent / 100 * len(latencies)) - 1]
        return {f"{self._name}/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """Everything that outlives the process, JSON-serialisable."""
        with self._lock:
            return {"counts": dict(self._counts), "cache": None if self._cache is None else self._cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._counts = collections.Counter(state["counts"])
            if self._cache is not None and state["cache"] is not None:
                self._cache.restore(state["cache"])


COUNTERS = (
    *(
        "replies",
        "cache_hits",
        "unparsed",
        "tried_again",
        "prompt_tokens",
        "completion_tokens",
        "budget_refusals",
        "breaker_refusals",
        "deadlines",
    ),
    *("http_requests", "http_retries", "http_rate_limit", "http_server", "http_timeout", "http_transport", "http_junk"),
    *("http_access", "http_refused", "http_no_usage"),
)


def _estimate(text: str) -> int:
    """Tokens of a text, roughly and rather too many: one for three bytes."""
    return len(text.encode("utf-8", "replace")) // 3 + 1


def extra_body(enable_thinking: str, chat_template_kwargs: str = "") -> dict[str, Any] | None:
    """The `extra_body` that switches a served model's thinking.

    Args:
      enable_thinking: true | false (and their usual synonyms, any case) or unset ("", null, none).
      chat_template_kwargs: JSON object sent instead, if set.

    Raises:
      ValueError: neither a boolean nor unset, or not a JSON object.
    """
    if chat_template_kwargs.strip().lower() not in UNSET:
        kwargs = json.loads(chat_template_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"chat_template_kwargs must be a JSON object, got {chat_template_kwargs!r}")
        return {"chat_template_kwargs": kwargs}
    word = enable_thinking.strip().lower()
    if word in UNSET:
        return None
    if word not in TRUE | FALSE:
        raise ValueError(f"enable_thinking must be true, false or unset, got {enable_thinking!r}")
    return {"chat_template_kwargs": {"enable_thinking": word in TRUE}}
