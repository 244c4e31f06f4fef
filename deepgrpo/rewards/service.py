"""The grading service: killable worker processes, a deadline an answer, three outcomes.

An answer has two attempts of half the deadline each, the second on a fresh worker:

    verdict in time                                           -> that verdict
    time used up twice, with the CPU at work                  -> the answer's own doing: wrong, reason "timeout"
    time used up twice, hardly any CPU (a busy host)          -> no verdict, reason "timeout"
    worker died twice (killed, crashed)                       -> no verdict, reason "crash"
    the grader raised                                         -> no verdict, reason "error"; logged with its traceback

A runaway in Python code is stopped by the worker's own CPU limit and is wrong at once. One thread a worker owns its process: it
hands out one answer, waits at most half a deadline, kills and replaces. Graders that wait for others have workers of their own,
so that they don't hold up arithmetic, and deadlines of their own; judges and programs are `external.ExternalGrading`'s business,
to which the service hands their answers on. Verdicts are the same from any thread, from asyncio
(`asyncio.wrap_future(service.submit(answer))`) and from pools, since no grader ever runs in the caller.
"""

import collections
import dataclasses
import json
import logging
import multiprocessing
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import check_sources, external_sources, grader_of
from deepgrpo.rewards.rubric import DEFAULT, Rubric
from deepgrpo.types import Grade

if TYPE_CHECKING:
    from deepgrpo.rewards.external import ExternalGrading

WORKER = "deepgrpo.rewards.worker"  # the module that a worker process runs
MATHEMATICS = ("GSM8K", "MATH")  # what workers get ready for where nobody says what will come
START_SECONDS = 120.0  # for a worker to import its graders, on a busy host
RECYCLE = 5000  # answers after which a worker is replaced, against slow leaks
CPU_SHARE = 0.4  # of an attempt's time: the CPU seconds after which a worker itself gives up (an ordinary answer takes 0.001)
BUSY_SHARE = 0.25  # a worker killed with less CPU than this share of its time was starved, not stuck

log = logging.getLogger(__name__)


class GradingService:
    """Grades answers in `workers` processes.

    Args:
      workers: processes, >= 1. deadline: seconds an answer, > 0, for sources that have none of their own.
      sources: data sources that will come, so that workers import what those need before they start; empty: mathematics.
      rubric: how they are graded. waiting_workers: further processes, >= 1, only if a source's grader waits for others.
      external: grades the sources that a judge or a program marks, within `external_deadline` seconds an answer; the caller opens
        and closes it (`setup.open_grading`).

    Raises:
      ValueError: impossible arguments, an unknown source, or an external one without `external`.
      RuntimeError: a worker did not start; holds what it wrote.
    """

    def __init__(
        self,
        workers: int,
        deadline: float,
        sources: Collection[str] = (),
        rubric: Rubric = DEFAULT,
        waiting_workers: int = 8,
        external: "ExternalGrading | None" = None,
        external_deadline: float = 0.0,
    ):
        if workers < 1 or waiting_workers < 1 or not deadline > 0:
            raise ValueError(
                "rewards.workers and rewards.waiting_workers must be >= 1 and rewards.deadline > 0 s, "
                f"got {workers}, {waiting_workers} and {deadline}"
            )
        check_sources(sources, rubric)
        outside = external_sources(sources, rubric)
        if outside and external is None:
            raise ValueError(
                f"{', '.join(sorted(outside))}: marked by a judge or by running code, and nothing is set up for that. "
                "Open the service by deepgrpo.rewards.setup.open_grading"
            )
        sources = set(sources) - outside
        self._deadline, self._rubric, self._external = deadline, rubric, external
        waiting = {source for source in sources if grader_of(source, rubric).waits}
        self.deadline = max(
            [deadline, external_deadline, *(grader_of(source, rubric).seconds or 0.0 for source in sources)]
        )  # the longest, in s
        self._lock = threading.Lock()
        self._counters: collections.Counter[str] = collections.Counter()
        self._closed = False
        self._closing, self._close_signal = multiprocessing.Pipe(duplex=False)  # readable once the service closes
        direct = _Lane(tuple(sorted(sources - waiting)) or (() if waiting or outside else MATHEMATICS))
        self._lanes = {True: _Lane(tuple(sorted(waiting))) if waiting else direct, False: direct}
        lanes = [direct] * workers + [self._lanes[True]] * (waiting_workers if waiting else 0)
        started = [Future() for _ in lanes]
        self._threads = [
            threading.Thread(target=self._run, args=task, name="grading", daemon=True)
            for task in zip(lanes, started, strict=True)
        ]
        self._ends = lanes
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                future.result(timeout=START_SECONDS + 5)
        except BaseException:
            self.close()
            raise

    def submit(self, answer: Answer) -> "Future[Grade]":
        """Queues an answer. The future never holds an exception but for a service that can't start workers any more.

        Raises:
          ValueError: unknown data source. RuntimeError: the service is closed.
        """
        check_sources([answer.data_source], self._rubric)
        grader = grader_of(answer.data_source, self._rubric)
        future: Future[Grade] = Future()
        if not grader.external:
            self._put(self._lanes[grader.waits], (answer, future, None))
            return future
        if self._external is None:
            raise ValueError(f"data_source {answer.data_source!r} is marked outside, and was not announced")
        task = self._external.submit(answer)
        if self._rubric.weight == 1.0 and not self._rubric.extra:
            return task
        task.add_done_callback(lambda done: self._weigh(answer, done, future))
        return future

    def _put(self, lane: "_Lane", task: tuple[Answer, Future, Grade | None]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the grading service is closed")
            lane.queue.put(task)

    def _weigh(self, answer: Answer, task: "Future[Grade]", future: "Future[Grade]") -> None:
        """Has a worker add the further rewards to a grade from outside."""
        try:
            self._put(self._lanes[False], (answer, future, task.result()))
        except BaseException as error:  # of the task (a cancellation among them), or the service is closed
            future.set_exception(error)

    def metrics(self) -> dict[str, float]:
        """Cumulative counters: answers, no verdicts, worker replacements, and one counter a reason."""
        with self._lock:
            counts = {f"grading/{name}": float(count) for name, count in sorted(self._counters.items())}
        outside = self._external.metrics() if self._external else {}
        return counts | {name: value + counts.get(name, 0.0) for name, value in outside.items()}

    def state(self) -> dict:
        """What must outlive the process, JSON-serialisable: what judges were asked and cost."""
        return self._external.state() if self._external else {}

    def restore(self, state: dict) -> None:
        if self._external and state:
            self._external.restore(state)

    def close(self) -> None:
        """Cancels what is queued, waits for the answers in work (at most rewards.deadline), ends the workers; idempotent.

        Answers whose source has a deadline of its own are not waited for: they have no verdict, reason "closed".
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_signal.send_bytes(b"closed")
                for lane in self._ends:
                    lane.queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "GradingService":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, lane: "_Lane", started: Future) -> None:
        """A thread's life: one worker, replaced whenever it is killed, dies or has served its time."""
        worker = None
        try:
            worker = _Worker(lane.sources, self._rubric)
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)
            return
        while (task := lane.queue.get()) is not None:
            answer, future, known = task
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                grade, worker = self._grade(answer, known, worker)
                future.set_result(grade)
            except Exception as error:  # no worker can be started; whoever waits must learn it
                future.set_exception(error)
        worker.stop()

    def _grade(self, answer: Answer, known: Grade | None, worker: "_Worker") -> "tuple[Grade, _Worker]":
        own = grader_of(answer.data_source, self._rubric).seconds
        seconds, closing = (own or self._deadline) / 2, self._closing if own else None
        for attempt in range(2):
            if not worker.alive or worker.served >= RECYCLE:
                worker = self._replaced(worker)
            outcome = worker.grade(answer, known, seconds, closing)
            if isinstance(outcome, Grade) or outcome == "closed":
                break
            self._count(f"killed/{outcome}" if outcome != "crash" else "worker_deaths")
            worker = self._replaced(worker)
            log.warning("grading %s: %s, attempt %d of 2", answer.data_source, outcome, attempt + 1)
        if outcome == "stuck":
            outcome = Grade(0.0, False, "timeout")
        elif not isinstance(outcome, Grade):
            outcome = Grade(None, False, {"starved": "timeout"}.get(outcome, outcome))
        self._count("answers", f"reason/{outcome.reason}", *(["no_verdict"] if outcome.reward is None else []))
        return outcome, worker

    def _replaced(self, worker: "_Worker") -> "_Worker":
        worker.stop()
        self._count("workers_started")
        return _Worker(worker.sources, self._rubric)

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counters.update(names)


