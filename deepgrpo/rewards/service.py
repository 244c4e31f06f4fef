"""The grading service: killable worker processes, a deadline an answer, three outcomes.

An answer has two attempts of half the deadline each, the second on a fresh worker:

    verdict in time                                           -> that verdict
    time used up twice, with the CPU at work                  -> the answer's own doing: wrong, reason "timeout"
    time used up twice, hardly any CPU (a busy host)          -> no verdict, reason "timeout"
    worker died twice (killed, crashed)                       -> no verdict, reason "crash"
    the grader raised, or returned no usable grade            -> no verdict, reason "error"; logged with its traceback

Where a function of the user's takes part, being out of time is no verdict either, and an error's reason names the function; if it
fails on every answer of a step, `end_step` ends the run. A runaway in Python code is stopped by the worker's own CPU limit.

Each thread owns one worker process: it hands out one answer, waits at most half a deadline, kills, and takes the spare worker
that stands ready; the verdict is handed out before anything is cleaned up. Workers inherit neither the trainer's environment nor
its descriptors; without functions of the user's they have no network and can write no file, where the kernel allows such walls.
Graders that wait for others have workers of their own, so that they don't hold up arithmetic, and deadlines of their own; judges
and programs are `external.ExternalGrading`'s business, to which the service hands their answers on. Any thread, asyncio
(`asyncio.wrap_future(service.submit(answer))`) and pools may ask, since no grader ever runs in the caller.
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

from deepgrpo.config.errors import ConfigError
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import check_sources, external_sources, grader_of, user_functions
from deepgrpo.rewards.reward import DEFAULT, GraderFault, Rubric, checked
from deepgrpo.types import Grade

if TYPE_CHECKING:
    from deepgrpo.rewards.agents.external import ExternalGrading

WORKER = "deepgrpo.rewards.worker"  # the module that a worker process runs
MATHEMATICS = ("GSM8K", "MATH")  # what workers get ready for where nobody says what will come
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # a process of more threads can build no walls
KEPT = frozenset(  # environment variables that a worker inherits
    ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED") + ONE_THREAD
)
COMMON_CAUSE = 4  # answers without a verdict, and none with one, that show that a function of the user's is at fault
START_SECONDS = 120.0  # for a worker to import its graders, on a busy host
RECYCLE = 5000  # answers after which a worker is replaced, against slow leaks
CPU_SHARE = 0.4  # of an attempt's time: the CPU seconds after which a worker itself gives up (an ordinary answer takes 0.001)
BUSY_SHARE = 0.25  # a worker killed with less CPU than this share of its time was starved, not stuck

WAITING_WORKERS = 8  # more processes, for sources whose grader waits for a judge or a program
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
        waiting_workers: int = WAITING_WORKERS,
        external: "ExternalGrading | None" = None,
        external_deadline: float = 0.0,
    ):
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
        self._working: set[str] = set()  # functions of the user's that gave a verdict
        self._faults: dict[str, list[str]] = {}  # what went wrong with those that did not, by function
        self._closed = False
        self._closing, self._close_signal = multiprocessing.Pipe(duplex=False)  # readable once the service closes
        direct = _Lane(tuple(sorted(sources - waiting)) or (() if waiting or outside else MATHEMATICS), rubric)
        self._lanes = {True: _Lane(tuple(sorted(waiting)), rubric) if waiting else direct, False: direct}
        self._ends = [direct] * workers + [self._lanes[True]] * (waiting_workers if waiting else 0)
        self._threads: list[threading.Thread] = []
        try:
            for lane in [*self._ends, *set(self._ends)]:  # one each, and one to spare
                lane.ask_for_worker()
            for lane in self._ends:
                thread = threading.Thread(target=self._run, args=[lane, lane.first()], name="grading", daemon=True)
                thread.start()
                self._threads.append(thread)
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
        for lane in set(self._lanes.values()):
            lane.close()

    def __enter__(self) -> "GradingService":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, lane: "_Lane", worker: "_Worker | None") -> None:
        """A thread's life: one worker, replaced whenever it is killed, dies or has served its time."""
        while (task := lane.queue.get()) is not None:
            answer, future, known = task
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                self._count("unfinished")
                continue
            try:
                worker = self._grade(answer, known, future, lane, worker)
            except Exception as error:  # no worker can be started; whoever waits must learn it
                worker = None
                future.set_exception(error)
        if worker:
            worker.stop()

    def _grade(
        self, answer: Answer, known: Grade | None, future: Future, lane: "_Lane", worker: "_Worker | None"
    ) -> "_Worker | None":
        """Hands out the verdict on an answer; only then the worker that it may have cost is ended. Returns one that goes on."""
        own = grader_of(answer.data_source, self._rubric).seconds
        seconds, closing = (own or self._deadline) / 2, self._closing if own else None
        spent = []
        try:
            for attempt in range(2):
                if worker is None or not worker.alive or worker.served >= RECYCLE:
                    spent.append(worker)
                    worker = self._replacement(lane)
                outcome = worker.grade(answer, known, seconds, closing)
                if isinstance(outcome, Grade | GraderFault) or outcome == "closed":
                    break
                self._count(f"killed/{outcome}" if outcome != "crash" else "worker_deaths")
                log.warning("grading %s: %s, attempt %d of 2", answer.data_source, outcome, attempt + 1)
                spent.append(worker)
                worker = None
            grade = self._verdict(answer, outcome)
            self._count("answers", f"reason/{grade.reason}", *(["no_verdict"] if grade.reward is None else []))
            future.set_result(grade)
        finally:
            for one in filter(None, spent):
                one.stop()
        return worker

    def _verdict(self, answer: Answer, outcome: "Grade | GraderFault | str") -> Grade:
        """The grade that an outcome comes to. What functions of the user's did is kept for `end_step`."""
        mine = user_functions(answer.data_source, self._rubric)
        if isinstance(outcome, GraderFault):
            log.error("%s gave no verdict on an answer of %s:\n%s", outcome.function, answer.data_source, outcome.detail)
            name = outcome.function.rpartition(":")[2]
            grade, told = Grade(None, False, f"error_{name}" if mine else "error"), (outcome.function, outcome.detail)
        elif isinstance(outcome, str):
            doing = outcome == "stuck" and not mine  # the answer's own
            reason = {"starved": "timeout", "stuck": "timeout"}.get(outcome, outcome)
            what = "the call took too long" if reason == "timeout" else f"outcome of its process: {outcome}"
            grade, told = Grade(0.0 if doing else None, False, reason), (" or ".join(mine), what)
        else:
            grade, told = outcome, (" or ".join(mine), f"it returned None, or took too long ({outcome.reason})")
        if mine and grade.reason not in ("closed", "truncated"):
            with self._lock:
                if grade.reward is None:
                    self._faults.setdefault(told[0], []).append(told[1])
                else:
                    self._working.update([*mine, " or ".join(mine)])
        return grade

    def faults(self) -> dict[str, list[str]]:
        """What went wrong since the last step ended, by function of the user's."""
        with self._lock:
            return {name: list(details) for name, details in self._faults.items()}

    def end_step(self) -> None:
        """To be called when all answers of a step are graded.

        Raises:
          ConfigError: a function of the user's failed on every answer that there was so far: it is the function, not the answers.
        """
        with self._lock:
            broken = {name: details for name, details in self._faults.items() if name not in self._working}
            self._faults.clear()
        for name, details in broken.items():
            if len(details) >= COMMON_CAUSE:
                raise ConfigError(
                    f"rewards: {name} gave no verdict on any of {len(details)} answers; the first time:\n{details[0]}\n"
                    "-> mend the function (it must return a finite number, a Grade or, now and then, None), or take it out of "
                    "rewards.extra or rewards.graders"
                )

    def _replacement(self, lane: "_Lane") -> "_Worker":
        self._count("workers_started")
        return lane.take()

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counters.update(names)


