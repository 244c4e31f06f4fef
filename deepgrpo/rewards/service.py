"""The grading service: killable worker processes, a deadline an answer, three outcomes.

An answer has two attempts of half the deadline each, the second on a fresh worker:

    verdict in time                                           -> that verdict
    time used up twice, with the CPU at work                  -> the answer's own doing: wrong, reason "timeout"
    time used up twice, hardly any CPU (a busy host)          -> no verdict, reason "timeout"
    worker died twice (killed, crashed)                       -> no verdict, reason "crash"
    the grader raised                                         -> no verdict, reason "error"; logged with its traceback

A runaway in Python code is stopped by the worker's own CPU limit and is wrong at once. One thread a worker owns its process: it
hands out one answer, waits at most half a deadline, kills and replaces. Verdicts are the same from any thread, from asyncio
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
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection
from concurrent.futures import Future
from multiprocessing.connection import Connection

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import GRADERS, check_sources
from deepgrpo.rewards.math import grade as boxed
from deepgrpo.types import Grade

WORKER = "deepgrpo.rewards.worker"  # the module that a worker process runs
START_SECONDS = 120.0  # for a worker to import its graders, on a busy host
RECYCLE = 5000  # answers after which a worker is replaced, against slow leaks
CPU_SHARE = 0.4  # of an attempt's time: the CPU seconds after which a worker itself gives up (an ordinary answer takes 0.001)
BUSY_SHARE = 0.25  # a worker killed with less CPU than this share of its time was starved, not stuck

log = logging.getLogger(__name__)


class GradingService:
    """Grades answers in `workers` processes.

    Args:
      workers: processes, >= 1. deadline: seconds an answer, > 0.
      sources: data sources that will come, so that workers import what those need before they start; empty: any known source.

    Raises:
      ValueError: impossible arguments or an unknown source. RuntimeError: a worker did not start; holds what it wrote.
    """

    def __init__(self, workers: int, deadline: float, sources: Collection[str] = ()):
        if workers < 1 or not deadline > 0:
            raise ValueError(f"rewards.workers must be >= 1 and rewards.deadline > 0 s, got {workers} and {deadline}")
        check_sources(sources)
        self._attempt = deadline / 2
        self._warm = any(GRADERS[source] is boxed for source in sources or GRADERS)
        self._queue: queue.SimpleQueue[tuple[Answer, Future] | None] = queue.SimpleQueue()  # holds a step's rollouts at most
        self._lock = threading.Lock()
        self._counters: collections.Counter[str] = collections.Counter()
        self._closed = False
        started = [Future() for _ in range(workers)]
        self._threads = [threading.Thread(target=self._run, args=(f,), name="grading", daemon=True) for f in started]
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
        check_sources([answer.data_source])
        future: Future[Grade] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the grading service is closed")
            self._queue.put((answer, future))
        return future

    def metrics(self) -> dict[str, float]:
        """Cumulative counters: answers, no verdicts, worker replacements, and one counter a reason."""
        with self._lock:
            return {f"grading/{name}": float(count) for name, count in sorted(self._counters.items())}

    def close(self) -> None:
        """Cancels what is queued, waits for the answers in work (at most their deadline), ends the workers; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "GradingService":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, started: Future) -> None:
        """A thread's life: one worker, replaced whenever it is killed, dies or has served its time."""
        worker = None
        try:
            worker = _Worker(self._attempt, self._warm)
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)
            return
        while (task := self._queue.get()) is not None:
            answer, future = task
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                grade, worker = self._grade(answer, worker)
                future.set_result(grade)
            except Exception as error:  # no worker can be started; whoever waits must learn it
                future.set_exception(error)
        worker.stop()

    def _grade(self, answer: Answer, worker: "_Worker") -> "tuple[Grade, _Worker]":
        for attempt in range(2):
            if not worker.alive or worker.served >= RECYCLE:
                worker = self._replaced(worker)
            outcome = worker.grade(answer, self._attempt)
            if isinstance(outcome, Grade):
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
        return _Worker(self._attempt, self._warm)

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counters.update(names)


class _Worker:
    """One worker process. Used by the one thread that made it: on Linux the process dies with that thread."""

    def __init__(self, attempt: float, warm: bool):
        self.connection, theirs = multiprocessing.Pipe()
        root = str(pathlib.Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        cpu_seconds = str(CPU_SHARE * attempt)
        command = [sys.executable, "-m", WORKER, str(theirs.fileno()), str(os.getpid()), cpu_seconds]
        with tempfile.TemporaryFile() as errors, theirs:
            self.process = subprocess.Popen(
                [*command, "warm" if warm else "light"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
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

    def grade(self, answer: Answer, seconds: float) -> Grade | str:
        """The grade, or what went wrong: "crash", "stuck" (a full CPU all the time) or "starved"."""
        self.served += 1
        before = _cpu_seconds(self.process.pid)
        try:
            self.connection.send_bytes(json.dumps(dataclasses.asdict(answer)).encode())
        except OSError:
            return "crash"
        if not self.connection.poll(seconds):
            return "stuck" if _cpu_seconds(self.process.pid) - before >= BUSY_SHARE * seconds else "starved"
        reply = _received(self.connection)
        if reply is None:
            return "crash"
        fields = json.loads(reply)
        if "error" in fields:
            log.error("the grader of %s failed:\n%s", answer.data_source, fields["error"])
            return Grade(None, False, "error")
        return Grade(**fields)

    def stop(self) -> None:
        """Ends the process at once and reaps it."""
        self.connection.close()
        self.process.kill()
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