@dataclasses.dataclass(frozen=True)
class _Lane:
    """A queue and the sources that its workers are ready for. It holds a step's rollouts at most."""

    sources: tuple[str, ...]
    queue: "queue.SimpleQueue[tuple[Answer, Future, Grade | None] | None]" = dataclasses.field(default_factory=queue.SimpleQueue)


class _Worker:
    """One worker process. Used by the one thread that made it: on Linux the process dies with that thread."""

    def __init__(self, sources: tuple[str, ...], rubric: Rubric):
        self.sources = sources
        self.connection, theirs = multiprocessing.Pipe()
        root = str(pathlib.Path(__file__).resolve().parents[2])
        paths = dict.fromkeys([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])  # a user's graders, too
        settings = {"parent": os.getpid(), "sources": sources, "rubric": dataclasses.asdict(rubric)}
        command = [sys.executable, "-m", WORKER, str(theirs.fileno()), json.dumps(settings)]
        with tempfile.TemporaryFile() as errors, theirs:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # a group of its own: what a grader has started ends with it
            )
            theirs.close()
            self.served = 0
            if not (self.connection.poll(START_SECONDS) and _received(self.connection) == b"ready"):
                self.stop()
                errors.seek(0)
                written = errors.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"a grading worker did not start within {START_SECONDS:g} s; it wrote: {written or 'nothing'}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def grade(self, answer: Answer, known: Grade | None, seconds: float, closing: Connection | None) -> Grade | str:
        """The grade, or what went wrong: "crash", "stuck" (a full CPU all the time), "starved" or "closed" (by `closing`)."""
        self.served += 1
        before = _cpu_seconds(self.process.pid)
        try:
            task = None if known is None else dataclasses.asdict(known)
            message = {"answer": dataclasses.asdict(answer), "task": task, "cpu_seconds": CPU_SHARE * seconds}
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return "crash"
        ready = wait([self.connection, *([closing] if closing else [])], seconds)
        if closing in ready and self.connection not in ready:
            return "closed"
        if not ready:
            return "stuck" if _cpu_seconds(self.process.pid) - before >= BUSY_SHARE * seconds else "starved"
        reply = _received(self.connection)
        if reply is None:
            return "crash"
        fields = json.loads(reply)
        if "error" in fields:
            log.error("the grader of %s failed:\n%s", answer.data_source, fields["error"])
            return Grade(None, False, "error")
        return Grade(**{**fields, "parts": tuple((name, value) for name, value in fields["parts"])})

    def stop(self) -> None:
        """Ends the process at once and reaps it."""
        self.connection.close()
        if self.alive:  # not yet reaped, so the group's number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _received(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None


def _cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used; infinite where the system doesn't say: an overrun is then the answer's own doing."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