class _Lane:
    """A queue of answers, and the workers that are ready for its sources: as many as threads asked for, and one to spare.

    One thread starts them all, since a worker dies with the thread that started it. The queue holds a step's rollouts at most.
    """

    def __init__(self, sources: tuple[str, ...], rubric: Rubric):
        self.sources, self._rubric = sources, rubric
        self.queue: queue.SimpleQueue[tuple[Answer, Future, Grade | None] | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[_Worker | Exception] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._starter = threading.Thread(target=self._start_workers, name="grading-starter", daemon=True)
        self._starter.start()

    def ask_for_worker(self) -> None:
        self._asked.put(True)

    def take(self) -> "_Worker":
        """A worker that is ready; another one is started in its place. Raises as `first`."""
        self.ask_for_worker()
        return self.first()

    def first(self) -> "_Worker":
        """A worker that was asked for.

        Raises:
          RuntimeError, OSError: it could not be started; holds what it wrote.
        """
        worker = self.ready.get()
        if isinstance(worker, Exception):
            raise worker
        return worker

    def close(self) -> None:
        self._asked.put(False)
        self._starter.join()
        while not self.ready.empty():
            if isinstance(worker := self.ready.get(), _Worker):
                worker.stop()

    def _start_workers(self) -> None:
        while True:
            asked = [self._asked.get()]
            while not self._asked.empty():
                asked.append(self._asked.get())
            if not all(asked):
                return
            launched = [self._launch() for _ in asked]  # several at once import their graders side by side
            for worker in launched:
                try:
                    self.ready.put(worker.when_ready() if isinstance(worker, _Worker) else worker)
                except Exception as error:
                    self.ready.put(error)

    def _launch(self) -> "_Worker | Exception":
        try:
            return _Worker(self.sources, self._rubric)
        except OSError as error:
            return error


class _Worker:
    """One worker process. On Linux it dies with the thread that made it."""

    def __init__(self, sources: tuple[str, ...], rubric: Rubric):
        self.connection, theirs = multiprocessing.Pipe()
        self.walls = not any(
            user_functions(source, rubric) for source in sources
        )  # whose functions may need files or the network
        settings = {"parent": os.getpid(), "sources": sources, "rubric": dataclasses.asdict(rubric), "walls": self.walls}
        command = [sys.executable, "-m", WORKER, str(theirs.fileno()), json.dumps(settings)]
        self.served, self._written = 0, tempfile.TemporaryFile()  # noqa: SIM115  (closed by `when_ready`)
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=environment() | (dict.fromkeys(ONE_THREAD, "1") if self.walls else {}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                start_new_session=True,  # a group of its own: what a grader has started ends with it
            )

    def when_ready(self) -> "_Worker":
        """Waits until the graders are imported.

        Raises:
          RuntimeError: they were not in time; holds what the process wrote.
        """
        with self._written as written:
            said = _received(self.connection) if self.connection.poll(START_SECONDS) else None
            if said and said.startswith(b"ready"):
                self.walls = said == b"ready"
                return self
            self.stop()
            written.seek(0)
            said = written.read()[-2000:].decode(errors="replace")
        raise RuntimeError(f"a grading worker did not start within {START_SECONDS:g} s; it wrote: {said or 'nothing'}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def grade(self, answer: Answer, known: Grade | None, seconds: float, closing: Connection | None) -> Grade | GraderFault | str:
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
        try:
            fields = json.loads(reply)
            if "function" in fields:
                return GraderFault(fields["function"], fields["detail"])
            return checked(Grade(**fields), "a grading worker")
        except (ValueError, TypeError):
            return "crash"  # whatever wrote that was no worker
        except GraderFault as fault:
            return fault

    def stop(self) -> None:
        """Ends the process at once and reaps it."""
        self.connection.close()
        if self.alive:  # not yet reaped, so the group's number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment() -> dict[str, str]:
    """What a worker sees of the environment: no keys, no tokens. A grader of the user's gets what is named GRADER_*."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    paths = dict.fromkeys([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])  # a user's graders, too
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(("LC_", "GRADER_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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
