"""The teacher's thread: takes failures from the curriculum, has them corrected, hands the results back.

Two ways to run. Asynchronous: corrections go on beside training, `max_concurrent` at a time, and `notify` wakes the thread when
there is work. Synchronous: nothing moves until `drain`, which has all pending failures corrected and hands the results back in
the order of dispatch, so that a run does not depend on timing.

No failure is lost: one whose annotation was cut short or said nothing about it (endpoint down, budget spent, no verdict, thread
stopping) is put back with `requeue`.
"""

import asyncio
import collections
import contextlib
import logging
import math
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from deepgrpo.curriculum.base import Curriculum, Failure
from deepgrpo.endpoint.cache import ReplayMiss
from deepgrpo.teacher.annotate import Outcome

log = logging.getLogger(__name__)

EVERYTHING = 1 << 30  # more failures than a pool holds
PAUSE_CAP = 30.0  # seconds: longest pause after deferrals or crashes in a row
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
        max_deferrals: int = 3,
        pause: float = 1.0,
    ):
        """
        Args:
          max_concurrent: corrections in flight, at most.
          synchronous: work only inside `drain`.
          max_deferrals: a failure that is deferred more often, while others are answered in between, counts as failed.
          pause: seconds before the next try after a deferral or a crash; doubles while they go on.
        """
        if max_concurrent < 1:
            raise ValueError(f"teacher.max_concurrent must be at least 1, got {max_concurrent}")
        self.step = 0
        self._curriculum, self._annotator = curriculum, annotator
        self._max_concurrent, self._synchronous, self._max_deferrals = max_concurrent, synchronous, max_deferrals
        self._pause = pause
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._looping = threading.Event()  # the event loop takes calls
        self._stopping = threading.Event()
        self._stop_at = 0.0
        self._tasks: set[asyncio.Task] = set()
        self._hold_until = 0.0  # loop time before which nothing is dispatched
        self._deferred_in_a_row = 0
        self._answered = 0  # outcomes that said something, since the start
        self._deferrals: dict[Hashable, tuple[int, int]] = {}  # event -> (times deferred, `_answered` at the last time)
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

    def stop(self, timeout: float) -> bool:
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
        if not self._looping.wait(min(deadline, PAUSE_CAP + 5.0)):
            raise RuntimeError("the teacher worker does not run: start() it before drain(), and look for its crash in the log")
        future = asyncio.run_coroutine_threadsafe(self._drain(step, deadline), self._loop)
        try:
            future.result(deadline + PAUSE_CAP)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the teacher worker's event loop did not finish drain({step}) within {deadline:g} s") from None

    def raise_if_failed(self) -> None:
        """Raises what no retry can mend (a replay that misses a reply), if that has happened."""
        if self._fatal is not None:
            raise self._fatal

    def metrics(self) -> dict[str, float]:
        """Cumulative counters and present state, with the annotator's and the client's. Reading changes nothing."""
        counts = {name: float(self._counts[name]) for name in COUNTERS}
        rate = self._counts["total_succeeded"] / max(self._counts["total_attempted"], 1)
        alive = self._thread is not None and self._thread.is_alive()
        counts |= {"success_rate": rate, "alive": float(alive), "in_flight": float(len(self._tasks))}
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
                pause = min(PAUSE_CAP, self._pause * 2.0**crashes)
                crashes += 1
                log.exception("the teacher worker crashed; it restarts in %.1f s (restart %d)", pause, self._counts["restarts"])
            if self._stopping.wait(pause):
                return

    async def _serve(self) -> None:
        self._wake, self._tasks = asyncio.Event(), set()
        self._loop = asyncio.get_running_loop()
        self._looping.set()
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                if not self._synchronous:
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
        held = self._hold_until - self._loop.time()
        if held > 0:
            return held
        down = self._annotator.retry_in() if not self._tasks and not self._annotator.capacity() else math.inf
        return None if math.isinf(down) else max(down, 0.05)

    def _launch(self) -> None:
        """Starts as many corrections as there is room and work for."""
        if self._fatal is not None or self._loop.time() < self._hold_until:
            return
        while len(self._tasks) < min(self._max_concurrent, self._annotator.capacity()):
            failures = self._curriculum.dispatch(1, self.step)
            if not failures:
                return
            task = asyncio.create_task(self._correct(failures[0]))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _correct(self, failure: Failure) -> None:
        outcome = None
        try:
            outcome = await self._outcome(failure)
        finally:
            self._settle(failure, outcome)  # also when cancelled: a failure is never left in flight

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("a correction could not be reported", exc_info=task.exception())

    async def _wind_down(self) -> None:
        """Ends running corrections: in time if stopping, at once after a crash."""
        tasks = list(self._tasks)
        grace = self._stop_at - time.monotonic() if self._stopping.is_set() else 0.0
        if tasks and grace > 0:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, step: int, deadline: float) -> None:
        end = self._loop.time() + deadline
        while self._fatal is None and (capacity := self._annotator.capacity()):
            # A half-open breaker lets one request through; the others would only be refused.
            failures = self._pending(1 if capacity < self._max_concurrent and capacity == 1 else EVERYTHING, step)
            if not failures:
                return
            outcomes = await self._outcomes(failures, end)
            for failure, outcome in zip(failures, outcomes, strict=True):
                self._settle(failure, outcome)
            if any(outcome is None or outcome.deferred for outcome in outcomes):
                break
        self.raise_if_failed()

    def _pending(self, limit: int, step: int) -> list[Failure]:
        """Dispatches up to `limit` failures; a curriculum may hand out only some at a time (one a tree)."""
        failures: list[Failure] = []
        while len(failures) < limit and (more := self._curriculum.dispatch(limit - len(failures), step)):
            failures += more
        return failures

    async def _outcomes(self, failures: Sequence[Failure], end: float) -> list[Outcome | None]:
        """Annotates all, `max_concurrent` at a time; None for what was not done by loop time `end`."""
        slots = asyncio.Semaphore(self._max_concurrent)

        async def one(failure: Failure) -> Outcome:
            async with slots:
                return await self._outcome(failure)

        tasks = [asyncio.create_task(one(failure)) for failure in failures]
        self._tasks.update(tasks)
        try:
            await asyncio.wait(tasks, timeout=max(0.0, end - self._loop.time()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)
        return [None if task.cancelled() else task.result() for task in tasks]

    #### One failure

    async def _outcome(self, failure: Failure) -> Outcome:
        try:
            return await self._annotator.annotate(failure, self.step)
        except ReplayMiss as error:
            self._fatal = error
            log.error("%s", error)
            return Outcome("replay_miss", deferred=True)
        except Exception:
            log.exception("annotating a failure of problem %d crashed; it counts as rejected", failure.problem.index)
            return Outcome("error")

    def _settle(self, failure: Failure, outcome: Outcome | None) -> None:
        """Reports to the curriculum, exactly once. None: cut short."""
        if outcome is None:
            self._counts["cut_short"] += 1
            self._curriculum.requeue(failure)
            return
        if outcome.deferred and not self._gives_up(failure):
            self._counts["deferred"] += 1
            self._annotator.record(outcome)
            self._hold_back()
            self._curriculum.requeue(failure)
            return
        self._answered += not outcome.deferred
        self._deferred_in_a_row = 0
        self._deferrals.pop(failure.event, None)
        self._counts["given_up"] += outcome.deferred
        self._counts["total_attempted"] += 1
        self._counts["total_succeeded"] += outcome.correction is not None
        self._annotator.record(outcome)
        try:
            self._curriculum.resolve(failure, outcome.correction, self.step)
        except Exception:
            log.exception("reporting a correction of problem %d crashed; it is reported as failed", failure.problem.index)
            self._counts["report_errors"] += 1
            self._curriculum.resolve(failure, None, self.step)

    def _gives_up(self, failure: Failure) -> bool:
        """Whether a deferred failure has had its chances. In an outage nobody is answered, so nobody uses up chances."""
        times, answered = self._deferrals.get(failure.event, (0, -1))
        if answered < self._answered:
            times += 1
        self._deferrals[failure.event] = (times, self._answered)
        return times > self._max_deferrals

    def _hold_back(self) -> None:
        """A deferred failure is at the head of its queue again: do not ask for it again at once."""
        self._deferred_in_a_row += 1
        pause = min(PAUSE_CAP, self._pause * 2.0 ** min(self._deferred_in_a_row - 1, 16))
        self._hold_until = self._loop.time() + pause


COUNTERS = (*("total_attempted", "total_succeeded", "deferred", "given_up", "cut_short", "report_errors", "restarts"),)
