"""The teacher's thread: takes failures from the curriculum, has them corrected, hands the results back.

Two ways to run. Asynchronous: corrections go on beside training, `max_concurrent` at a time, and `notify` wakes the thread when
there is work. Synchronous: nothing moves until `drain`, which has all pending failures corrected and hands the results back in
the order of dispatch, so that a run does not depend on timing.

No failure is lost, and none is counted as rejected without an answer. One whose annotation was cut short goes back into the pool.
One that was deferred (endpoint down, budget spent, no verdict, a crash) is held back alone, twice as long each time, while the
others go on; only after several in a row nothing is asked for as long as the client's breaker would stay open.
"""

import asyncio
import collections
import contextlib
import functools
import logging
import math
import pathlib
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_collections

from deepgrpo.curriculum.base import Curriculum, Failure
from deepgrpo.endpoint.cache import ReplayMiss, ReplyCache
from deepgrpo.endpoint.client import open_client
from deepgrpo.endpoint.health import FAILURES, SECONDS
from deepgrpo.environments.base import Environment
from deepgrpo.rewards.grade import missing_form
from deepgrpo.rewards.reward import Rubric
from deepgrpo.teacher import oracle
from deepgrpo.teacher.annotate import Annotator, Grader, Outcome
from deepgrpo.teacher.splice import Codec

STOP_SECONDS = 30.0  # that running corrections get at the end; what is left goes back to the pool
log = logging.getLogger(__name__)

EVERYTHING = 1 << 30  # more failures than a pool holds
LONGEST_HOLD = 4096  # pauses: most that one failure is held back
GRACE = 30.0  # seconds that the event loop may take beyond a deadline before it counts as dead
SHUTDOWN_SHARE = 0.8  # of a stop's timeout is left to running corrections; the rest is for cancelling them and closing sockets


class Annotates(Protocol):
    """What the worker needs of `deepgrpo.teacher.annotate.Annotator`."""

    async def annotate(self, failure: Failure, step: int) -> Outcome: ...
    def record(self, outcome: Outcome) -> None: ...
    def capacity(self) -> int: ...
    def retry_in(self) -> float: ...
    def metrics(self) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    async def aclose(self) -> None: ...


class _Held(NamedTuple):
    """A deferred failure, in flight for its pool. due: when it is asked again, by `TeacherWorker._now`."""

    due: float
    failure: Failure


