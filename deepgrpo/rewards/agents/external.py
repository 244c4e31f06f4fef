"""Grading that waits for something outside: a judge's endpoint, or code in the sandbox.

The rewards of the data-analysis agents are what a judge says of their answers and reports, and how much of their code ran. An
agent writes <Analyze>, <Understand>, <Code> and <Answer> blocks; the environment puts <Execute> blocks with the output between
them. Rewards are in [0, 1]; `strict` gives the reference's own scales (dabstep_research 1 to 5, dabstep -1).

In DSBench data modelling the task's evaluation script scores the submission file, in the sandbox. The row brings, in `extra` (or
in a ground truth that is a mapping): `expected_file`, the submission's path in the workspace; `ground_truth`, the path of the
key; `evaluation_script`, its path; `workspace`; `baseline_result` and `gold_result`, two scores.

`ExternalGrading.submit` has the manner of `service.GradingService`: any thread may call it, and the future holds a Grade. One
thread runs the judges' event loop; a few more run sandboxed programs. Nothing that fails here becomes a label: judge out of
reach, reply unusable, budget spent, sandbox broken, deadline passed and an error of the grader's own are all "no verdict".
"""

import asyncio
import collections
import concurrent.futures
import functools
import logging
import math
import os
import pathlib
import re
import stat
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from deepgrpo.endpoint.cache import ReplayMiss
from deepgrpo.rewards.agents import ds1000, sandbox
from deepgrpo.rewards.agents.judges import Judge, NoVerdict, checked_dabstep_research
from deepgrpo.rewards.agents.sandbox import ERROR
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.rewards.reward import checked
from deepgrpo.types import ENVIRONMENT, Grade

JudgedGrader = Callable[[Answer, Judge, bool], Coroutine[Any, Any, Grade]]  # (answer, judge, strict); raises judges.NoVerdict

_ANSWER = re.compile(r"<Answer>(.*?)</Answer>", re.DOTALL)
_EXECUTE = re.compile(r"<Execute>(.*?)</Execute>", re.DOTALL)
_ANALYZE = re.compile(r"</?Analyze>")  # the chat template may have written the opening tag


