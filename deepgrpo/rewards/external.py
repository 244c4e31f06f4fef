"""Grading that waits for something outside: a judge's endpoint, or code in the sandbox.

`ExternalGrading.submit` has the manner of `service.GradingService`: any thread may call it, and the future holds a Grade. One
thread runs the judges' event loop; a few more run sandboxed programs. Nothing that fails here becomes a label: judge out of
reach, reply unusable, budget spent, sandbox broken, deadline passed and an error of the grader's own are all "no verdict".
"""

import asyncio
import collections
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from deepgrpo.endpoint.cache import ReplayMiss
from deepgrpo.rewards import ds1000, dsbench, research, sandbox
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.judges import Judge, NoVerdict
from deepgrpo.rewards.verdict import checked
from deepgrpo.types import Grade

EXECUTED: dict[str, Callable[..., Grade]] = {"ds1000": ds1000.grade, "DSBench_data_modeling": dsbench.grade}
JUDGED = research.GRADERS
SOURCES = frozenset(EXECUTED) | frozenset(JUDGED)
NO_JUDGE_NEEDED = frozenset({"dabstep"})
STOP_SECONDS = 10.0  # for the event loop to end

log = logging.getLogger(__name__)


class ExternalGrading:
    """Grades the sources in SOURCES.

    Args:
      sources: those that will come. judge: needed by the JUDGED ones; closed here.
      max_concurrent: programs at once. seconds: of a DS-1000 answer. allow_network: see `sandbox.run`.
      judge_deadline: seconds a judged answer, however many judges it needs. strict: the reference's scales.

    Raises:
      ValueError: an unknown source, or one that needs a judge and there is none.
      sandbox.SandboxUnavailable: code must be run and cannot be isolated.
    """

    def __init__(
        self,
        sources: Collection[str],
        *,
        judge: Judge | None = None,
        max_concurrent: int = 4,
        seconds: float = ds1000.SECONDS,
        allow_network: bool = False,
        judge_deadline: float = 3600.0,
        strict: bool = False,
    ):
        if unknown := set(sources) - SOURCES:
            raise ValueError(f"{', '.join(sorted(unknown))}: not graded outside; known: {', '.join(sorted(SOURCES))}")
        if judge is None and (lacking := set(sources) & (JUDGED.keys() - NO_JUDGE_NEEDED)):
            raise ValueError(f"data_source {', '.join(sorted(lacking))} needs a judge: set judge.base_url and judge.model")
        if set(sources) & EXECUTED.keys():
            level = sandbox.wall_level(allow_network)
            log.log(logging.WARNING if level == "none" else logging.INFO, "code that the model wrote runs behind: %s", level)
        self._sources, self._judge, self._strict, self._judge_deadline = frozenset(sources), judge, strict, judge_deadline
        self._executed = {
            "ds1000": functools.partial(ds1000.grade, seconds=seconds, allow_network=allow_network),
            "DSBench_data_modeling": functools.partial(dsbench.grade, strict=strict, allow_network=allow_network),
        }
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._closed = False
        self._programs = concurrent.futures.ThreadPoolExecutor(max_concurrent, thread_name_prefix="sandbox")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    def submit(self, answer: Answer) -> "concurrent.futures.Future[Grade]":
        """Queues an answer. The future holds an exception only for a replay that misses a reply.

        Raises:
          ValueError: a source that was not announced, or a finish reason that isn't graded. RuntimeError: closed.
        """
        if answer.data_source not in self._sources:
            raise ValueError(
                f"data_source {answer.data_source!r} was not announced; announced: {', '.join(sorted(self._sources))}"
            )
        if answer.finish_reason not in ("stop", "length"):
            raise ValueError(f"finish_reason {answer.finish_reason!r} is not graded; expected 'stop' or 'length'")
        with self._lock:
            if self._closed:
                raise RuntimeError("grading outside is closed")
            return asyncio.run_coroutine_threadsafe(self._graded(answer), self._loop)

    async def _graded(self, answer: Answer) -> Grade:
        if answer.finish_reason == "length":
            grade = Grade(0.0, False, "truncated")
        elif answer.data_source in EXECUTED:
            run = functools.partial(_guarded, self._executed[answer.data_source], answer)
            grade = await asyncio.get_running_loop().run_in_executor(self._programs, run)
        else:
            grade = await self._judged(answer)
        with self._lock:
            self._counts.update(["answers", f"reason_{grade.reason}", *(["no_verdict"] if grade.reward is None else [])])
        return grade

    async def _judged(self, answer: Answer) -> Grade:
        try:
            async with asyncio.timeout(self._judge_deadline):
                grade = await JUDGED[answer.data_source](answer, self._judge, self._strict)
            return checked(grade, f"the grader of {answer.data_source}")
        except NoVerdict as error:
            log.warning("no verdict on %s: %s", answer.data_source, error)
            return Grade(None, False, f"judge_{error.kind}")
        except TimeoutError:
            log.warning("no verdict on %s: the judges took more than %g s", answer.data_source, self._judge_deadline)
            return Grade(None, False, "judge_deadline")
        except ReplayMiss:
            raise
        except Exception:
            return _failed(answer)

    def metrics(self) -> dict[str, float]:
        """Cumulative, answers, no verdicts and reasons (`external/...`), and the judge's (`judge/...`)."""
        with self._lock:
            counts = {f"external/{name}": float(count) for name, count in sorted(self._counts.items())}
        return counts | (self._judge.metrics() if self._judge else {})

    def state(self) -> dict[str, Any]:
        """The judge's, JSON-serialisable: what was spent, and which replies are durable."""
        return {"judge": self._judge.state() if self._judge else None}

    def restore(self, state: dict[str, Any]) -> None:
        if self._judge and state["judge"]:
            self._judge.restore(state["judge"])

    def close(self) -> None:
        """Cancels what waits for a judge, lets running programs end (within their limits), gives back sockets; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._programs.shutdown(wait=True, cancel_futures=True)
        self._loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._judge is not None:
            await self._judge.aclose()

    def __enter__(self) -> "ExternalGrading":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _guarded(run: Callable[[Answer], Grade], answer: Answer) -> Grade:
    try:
        return checked(run(answer), f"the grader of {answer.data_source}")
    except Exception:
        return _failed(answer)


def _failed(answer: Answer) -> Grade:
    log.exception("the grader of %s failed", answer.data_source)
    return Grade(None, False, "error")
