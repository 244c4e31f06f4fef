"""The vLLM rollout engine: token ids over HTTP to one or several servers, each holding the policy.

A request goes to one server with all its samples. Whatever goes wrong on the way (a connection that breaks, a server that dies or
hangs, an answer that was cut off) costs an attempt and never a sample: the request is sent again, to another server or to the
same one once it is back. What is returned is whole, and made by one version of the weights.

An answer may take as long as its tokens need. A server hangs when it makes no token any more although a request waits for it.

Python's `asyncio` does the waiting, in the caller's thread: so `on_done` runs there, too.
"""

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import httpx
import numpy as np

from deepgrpo.rollout.engine import BadAnswer, Feed, OnDone, Request, Sampling, check_ids
from deepgrpo.rollout.vllm_fleet import Fleet, Replica, Router, format_errors
from deepgrpo.rollout.vllm_http import GENERATE, SHOWN, VllmError, completions, generate_body, room, samples_asked
from deepgrpo.rollout.vllm_server import BLOCK_SIZE, VllmServerError
from deepgrpo.telemetry import waits
from deepgrpo.types import Completion, as_ids

MAX_CONCURRENT = 64  # requests in flight at one server, each with all samples of a prompt
ATTEMPTS = 4  # of one request, on whichever servers
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM refuses more, and takes anything between 0 and the first for it
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 15.0  # between two looks at how many tokens a server has made
KEEP_ALIVE_SECONDS = 3.0  # below the 5 s after which a server of default settings closes an idle connection

log = logging.getLogger(__name__)


class VllmEngine:
    """Implements `engine.Engine`. Weights reach it through `weights.publish.Publisher`, which shares its fleet.

    Args:
      num_real_ids, holes: ids that the servers may sample: below the first, which is the size of their vocabulary, but the holes.
      request_deadline: seconds without a token after which a server with requests hangs. clock, sleep: of these seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        num_real_ids: int,
        request_deadline: float,
        holes: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.fleet, self.num_real_ids, self.holes = fleet, num_real_ids, holes
        self.request_deadline = request_deadline
        self.clock, self.sleep = clock, sleep
        self._router = Router(BLOCK_SIZE)
        self._routed_version: int | None = None
        self._counters: collections.Counter[str] = collections.Counter()

    @property
    def version(self) -> int:
        """Of the weights that `generate` uses; waits for an update that is under way."""
        self.fleet.settle()
        return self.fleet.version

    def close(self) -> None:
        self.fleet.close()

    def metrics(self) -> Mapping[str, float]:
        """Cumulative counters since the engine's start, and the seconds of the last publication (`Publisher`)."""
        names = ("requests", "retries", "timeouts", "aborted", "incomplete", "stale", "transport", "server_errors", "refused")
        counted = {f"engine/{name}": float(self._counters[name]) for name in names}
        tokens = {f"engine/{name}": float(self._counters[name]) for name in ("prompt_tokens", "cached_tokens", "sampled_tokens")}
        restarts = sum(replica.server.restarts for replica in self.fleet.replicas)
        times = {f"timing_s/publish_{part}": seconds for part, seconds in dict(self.fleet.seconds).items()}
        return counted | tokens | times | {"engine/restarts": float(restarts), "engine/recoveries": float(self.fleet.reloads)}

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None, feed: Feed | None = None
    ) -> list[list[Completion]]:
        """Samples all requests; see `engine.Engine`.

        A request that a server refuses as malformed gives `abort` completions, which are neither graded nor trained; its
        message is logged. When all are refused, that is an error.

        Raises:
          ValueError: a request or a sampling parameter is out of range; names it.
          PublishError: the weights that were published last are not proven.
          VllmError: a request failed on every attempt, or no server comes back.
        """
        if sampling.temperature and not LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE:
            limits = f"vLLM takes 0 (greedy) or {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
            raise ValueError(f"temperature is {sampling.temperature}, {limits}")
        check_ids(requests, sampling, self.num_real_ids, self.holes)
        if self.version != self._routed_version:
            self._router.forget()
            self._routed_version = self.version
        return asyncio.run(_Call(self, requests, sampling, on_done, feed).run())