async def grade_datatask(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """0 for a wrong answer; 0.5 + 0.5 * `code_pass_ratio` for a right one."""
    said = final_answer(answer) if analyzes(answer) else None
    if not said:
        return _unformatted(strict)
    right = await judge.mark("answer_correctness", question=question(answer), reference_answer=key(answer), answer=said)
    return Grade(right * (0.5 + 0.5 * code_pass_ratio(answer)), True, "right" if right else "wrong", said)


async def grade_research(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """Mean of `code_pass_ratio`, report quality and report soundness."""
    report = final_answer(answer) if analyzes(answer) else None
    if not report:
        return _unformatted(strict)
    instruction = question(answer)
    quality = await judge.mark("report_quality", instruction=instruction, report=report)
    soundness = await judge.mark("report_soundness", instruction=instruction, trajectory=trajectory(answer))
    return Grade((code_pass_ratio(answer) + quality + soundness) / 3, True, "judged", report)


async def grade_dabstep_research(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """(m - 1) / 4 of the mean m of two marks from 1 to 5; strict: m."""
    report = final_answer(answer)
    if not report:
        return Grade(0.0, False, "unformatted")
    instruction, checklist = question(answer), key(answer)
    texts = {"instruction": instruction, "checklist": checklist, "report": report}
    marks = await judge.mark("dabstep_research", checked_dabstep_research, **texts)
    return Grade(marks if strict else (marks - 1) / 4, True, "judged", report)


async def grade_dsbench_analysis(answer: Answer, judge: Judge, strict: bool = False) -> Grade:
    """1 if the judge calls the answer correct, else 0."""
    said = final_answer(answer)
    if not said:
        return Grade(0.0, False, "unformatted")
    right = await judge.mark("dsbench_accuracy", question=question(answer), reference_answer=key(answer), answer=said)
    return Grade(right, True, "right" if right else "wrong", said)


async def grade_dabstep(answer: Answer, judge: Judge | None = None, strict: bool = False) -> Grade:
    """No verdict: the answers are scored by a public leaderboard alone, there is no key to compare with. Strict: -1."""
    said = final_answer(answer) or ""
    return Grade(-1.0, False, "no_key", said) if strict else Grade(None, bool(said), "no_key", said)


JUDGED: dict[str, JudgedGrader] = {
    "datatask": grade_datatask,
    "research": grade_research,
    "dabstep_research": grade_dabstep_research,
    "DSBench_data_analysis": grade_dsbench_analysis,
    "dabstep": grade_dabstep,
}


def refuse_untrainable(sources) -> None:
    """Refuses training data whose answers nobody here can mark.

    Raises:
      ValueError: dabstep is among them.
    """
    if "dabstep" in sources:
        raise ValueError(
            "data_source 'dabstep' has no answer keys (only its leaderboard scores answers), so that every rollout would be "
            "without a verdict: take it out of data.train; it can be rolled out and exported by validation"
        )


#### Reading a trajectory


def trajectory(answer: Answer) -> str:
    """The agent's own turns and the blocks that the environment put between them, the locked prefix first."""
    parts = answer.prefix_parts + answer.parts
    return "".join(text for _, text in parts) or answer.prefix + own_words(answer.response)


def analyzes(answer: Answer) -> bool:
    return _ANALYZE.search(trajectory(answer)) is not None


def final_answer(answer: Answer) -> str | None:
    """Content of the last closed <Answer> pair of the response, outputs of code left out, trimmed; None without one."""
    found = _ANSWER.findall(_EXECUTE.sub("", own_words(answer.response)))
    return found[-1].rpartition("<Answer>")[2].strip() if found else None


def code_pass_ratio(answer: Answer) -> float:
    """Share of the executed blocks without an error; 0 if no code ran.

    Only what the environment wrote counts, where that is known: a block in the text may have been written by the model.
    """
    parts = answer.prefix_parts + answer.parts
    observed = "".join(text for who, text in parts if who == ENVIRONMENT)
    blocks = _EXECUTE.findall(observed if parts else trajectory(answer))
    return sum(ERROR not in block for block in blocks) / len(blocks) if blocks else 0.0


def question(answer: Answer) -> str:
    """The row's instruction or question, else the user's text."""
    return str(answer.extra.get("instruction") or answer.extra.get("question") or answer.question)


def key(answer: Answer) -> str:
    """The reference answer or checklist as text."""
    truth = answer.ground_truth
    return "\n".join(map(str, truth)) if isinstance(truth, list | tuple) else str(truth)


def _unformatted(strict: bool) -> Grade:
    return Grade(0.0, strict, "unformatted")  # the reference counts it as completed


DSBENCH_SECONDS = 300.0  # for the evaluation script
LARGEST_SUBMISSION = 2**28  # bytes of a submission


def grade_dsbench(
    answer: Answer, *, strict: bool = False, seconds: float = DSBENCH_SECONDS, allow_network: bool = False
) -> Grade:
    """See `normalised`; 0 without an <Answer> or without a usable submission. Runs a child process: not in a grading worker.

    No verdict ("no_scale", "evaluation", "sandbox"): the row's scores span no scale, or the evaluation could not be done for a
    reason that lies with this machine or the row.

    Raises:
      sandbox.SandboxUnavailable: scripts cannot be isolated here. KeyError, OSError: the row lacks a field, key or script.
    """
    if final_answer(answer) is None:
        return Grade(0.0, False, "unformatted")
    row = _fields(answer)
    baseline, gold = float(row["baseline_result"]), float(row["gold_result"])
    if normalised(gold, baseline, gold) is None:
        return Grade(None, True, "no_scale")
    script, truth = pathlib.Path(row["evaluation_script"]), pathlib.Path(row["ground_truth"])
    materials = {"evaluate.py": script.read_bytes(), f"key/{truth.name}": truth.read_bytes()}
    submission = read_submission(pathlib.Path(row["workspace"]), row["expected_file"])
    if submission is None:
        return Grade(0.0, False, "no_submission")
    name = f"submission/{pathlib.PurePath(row['expected_file']).name}"
    arguments = ["--answer_file", f"key/{truth.name}", "--predict_file", name, "--path", "dummy", "--name", "dummy"]
    try:
        result = sandbox.run(
            [sys.executable, "evaluate.py", *arguments],
            files=materials | {name: submission},
            seconds=seconds,
            cpu_seconds=max(1, int(seconds)),
            disk_bytes=2 * (LARGEST_SUBMISSION + sum(map(len, materials.values()))),
            allow_network=allow_network,
        )
    except sandbox.SandboxError:
        return Grade(None, True, "sandbox")
    last_line = result.output.strip().rpartition("\n")[2]
    if result.outcome in ("timeout", "killed") or last_line.startswith("ModuleNotFoundError"):
        return Grade(None, True, "evaluation", result.output[-500:])
    score = _score(result)
    if score is None:
        return Grade(0.0, False, "bad_submission", result.output[-500:])
    reward = normalised(score, baseline, gold, clip=not strict)
    return Grade(reward, True, "right" if reward >= 1 else "judged", repr(score))


def normalised(score: float, baseline: float, gold: float, clip: bool = True) -> float | None:
    """(score - baseline) / (gold - baseline), at least 0 and, with `clip`, at most 1: where the submission stands between a
    trivial and the best known result. The same formula serves scores to be minimised (gold < baseline).

    A score that is not a number gives 0. None: gold equals baseline or one is not finite, so that there is no scale.
    """
    if not (math.isfinite(baseline) and math.isfinite(gold)) or gold == baseline:
        return None
    share = (score - baseline) / (gold - baseline)
    if math.isnan(share) or share <= 0 or not math.isfinite(score):
        return 0.0
    return min(share, 1.0) if clip else share


def read_submission(workspace: pathlib.Path, name: str) -> bytes | None:
    """Content of a regular file in the workspace; None if there is none, or more than LARGEST_SUBMISSION of it.

    The workspace was written by untrusted code: a link (to the key, say) or a device counts as no file.
    """
    root = workspace.resolve()
    path = root / name
    if not path.resolve().is_relative_to(root):
        return None
    try:
        if path.parent.resolve() != path.parent:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = file.read(LARGEST_SUBMISSION + 1)
    return content if len(content) <= LARGEST_SUBMISSION else None


def _score(result: sandbox.Result) -> float | None:
    """What the script printed, if it ended well and that is a number."""
    if result.outcome != "ok":
        return None
    try:
        return float(result.output.strip())
    except ValueError:
        return None


def _fields(answer: Answer) -> Mapping[str, Any]:
    truth = answer.ground_truth
    return {**answer.extra, **(truth if isinstance(truth, Mapping) else {"ground_truth": truth})}


EXECUTED: dict[str, Callable[..., Grade]] = {"ds1000": ds1000.grade, "DSBench_data_modeling": grade_dsbench}
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
            "DSBench_data_modeling": functools.partial(grade_dsbench, strict=strict, allow_network=allow_network),
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
