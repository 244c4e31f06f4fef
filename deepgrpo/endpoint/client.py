"""Client of an OpenAI-compatible chat endpoint, for the teacher and for judges.

One question is one `ask`: temperatures are tried in turn until a reply can be parsed; below that, failures of the endpoint are
retried by class (429 waits as told; 5xx, time-outs, transport errors and junk back off; other 4xx fail at once). A circuit
breaker, a token budget, and a cache of replies sit in front of the wire. Nothing queues behind a dead endpoint: the
caller is told.

A refused, cut or filtered request says nothing about its question unless others fare better: it counts as the question's own
fault only once another question, sent after it had failed first, was answered. Until then the question is `Unavailable`. Each
kind of failure is logged once, in the endpoint's words, with the key that helps.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import ml_collections

from deepgrpo.endpoint import reply as replies
from deepgrpo.endpoint.cache import ReplyCache, request_key
from deepgrpo.endpoint.errors import EndpointError, Refused, TryAgain, Unavailable
from deepgrpo.endpoint.health import CLOSED, FAILURE, SUCCESS, UNKNOWN, Budget, Cost, Health
from deepgrpo.endpoint.reply import Payload

BACKOFF_BASE, BACKOFF_CAP, BACKOFF_JITTER = 0.5, 8.0, 0.2  # seconds
RETRIES = 6  # times a failed request is sent again, at the same temperature, before the caller is told
DEADLINE_SLACK = 1800.0  # seconds that retries and waiting may add to the time-out of one request
PERCENTILES = (50, 90, 99)
LATENCIES_KEPT = 1024  # newest replies that the latency percentiles are over
CHECK = "Reply with the single word: yes"  # the question of the check at the start

TRUE, FALSE, UNSET = {"1", "true", "yes", "y", "on"}, {"0", "false", "no", "n", "off"}, {"", "null", "none", "unset"}
JUDGE = {"temperatures": (0.0, 0.3, 0.7), "attempts": 3, "prices": (0.0, 0.0)}  # what its section leaves out
JUDGE_ROOM = 8192  # tokens of a judge's reply
TEACHER_ROOM, THINKING_ROOM = 4, 32  # times the student's context: an account of the mistake and the solution; thoughts, too

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
        name: str,
        section: ml_collections.ConfigDict,
        *,
        room: int = 0,
        cache: ReplyCache | None = None,
        strict_reference: bool = False,
        transport: Transport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          name: of the section, and first part of the metric names.
          section: teacher or judge of the configuration; its `attempts` are replies asked for one question, at the next of its
            `temperatures` each (after the last, the first); 0: one at each.
          room: tokens that a reply is limited to where there is a budget and `max_tokens` is 0.
          cache: replies are looked up in it and kept in it.
          strict_reference: every failure moves on to the next temperature, after a pause that follows the last one too.
          transport, sleep, clock: what reaches the wire and the time; tests bring their own.
        """
        self._section, self._name = section, name
        schedule = section.temperatures
        self._schedule = [schedule[i % len(schedule)] for i in range(section.attempts or len(schedule))]
        limited = bool(section.token_budget) and not strict_reference
        self.deadline, self.retries = section.timeout + DEADLINE_SLACK, 0 if strict_reference else RETRIES
        self._max_tokens = section.max_tokens or (room if limited else 0)
        self._strict = strict_reference
        self.extra_body = extra_body(section.enable_thinking)
        self.health = Health(name, section, clock)
        self._cache = cache
        self._transport, self._sleep, self._clock = transport, sleep, clock
        self._jitter = random.Random(name)
        self._lock = threading.Lock()  # counters are read by the training thread
        self._counts: collections.Counter[str] = collections.Counter()
        self._budget = Budget(self._counts, section)
        self._latencies: collections.deque[float] = collections.deque(maxlen=LATENCIES_KEPT)
        self._in_flight = 0
        self._quiet_until = -math.inf  # the endpoint asked for a longer silence than a question may wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None
        self._freed: asyncio.Event | None = None  # a request in flight has ended
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
        deadline_at = self._clock() + self.deadline
        text, lacks, whole = "", "", False
        for attempt, temperature in enumerate(self._schedule):
            request = self._request(prompt, temperature)
            try:
                payload = await self._reply(request, attempt, deadline_at)
            except EndpointError as error:
                if not self._strict:
                    raise self.health.say(error) from error.__cause__
            else:
                text = payload["text"].strip()
                if lacks := "" if self._strict else payload.get("lacks", ""):
                    continue
                whole = True
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
        if lacks and not whole:
            self._blame(prompt, lacks)
        return Reply(None, text, None, None)

    def _blame(self, prompt: str, lacks: str) -> None:
        """Returns, or raises `Refused` for what a filter holds back, if it is the question's own fault that no reply was whole.

        Raises:
          Unavailable: as far as is known, all questions may fare alike.
        """
        error = self.health.say(Unavailable(lacks, f"{self._section.base_url}: {WITHOUT_ANSWER[lacks]}", retryable=False))
        if not self.health.blames(prompt):
            raise error
        if lacks == "filtered":
            raise Refused(lacks, str(error))

    async def check(self, seconds: float) -> EndpointError | None:
        """Asks for one token at each temperature, as the run will ask; returns why it gets none."""
        self._bind()

        async def one(temperature: float) -> None:
            request = self._request(CHECK, temperature)
            for asked in (request | {"max_tokens": 1}, request):  # where one token is refused, the run's own limit decides
                body = ""
                try:
                    body = await self._transport(asked, seconds)
                    payload, _ = replies.read(body, asked)
                    if payload.get("lacks") == "filtered":
                        raise Unavailable("filtered", f"{self._section.base_url}: {WITHOUT_ANSWER['filtered']} {CHECK!r}")
                    return
                except Refused as error:
                    if "token" not in str(error) or asked is request:
                        raise
                except EndpointError:
                    raise
                except Exception as error:
                    raise self._junk(error, body) from error

        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(one(temperature) for temperature in dict.fromkeys(self._schedule)))
        except EndpointError as error:
            return error
        except TimeoutError:
            return Unavailable("timeout", f"{self._section.base_url}: no reply to a request for one token within {seconds:g} s")
        return None

    async def served(self, seconds: float) -> list[str] | None:
        """Names of the models that the endpoint lists; None where it gives no list."""
        self._bind()
        try:
            listed = json.loads(await self._transport.models(seconds))
            return [str(model["id"]) for model in (listed["data"] if isinstance(listed, dict) else listed)]
        except Exception:
            return None  # many endpoints have no such route: it is a hint, no condition

    async def aclose(self) -> None:
        """Closes the sockets of the running event loop. The client can be used again."""
        close = getattr(self._transport, "aclose", None)
        if close is not None:
            await close()

    def _bind(self) -> None:
        """Makes what belongs to an event loop in the running one: a restarted worker brings a new loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots, self._flights = loop, asyncio.Semaphore(self._section.max_concurrent), {}
            self._freed = asyncio.Event()
        if self._transport is None:
            from deepgrpo.endpoint.transport import OpenAITransport  # here: importing the SDK takes half a second

            # vLLM asks for no key, the SDK insists on one.
            self._transport = OpenAITransport(self._section.base_url, os.environ.get(self._section.api_key_env) or "EMPTY")

    def _request(self, prompt: str, temperature: float) -> dict[str, Any]:
        request = {"model": self._section.model, "messages": [{"role": "user", "content": prompt}], "temperature": temperature}
        if self._max_tokens:
            request["max_tokens"] = self._max_tokens
        if self.extra_body:
            request["extra_body"] = self.extra_body
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
            payload = self._cache.find(request, attempt)
            if payload.get("lacks") and not self._strict:  # the question is asked again: a new reply, in a place of its own
                return await self._reply(request, attempt + len(self._schedule), deadline_at)
            self._count("cache_hits")
            return payload
        with self._flight(key):
            self._refuse_over_budget()
            payload = self._cache.find(request, attempt)
            if payload is None:
                payload = await self._fetch(request, deadline_at)
                self._charge(payload)
                self._cache.add(request, attempt, payload)
            else:
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
        for tries in range(1, self.retries + 2):
            try:
                return await self._send(request, deadline_at)
            except Unavailable as error:
                if not error.retryable or tries > self.retries:
                    raise
                pause = self._backoff(tries) if error.retry_after is None else error.retry_after
                if pause >= self._remaining(deadline_at):
                    if error.retry_after is not None:
                        self._quiet_until = self._clock() + pause
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
            raise self._too_late(f"waited for one of {self._section.max_concurrent} request slots") from error
        try:
            reserved = await self._reserve(request, deadline_at)
            try:
                if not self.health.acquire():
                    self._count("breaker_refusals")
                    raise Unavailable("breaker_open", f"{self._section.base_url}: the circuit breaker is open", retryable=False)
                return await self._measured(request, min(self._section.timeout, self._remaining(deadline_at)))
            finally:
                self._budget.release(reserved)
                self._freed.set()
        finally:
            self._slots.release()

    async def _reserve(self, request: Mapping[str, Any], deadline_at: float) -> Cost:
        """Waits until the budget has room for what the request may cost, beside what is in flight."""
        most = Cost(replies.estimate(replies.prompt_text(request)), request.get("max_tokens", 0))
        while True:
            self._refuse_over_budget()  # here again: others may have spent it meanwhile
            if reserved := self._budget.reserve(most):
                return reserved
            self._freed.clear()
            try:
                async with asyncio.timeout(self._remaining(deadline_at)):
                    await self._freed.wait()
            except TimeoutError as error:
                raise self._too_late("waited for room in the budget") from error

    async def _measured(self, request: Mapping[str, Any], timeout: float) -> Payload:
        started, body = self._clock(), ""
        self._in_flight += 1
        this, verdict, failed = self.health.send(), UNKNOWN, None  # cancelled: nothing learned
        self._count("http_requests")
        try:
            body = await self._transport(request, timeout)
            payload = self._read(body, request)
            verdict = SUCCESS
            self.health.answered(this, whole="lacks" not in payload)
            return payload | {"latency": round(self._clock() - started, 6)}
        except EndpointError as error:
            failed, self.health.answering = error, False
            self._count(f"http_{error.kind}")
            if body or error.kind in ("timeout", "junk"):  # the endpoint has worked, and may want to be paid
                prompt = replies.estimate(replies.prompt_text(request))
                completion = min(replies.estimate(body), request.get("max_tokens", replies.MOST_TOKENS)) if body else 0
                self._budget.charge(Cost(prompt, completion), of_use=False)
            if error.kind == "rate_limit":
                raise  # "slow down" is a living endpoint's word
            if isinstance(error, Refused) and self.health.blames(request["messages"][-1]["content"]):
                verdict = SUCCESS
                raise
            verdict = FAILURE
            if isinstance(error, Refused):
                raise Unavailable(error.kind, str(error), retryable=False) from error
            raise
        finally:
            self._in_flight -= 1
            self.health.settle(verdict, failed)

    def _read(self, body: str, request: Mapping[str, Any]) -> Payload:
        """Returns what is kept of a response body.

        Raises:
          EndpointError: the body reports one; kind "junk": it cannot be read, for whatever reason.
        """
        try:
            payload, odd = replies.read(body, request)
        except EndpointError:
            raise
        except Exception as error:
            raise self._junk(error, body) from error
        for what in odd:
            self._count(what)
            if what in ODD:
                self.health.say_once(what, f"{self._section.base_url}: {ODD[what]}")
        return payload

    def _junk(self, error: Exception, body: str) -> Unavailable:
        what = f"not a chat completion ({type(error).__name__}: {str(error)[:200]}): {body[:200]!r}"
        return Unavailable("junk", f"{self._section.base_url}: {what}")

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
            "deadline", f"{self._section.base_url}: no reply within the deadline of {self.deadline:g} s; {what}", retryable=False
        )

    #### Cost

    def _refuse_over_budget(self) -> None:
        if self._budget.spent():
            self._count("budget_refusals")
            raise Unavailable("budget_exhausted", f"{self._budget}; nothing more is asked", retryable=False)

    def _charge(self, payload: Payload) -> None:
        with self._lock:
            self._counts["replies"] += 1
            self._budget.charge(Cost(payload["prompt_tokens"], payload["completion_tokens"]))
            self._latencies.append(payload["latency"])

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    #### Health, metrics, state

    def capacity(self) -> int:
        """Questions that may be asked now: none while the breaker is open or the budget spent, one to probe a half-open one."""
        if not self.health.ready() or self._budget.spent() or self._clock() < self._quiet_until:
            return 0
        return self._section.max_concurrent if self.health.state == CLOSED else 1

    def retry_in(self) -> float:
        """Seconds until `capacity` may rise from 0; inf once the budget is spent."""
        return math.inf if self._budget.spent() else max(self.health.retry_in(), self._quiet_until - self._clock())

    def metrics(self) -> dict[str, float]:
        """Cumulative counters and the present state. `http_*` count what went over the wire in fact; the others do not depend on
        whether a reply came from there or from the cache of an earlier process. Reading changes nothing."""
        with self._lock:
            counts, latencies = dict(self._counts), sorted(self._latencies)
        metrics = {name: float(counts.get(name, 0)) for name in COUNTERS}
        metrics |= {"money": self._budget.money(), "tokens": metrics["prompt_tokens"] + metrics["completion_tokens"]}
        metrics |= {"in_flight": float(self._in_flight), "available": float(self.health.answering and self.capacity() > 0)}
        metrics |= {"breaker_state": self.health.state, "breaker_opened": float(self.health.times_opened)}
        for percent in PERCENTILES if latencies else ():
            metrics[f"latency_p{percent}"] = latencies[math.ceil(percent / 100 * len(latencies)) - 1]
        return {f"{self._name}/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """Everything that outlives the process, JSON-serialisable."""
        with self._lock:
            return {"counts": dict(self._counts), "cache": None if self._cache is None else self._cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._counts.clear()
            self._counts.update(state["counts"])
            if self._cache is not None and state["cache"] is not None:
                self._cache.restore(state["cache"])


WITHOUT_ANSWER = {
    "cut": "a reply ended at a limit of tokens before its end",
    "filtered": "a filter, or the model, refused to answer",
    "empty": "a reply without content",
}
ODD = {
    "http_no_usage": "the numbers of tokens in `usage` are absent or impossible; they are estimated from the texts",
    "http_many_choices": "several choices came for one question; the first is read",
}
COUNTERS = (
    *("replies", "cache_hits", "unparsed", "tried_again", "prompt_tokens", "completion_tokens"),
    *("budget_refusals", "breaker_refusals", "deadlines"),
    *("http_requests", "http_retries", "http_rate_limit", "http_server", "http_timeout", "http_transport", "http_junk"),
    *("http_access", "http_refused", "http_no_usage", "http_many_choices", "http_cut", "http_filtered", "http_empty"),
    *("http_lost_prompt_tokens", "http_lost_completion_tokens"),
)


def open_client(config: ml_collections.ConfigDict, name: str, cache: ReplyCache | None = None) -> Client:
    """The client of the section `name`, teacher or judge: the same one for the check at the start and for the run."""
    room, section = JUDGE_ROOM, ml_collections.ConfigDict(JUDGE | config[name].to_dict())
    if name == "teacher":
        thinks = config.teacher.enable_thinking.strip().lower() not in FALSE
        room = config.rollout.max_model_len * (THINKING_ROOM if thinks else TEACHER_ROOM)
    return Client(name, section, room=room, cache=cache, strict_reference=config.strict_reference and name == "teacher")


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