class _Call:
    """One call of `generate`: its requests, and what is known of the servers meanwhile."""

    def __init__(
        self, engine: VllmEngine, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None, feed: Feed | None
    ):
        self.engine, self.fleet, self.counters = engine, engine.fleet, engine._counters
        self.requests, self.sampling, self.on_done, self.feed = list(requests), sampling, on_done, feed
        self.version = self.fleet.version
        self.results: list[list[Completion]] = [[] for _ in requests]
        self.asked = 0  # requests that were sent, or will be
        self.in_flight: collections.Counter[Replica] = collections.Counter()  # requests
        self.attempts: dict[Replica, set[asyncio.Future]] = {replica: set() for replica in self.fleet.replicas}
        self.moved: dict[Replica, float] = {}  # when each server was last seen to work, by the engine's clock
        self.healing: dict[Replica, asyncio.Task] = {}
        self.lost: dict[Replica, Exception] = {}  # servers that did not come back
        self.refusals: list[str] = []
        self.changed = asyncio.Condition()

    async def run(self) -> list[list[Completion]]:
        connections = MAX_CONCURRENT * len(self.fleet.replicas)
        limits = httpx.Limits(max_connections=connections, keepalive_expiry=KEEP_ALIVE_SECONDS)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # `watch` decides how long an answer may take
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            watches = [asyncio.create_task(self.watch(replica)) for replica in self.fleet.replicas]
            try:
                with waits.on(self.described):
                    async with asyncio.TaskGroup() as tasks:
                        self.begin(client, tasks, range(len(self.requests)))
                        if self.feed:
                            tasks.create_task(self.admit(client, tasks))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            finally:
                if self.feed:
                    self.feed.close()  # a thread may wait for it
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, *self.healing.values(), return_exceptions=True)
        if self.asked and len(self.refusals) == self.asked:
            raise VllmError(f"every request was refused, for instance: {self.refusals[0]}")
        return self.results

    def begin(self, client: httpx.AsyncClient, tasks: asyncio.TaskGroup, numbers: Iterable[int]) -> None:
        """Sends requests, the shortest prompts first: they have longer to go, and the longest tail should not begin last."""
        for i in sorted(numbers, key=lambda i: len(self.requests[i].prompt_ids)):
            request = self.requests[i]
            if request.seeds and room(request, self.sampling) > 0:
                self.asked += 1
                tasks.create_task(self.serve(client, i))
            else:
                self.finish(i, [Completion(as_ids([]), np.zeros(0, np.float32), "length", self.version)] * len(request.seeds))

    async def admit(self, client: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> None:
        """Sends what becomes ready while others are answered, until nothing can come any more."""
        while further := await asyncio.to_thread(self.feed.take, True):
            check_ids(further, self.sampling, self.engine.num_real_ids, self.engine.holes)
            first = len(self.requests)
            self.requests += further
            self.results += [[] for _ in further]
            self.begin(client, tasks, range(first, len(self.requests)))

    async def serve(self, client: httpx.AsyncClient, i: int) -> None:
        """One request, until it is answered."""
        trouble = ""
        for attempt in range(ATTEMPTS):
            replica = await self.acquire(i)
            try:
                self.counters["retries" if attempt else "requests"] += 1
                found = await self.ask(client, replica, i)
            except _Failed as failure:
                trouble = f"{replica.name}: {failure}"
                self.counters[failure.kind] += 1
                log.warning("request %d, attempt %d of %d: %s: %s", i, attempt + 1, ATTEMPTS, failure.kind, trouble)
                self.distrust(replica, failure)
            else:
                self.finish(i, found)
                return
            finally:
                await self.release(replica, i)
        raise VllmError(f"request {i} failed {ATTEMPTS} times, at last: {trouble}")

    async def ask(self, client: httpx.AsyncClient, replica: Replica, i: int) -> list[Completion]:
        """One attempt.

        Raises:
          _Failed: no answer that may be used.
        """
        request, url = self.requests[i], replica.server.url + GENERATE
        body = generate_body(request, self.sampling, self.engine.holes, self.fleet.salt(self.version))
        headers = {"Authorization": f"Bearer {replica.server.token}"}
        if not self.attempts[replica]:
            self.moved[replica] = self.engine.clock()  # it had nothing to do until now
        post = asyncio.ensure_future(client.post(url, json=body, headers=headers))
        self.attempts[replica].add(post)
        try:
            await asyncio.wait({post})
        finally:
            self.attempts[replica].discard(post)
            post.cancel()
        if post.cancelled():  # by `watch`
            raise _Failed("timeouts", f"the server made no token for {self.engine.request_deadline:g} s", stands=True)
        try:
            response = post.result()
        except httpx.TransportError as error:
            raise _Failed("transport", f"{type(error).__name__}: {error}") from error
        if 400 <= response.status_code < 500 and response.status_code not in (401, 403, 404, 408, 429):
            return self.refuse(i, f"{url} answered {response.status_code}: {response.text[:SHOWN]}")
        if response.status_code != 200:
            raise _Failed("server_errors", f"answered {response.status_code}: {response.text[:SHOWN]}")
        try:
            answer = response.json()
            found = completions(answer, request, self.sampling, self.version, self.engine.num_real_ids, self.engine.holes)
            cached = int(answer["cached_tokens"])
        except BadAnswer as error:
            raise _Failed(error.kind, str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise _Failed("incomplete", f"an answer of another form ({error!r}): {response.text[:SHOWN]}") from error
        self.moved[replica] = self.engine.clock()
        self.counters["prompt_tokens"] += len(request.prompt_ids)
        self.counters["cached_tokens"] += cached
        self.counters["sampled_tokens"] += sum(len(c.ids) for c in found)
        return found

    def refuse(self, i: int, message: str) -> list[Completion]:
        """A request that no attempt will make valid: one bad row must not cost the batch."""
        self.counters["refused"] += 1
        self.refusals.append(message)
        log.error("request %d was refused, its samples are left out: %s", i, message)
        return [Completion(as_ids([]), np.zeros(0, np.float32), "abort", self.version)] * len(self.requests[i].seeds)

    def finish(self, i: int, found: list[Completion]) -> None:
        self.results[i] = found
        if self.on_done is not None:
            for j, completion in enumerate(found):
                self.on_done(i, j, completion)

    #### Servers

    async def watch(self, replica: Replica) -> None:
        """Gives up what a server was asked when it makes no token any more."""
        limit, seen = self.engine.request_deadline, None
        while True:
            await self.engine.sleep(min(LOOK_SECONDS, limit / 4))
            if not self.attempts[replica]:
                continue
            found = await asyncio.to_thread(self.fleet.progress, replica)
            if found is not None and found != seen:
                seen, self.moved[replica] = found, self.engine.clock()
            elif self.engine.clock() - self.moved[replica] > limit:
                for post in self.attempts[replica]:
                    post.cancel()

    def described(self) -> str:
        """What is not answered yet, for the watchdog's line."""
        now, left = self.engine.clock(), sum(self.in_flight.values())
        servers = [
            f"{n} at {r.name}, whose last token is {now - self.moved[r]:.0f} s old" for r, n in self.in_flight.items() if n
        ]
        servers += [f"{r.name} is being looked after" for r in list(self.healing)]
        return f"{left} requests in flight of {len(self.requests)} ({'; '.join(servers)})"

    async def acquire(self, i: int) -> Replica:
        """A server that is up and has a free place for request i."""
        request = self.requests[i]
        samples = samples_asked(request, self.sampling)
        async with self.changed:
            while True:
                if len(self.lost) == len(self.fleet.replicas):
                    raise VllmError(f"no vLLM server is left:\n{format_errors(self.lost)}")
                up = [r for r in self.fleet.replicas if r not in self.healing and r not in self.lost]
                free = [r for r in up if self.in_flight[r] < MAX_CONCURRENT]
                if free:
                    replica = self.engine._router.choose(request.prompt_ids, samples, free)
                    self.in_flight[replica] += 1
                    replica.generating += samples
                    return replica
                await self.changed.wait()  # for a release, or for a server's return; both notify

    async def release(self, replica: Replica, i: int) -> None:
        self.in_flight[replica] -= 1
        replica.generating -= samples_asked(self.requests[i], self.sampling)
        async with self.changed:
            self.changed.notify_all()

    def distrust(self, replica: Replica, failure: "_Failed") -> None:
        """Sends no further request there until the server was looked after, which happens once for all that failed."""
        if replica not in self.healing and replica not in self.lost:
            self.healing[replica] = asyncio.create_task(self.heal(replica, failure.stands))

    async def heal(self, replica: Replica, stands: bool) -> None:
        try:
            await asyncio.to_thread(self.fleet.heal, replica, stands)
        except (VllmError, VllmServerError, OSError) as error:
            log.error("%s does not come back: %s", replica.name, error)
            self.lost[replica] = error
        finally:
            del self.healing[replica]
            async with self.changed:
                self.changed.notify_all()


class _Failed(Exception):
    """An attempt that came to nothing. stands: the server made no token at all while it was waited for."""

    def __init__(self, kind: str, detail: str, stands: bool = False):
        super().__init__(detail)
        self.kind, self.stands = kind, stands
