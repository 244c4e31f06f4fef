"""The grading service: outcomes, deadlines, callers, and what becomes of its processes."""

import asyncio
import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from deepgrpo.rewards import service as service_lib
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.service import GradingService
from deepgrpo.types import Grade

ROOT = pathlib.Path(__file__).resolve().parents[2]


def number(response, key="18"):
    return Answer("GSM8K", "How many?", "", response, "stop", key)


@pytest.fixture(scope="module")
def service():
    with GradingService(workers=2, deadline=20.0, sources=["GSM8K"]) as running:
        yield running


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(service_lib, "WORKER", "scripted_worker")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    with GradingService(workers=1, deadline=2.0, sources=["GSM8K"]) as running:
        yield running


def test_same_verdicts_from_every_kind_of_caller(service):
    answers = [number("#### 18"), number("#### 19"), number("hm"), number("#### 18", key="-18")] * 5

    def blocking():
        return [service.submit(answer).result(60) for answer in answers]

    async def in_asyncio():
        return await asyncio.gather(*(asyncio.wrap_future(service.submit(answer)) for answer in answers))

    here = blocking()
    assert [grade.reward for grade in here[:4]] == [1, 0, 0, 0]
    assert asyncio.run(in_asyncio()) == here
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(future.result() == here for future in [pool.submit(blocking) for _ in range(4)])


@pytest.mark.parametrize(
    ("response", "reward", "reason"),
    [
        ("spin in Python", 0.0, "timeout"),
        ("spin in C", 0.0, "timeout"),
        ("sleep", None, "timeout"),
        ("die", None, "crash"),
        ("raise", None, "error"),
        ("eat", 0.0, "too_complex"),
    ],
)
def test_outcomes_of_a_hostile_grader(scripted, response, reward, reason):
    first, second = scripted.submit(number(response)), scripted.submit(number("fine"))
    grade = first.result(60)
    if response.startswith("spin") and grade.reward is None:
        pytest.skip("the host is so busy that the worker had hardly any CPU")
    assert (grade.reward, grade.reason) == (reward, reason)
    assert second.result(60).reward == 1.0
    metrics = scripted.metrics()
    assert metrics["grading/answers"] == 2 and metrics[f"grading/reason/{reason}"] == 1
    assert metrics.get("grading/no_verdict", 0) == (reward is None)


def test_a_worker_that_is_killed_or_stopped_is_replaced(scripted):
    for blow in (signal.SIGKILL, signal.SIGSTOP):
        pid = int(scripted.submit(number("fine")).result(60).answer)
        os.kill(pid, blow)
        grade = scripted.submit(number("fine")).result(60)
        assert grade.reward == 1.0 and int(grade.answer) != pid


def test_graders_that_wait_have_workers_and_deadlines_of_their_own(monkeypatch):
    monkeypatch.setattr(service_lib, "WORKER", "scripted_worker")
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent)
    rubric = Rubric(graders=("JUDGED=scripted_worker:patient",))
    with GradingService(1, 1.0, ["GSM8K", "JUDGED"], rubric, waiting_workers=2) as service:
        assert service.deadline == 40.0
        judged = dataclasses.replace(number("ask a judge"), data_source="JUDGED")
        slow = [service.submit(judged), service.submit(dataclasses.replace(judged, response="ask a slow one"))]
        assert service.submit(number("fine")).result(60).reward == 1.0
        assert not any(future.done() for future in slow)
        assert slow[0].result(60).reward == 0.5  # past rewards.deadline
        closing = time.monotonic()
    assert (slow[1].result(0).reward, slow[1].result(0).reason) == (None, "closed")
    assert time.monotonic() - closing < 50  # it did not wait for the minute that the other takes


def test_sources_that_are_marked_outside_go_there_and_their_total_is_weighted_here():
    with pytest.raises(ValueError, match="research: marked by a judge .*open_grading"):
        GradingService(1, 1.0, ["research", "GSM8K"])

    class Outside:
        def submit(self, answer):
            future = concurrent.futures.Future()
            future.set_result(Grade(0.25, True, "judged"))
            return future

        def metrics(self):
            return {"grading/answers": 1.0, "judge/marks": 1.0}

    report = dataclasses.replace(number("<answer>a report</answer>"), data_source="research")
    with GradingService(1, 20.0, ["research", "GSM8K"], Rubric(extra=("format=1",)), external=Outside()) as service:
        assert service.submit(report).result(60) == Grade(1.25, True, "judged", parts=(("task", 0.25), ("format", 1.0)))
        assert service.metrics()["judge/marks"] == 1 and service.metrics()["grading/answers"] == 2


def test_closing_cancels_what_waits_and_leaves_no_process(scripted):
    pid = int(scripted.submit(number("fine")).result(60).answer)
    futures = [scripted.submit(number("sleep")) for _ in range(3)]
    time.sleep(0.2)
    scripted.close()
    assert futures[-1].cancelled() and not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        scripted.submit(number("fine"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_no_orphans_when_the_parent_is_killed():
    code = (
        "import glob, sys\n"
        "from deepgrpo.rewards.service import GradingService\n"
        "service = GradingService(2, 5.0, ['GSM8K'])\n"
        "print(*(open(path).read() for path in glob.glob('/proc/self/task/*/children')), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 3 and all(map(alive, workers))  # two, and one to spare
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 120
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, f"still alive: {workers}"
        time.sleep(0.05)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_import_no_jax():
    code = (
        "import sys, deepgrpo.rewards.worker as w\n"
        "w.graders.prepare(['MATH', 'GSM8K', 'DeepScaleR'], w.graders.Rubric(grader='compat_full'))\n"
        "assert not {'jax', 'torch', 'ml_collections'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_a_worker_that_cannot_start_is_reported_with_its_words(monkeypatch):
    monkeypatch.setattr(service_lib, "WORKER", "no_such_worker")
    with pytest.raises(RuntimeError, match="No module named no_such_worker"):
        GradingService(workers=1, deadline=1.0, sources=["GSM8K"])


def test_impossible_arguments():
    with pytest.raises(ValueError, match="no grader for data_source 'x'"):
        GradingService(workers=1, deadline=1.0, sources=["x"])