class TeacherWorker:
    """Owns one daemon thread with one event loop. Set `step` to the trainer's step as it advances.

    Start it after the curriculum was restored: it takes work at once.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        annotator: Annotates,
        *,
        max_concurrent: int,
        synchronous: bool = False,
        patience: int = FAILURES,
        outage: float = SECONDS,
        pause: float = 1.0,
        strict_reference: bool = False,
    ):
        """
        Args:
          max_concurrent: corrections in flight, at most.
          synchronous: work only inside `drain`.
          patience: failures deferred in a row after which nothing is asked for `outage` seconds, then one failure as a probe: the
            rule of the client's circuit breaker.
          pause: seconds (synchronous: 1 step, whatever is given) that a failure is held back after its first deferral; it doubles
            with each further one. Also of the pause after a crash of the thread, up to `outage`.
          strict_reference: a crash of an annotation or of its report counts as a rejection; calls of retired states go on.
        """
        if max_concurrent < 1:
            raise ValueError(f"teacher.max_concurrent must be at least 1, got {max_concurrent}")
        self.step = 0
        self._curriculum, self._annotator = curriculum, annotator
        self._max_concurrent, self._synchronous = max_concurrent, synchronous
        self._patience, self._outage, self._pause, self._strict = patience, outage, pause, strict_reference
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._looping = threading.Event()  # the event loop takes calls
        self._stopping = threading.Event()
        self._stop_at = 0.0
        self._tasks: dict[asyncio.Task, Failure] = {}
        self._hold_until = 0.0  # loop time before which nothing is asked
        self._unanswered: set[Hashable] = set()  # deferred since the last answer
        self._outage_said = False  # in the log, since then
        self._deferrals: collections.Counter[Hashable] = collections.Counter()  # of each failure without an answer so far
        self._held: dict[Hashable, _Held] = {}
        self._fatal: BaseException | None = None
        self._counts: collections.Counter[str] = collections.Counter()

    #### From the training thread

    def start(self) -> None:
        """Starts the thread.

        Raises:
          RuntimeError: it runs already.
        """
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the teacher worker runs already; stop it first")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="teacher-worker", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Tells the thread that there may be work (or that it has to stop)."""
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with contextlib.suppress(RuntimeError):  # that loop has just ended; the next one looks for work first
                loop.call_soon_threadsafe(wake.set)

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """Takes no more work, lets running corrections finish for most of `timeout` seconds, puts the rest back into the pool.

        Returns:
          Whether the thread has ended within `timeout`.
        """
        if self._thread is None:
            return True
        self._stop_at = time.monotonic() + SHUTDOWN_SHARE * timeout
        self._stopping.set()
        self.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def drain(self, step: int, deadline: float) -> None:
        """Has every pending failure corrected and resolved, for at most about `deadline` seconds; what is not done by then goes
        back.

        Returns at once when the teacher is down.

        Raises:
          RuntimeError: the worker does not run.
          TimeoutError: its event loop does not answer.
          ReplayMiss: replaying a run that never asked this.
        """
        self.step = step
        if not self._looping.wait(min(deadline, GRACE)):
            raise RuntimeError("the teacher worker does not run: start() it before drain(), and look for its crash in the log")
        future = asyncio.run_coroutine_threadsafe(self._drain(step, deadline), self._loop)
        try:
            future.result(deadline + GRACE)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the teacher worker's event loop did not finish drain({step}) within {deadline:g} s") from None

    def serve(self, step: int, deadline: float, timer: Callable[[str], contextlib.AbstractContextManager]) -> None:
        """Between observing a step and its update: waits for its corrections if the worker is synchronous, else only wakes it.

        Raises what `drain` and `raise_if_failed` raise.
        """
        with timer("teacher_wait"):
            self.drain(step, deadline) if self._synchronous else self.notify()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raises what no retry can mend (a replay that misses a reply), if that has happened."""
        if self._fatal is not None:
            raise self._fatal

    def metrics(self) -> dict[str, float]:
        """Cumulative counters and present state, with the annotator's and the client's. Reading changes nothing."""
        counts = {name: float(self._counts[name]) for name in COUNTERS}
        rate = self._counts["total_succeeded"] / max(self._counts["total_attempted"], 1)
        alive = self._thread is not None and self._thread.is_alive()
        counts |= {"success_rate": rate, "alive": float(alive)}
        counts |= {"in_flight": float(len(self._tasks)), "held_back": float(len(self._held))}
        return {f"teacher_worker/{name}": value for name, value in counts.items()} | self._annotator.metrics()

    def state(self) -> dict[str, Any]:
        """Cumulative counters of worker, annotator and client, JSON-serialisable. Failures themselves are the curriculum's."""
        return {"counts": dict(self._counts), "annotator": self._annotator.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Before `start`."""
        self._counts = collections.Counter(state["counts"])
        self._annotator.restore(state["annotator"])

    #### The thread

    def _run(self) -> None:
        crashes = 0
        while True:
            try:
                asyncio.run(self._serve())
                return
            except Exception:
                self._counts["restarts"] += 1
                pause = min(self._outage, self._pause * 2.0 ** min(crashes, 30))
                crashes += 1
                log.exception("the teacher worker crashed; it restarts in %.1f s (restart %d)", pause, self._counts["restarts"])
            if self._stopping.wait(pause):
                return

    async def _serve(self) -> None:
        self._wake, self._tasks = asyncio.Event(), {}
        self._loop = asyncio.get_running_loop()
        self._looping.set()
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                if not self._synchronous:
                    self._withdraw()
                    self._launch()
                with contextlib.suppress(TimeoutError):
                    # Idle, it waits for `notify`, which owns this wait; held back or with the teacher down, until that is over.
                    await asyncio.wait_for(self._wake.wait(), self._next_look())
        finally:
            self._looping.clear()
            await self._wind_down()
            await self._annotator.aclose()

    def _next_look(self) -> float | None:
        """Seconds after which to look for work unasked; None: when woken."""
        if self._synchronous:
            return None
        now, waits = self._loop.time(), []
        if self._hold_until > now:
            return self._hold_until - now
        if len(self._tasks) < self._room():
            waits = [held.due - now for held in self._held.values()]
        elif not self._tasks:
            waits = [self._annotator.retry_in()]
        soonest = min(waits, default=math.inf)
        return None if math.isinf(soonest) else max(soonest, 0.05)

    def _room(self) -> int:
        """Corrections that may run now: none while the teacher is down, one while nobody knows whether it is back."""
        return min(1 if len(self._unanswered) >= self._patience else self._max_concurrent, self._annotator.capacity())

    def _launch(self) -> None:
        """Starts as many corrections as there is room and work for."""
        if self._fatal is not None or self._loop.time() < self._hold_until:
            return
        while len(self._tasks) < self._room():
            failures = self._due(1) or self._curriculum.dispatch(1, self.step)
            if not failures:
                return
            self._start(failures[0])

    def _start(self, failure: Failure) -> None:
        task = asyncio.create_task(self._outcome(failure))
        self._tasks[task] = failure
        task.add_done_callback(self._ended)  # not a `finally` of the task's own: one cancelled before its first step has none

    def _ended(self, task: asyncio.Task) -> None:
        self._wake.set()
        if (failure := self._tasks.pop(task, None)) is not None:
            self._settle(failure, None if task.cancelled() or task.exception() else task.result())

    def _withdraw(self) -> None:
        """Ends the calls whose answer nobody could use any more, such as those of states that were mastered meanwhile."""
        if self._strict:
            return
        for task, failure in list(self._tasks.items()):
            if not task.done() and self._curriculum.withdraw(failure):
                del self._tasks[task]
                task.cancel()
                self._forget(failure)
        for _, failure in list(self._held.values()):
            if self._curriculum.withdraw(failure):
                self._forget(failure)

    def _forget(self, failure: Failure) -> None:
        self._counts["withdrawn"] += 1
        self._held.pop(failure.failure_id, None)
        self._deferrals.pop(failure.failure_id, None)

    def _now(self) -> float:
        """What `pause` is counted in: seconds of the event loop; steps where nothing moves between two drains."""
        return float(self.step) if self._synchronous else self._loop.time()

    def _due(self, limit: int) -> list[Failure]:
        """Takes failures that were held back for long enough."""
        now = self._now()
        due = sorted((held for held in self._held.values() if held.due <= now), key=lambda held: held.due)[:limit]
        for _, failure in due:
            del self._held[failure.failure_id]
        return [failure for _, failure in due]

    async def _wind_down(self) -> None:
        """Ends running corrections: in time if stopping, at once after a crash. What has no answer goes back."""
        grace = self._stop_at - time.monotonic() if self._stopping.is_set() else 0.0
        if self._tasks and grace > 0:
            await asyncio.wait(self._tasks, timeout=grace)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held, self._held = list(self._held.values()), {}
        for _, failure in held:
            self._curriculum.requeue(failure)

    async def _drain(self, step: int, deadline: float) -> None:
        end = self._loop.time() + deadline
        self._unanswered.clear()
        self._withdraw()
        while self._fatal is None and len(self._unanswered) < self._patience and (capacity := self._annotator.capacity()):
            # A half-open breaker lets one request through; the others would only be refused.
            limit = 1 if capacity == 1 < self._max_concurrent else EVERYTHING
            failures = self._due(limit)
            failures += self._pending(limit - len(failures), step)
            if not failures or None in await self._outcomes(failures, end):
                break
        self.raise_if_failed()

    def _pending(self, limit: int, step: int) -> list[Failure]:
        """Dispatches up to `limit` failures; a curriculum may hand out only some at a time (one a tree)."""
        failures: list[Failure] = []
        while len(failures) < limit and (more := self._curriculum.dispatch(limit - len(failures), step)):
            failures += more
        return failures

    async def _outcomes(self, failures: Sequence[Failure], end: float) -> list[Outcome | None]:
        """Annotates all, `max_concurrent` at a time, and settles them in order; None for what was not done by loop time `end`."""
        slots = asyncio.Semaphore(self._max_concurrent)

        async def one(failure: Failure) -> Outcome:
            async with slots:
                return await self._outcome(failure)

        tasks = {asyncio.create_task(one(failure)): failure for failure in failures}
        self._tasks |= tasks
        try:
            await asyncio.wait(tasks, timeout=max(0.0, end - self._loop.time()))
        finally:  # also when cancelled: a failure is never left in flight
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            outcomes = [None if task.cancelled() else task.result() for task in tasks]
            for (task, failure), outcome in zip(tasks.items(), outcomes, strict=True):
                self._tasks.pop(task, None)
                self._settle(failure, outcome)
        return outcomes

    #### One failure

    async def _outcome(self, failure: Failure) -> Outcome:
        try:
            return await self._annotator.annotate(failure, self.step)
        except ReplayMiss as error:
            self._fatal = error
            log.error("%s", error)
            return Outcome("replay_miss", deferred=True)
        except Exception as error:
            then = "it counts as rejected" if self._strict else "it waits for another try"
            log.exception("annotating a failure of problem %d crashed (%s); %s", failure.problem.index, error, then)
            return Outcome("error", deferred=not self._strict)

    def _settle(self, failure: Failure, outcome: Outcome | None) -> None:
        """Reports to the curriculum, exactly once. None: cut short."""
        if outcome is None:
            self._counts["cut_short"] += 1
            self._curriculum.requeue(failure)
            return
        if outcome.deferred:
            self._annotator.record(outcome)
            self._hold_back(failure, outcome.reason)
            return
        try:
            self._curriculum.resolve(failure, outcome.correction, self.step)
        except Exception as error:
            self._counts["report_errors"] += 1
            log.exception("reporting a correction of problem %d crashed (%s)", failure.problem.index, error)
            if not self._strict:
                self._hold_back(failure, "report_error")
                return
            self._curriculum.resolve(failure, None, self.step)
        if self._outage_said:
            log.info("the teacher's work goes on")
        self._outage_said = False
        self._unanswered.clear()
        self._deferrals.pop(failure.failure_id, None)
        self._counts["total_attempted"] += 1
        self._counts["total_succeeded"] += outcome.correction is not None
        self._annotator.record(outcome)

    def _hold_back(self, failure: Failure, reason: str) -> None:
        """Keeps a failure that was not answered for a while; after several in a row, all of them."""
        self._counts["deferred"] += 1
        self._curriculum.rest(failure)
        self._deferrals[failure.failure_id] += 1
        pauses = min(2.0 ** (self._deferrals[failure.failure_id] - 1), LONGEST_HOLD)
        self._held[failure.failure_id] = _Held(self._now() + pauses * (1.0 if self._synchronous else self._pause), failure)
        self._unanswered.add(failure.failure_id)
        if len(self._unanswered) < self._patience:
            return
        self._hold_until = self._loop.time() + self._outage
        if not self._outage_said:
            self._outage_said = True
            log.warning(
                "%d failures in a row brought no answer of teacher or grader (the last one: %s). They stay in the queue; "
                "%s is tried again",
                *(len(self._unanswered), reason),
                "in the next step some" if self._synchronous else f"every {self._outage:g} s one",
            )


COUNTERS = ("total_attempted", "total_succeeded", "deferred", "withdrawn", "cut_short", "report_errors", "restarts")


class NoTeacher:
    """Stands in for a worker in a run without a teacher, with the methods that the training loop calls."""

    step = 0

    def start(self) -> None:
        pass

    def serve(self, step: int, deadline: float, timer: Any) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def stop(self) -> bool:
        return True


def open_teacher(
    config: ml_collections.ConfigDict,
    stack: contextlib.ExitStack,
    *,
    curriculum: Curriculum,
    grader: Grader,
    tokenizer: Any,
    stop_ids: Sequence[int],
    folder: pathlib.Path,
    environments: Mapping[str, Environment],
) -> TeacherWorker:
    """Returns the worker, not yet started; what it needs is closed with `stack`.

    Args:
      config: the whole configuration. tokenizer: an instance that nothing else uses. folder: of the replies' cache.
      environments: of the students, by name; a correction is played in them.
    """
    teacher = config.teacher
    if teacher.base_url == "oracle":  # also when replaying, where nobody asks it: a request's key must stay the same
        rule = {"error_rate": teacher.oracle_error_rate, "seed": config.seed}
        served = stack.enter_context(oracle.Oracle(teacher.oracle, **rule))
        config = config.copy_and_resolve_references()
        config.teacher.base_url, config.teacher.model = served.base_url, oracle.MODEL
    client = open_client(config, "teacher", stack.enter_context(contextlib.closing(ReplyCache(folder, teacher.replay))))
    form = functools.partial(missing_form, rubric=Rubric.from_config(config.rewards))
    annotator = Annotator(config, client, grader, Codec(tokenizer), stop_ids, form=form, environments=environments)
    settings = {"max_concurrent": teacher.max_concurrent, "synchronous": teacher.synchronous}
    return TeacherWorker(curriculum, annotator, **settings, strict_reference=config.strict_reference)
