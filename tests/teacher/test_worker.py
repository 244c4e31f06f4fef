"""The teacher's thread: order of work, bounds, crashes, outages, stopping."""

import asyncio
import threading

import pytest

from deepgrpo.teacher.annotate import Outcome
from deepgrpo.teacher.worker import TeacherWorker
from tests.teacher.fakes import DOWN, Queue, Script, corrected, failures, until, worker_on


def test_concurrency_is_bounded_and_notify_wakes():
    queue = Queue([])

    async def later(failed):
        await asyncio.sleep(0.002)
        return corrected(failed)

    script = Script(later)
    worker = worker_on(queue, script, max_concurrent=3)
    queue.waiting = failures(20)
    worker.notify()
    until(lambda: len(queue.results) == 20, "all corrections")
    assert script.most == 3 and worker.stop(10.0)
    assert worker.metrics()["teacher_worker/total_succeeded"] == 20


def test_crashes_of_tasks_and_of_the_loop_lose_nothing():
    queue = Queue(failures(6))
    queue.crashes = 2
    script = Script(lambda failed: 1 / 0 if failed.event == 3 else corrected(failed))
    worker = worker_on(queue, script)
    until(lambda: len(queue.results) == 6, "all results")
    assert dict(queue.results) == {i: i != 3 for i in range(6)} and not queue.in_flight
    metrics = worker.metrics()
    assert metrics["teacher_worker/restarts"] == 2 and metrics["teacher_worker/alive"] == 1
    assert worker.stop(10.0) and worker.metrics()["teacher_worker/alive"] == 0
    with pytest.raises(RuntimeError, match="start"):
        worker.drain(1, 0.01)


def test_a_failed_report_is_made_once_more_as_a_failure():
    queue = Queue(failures(1))
    resolve = queue.resolve

    def crashing(failed, correction, step):
        if correction is not None:
            raise RuntimeError("planted crash of resolve")
        return resolve(failed, correction, step)

    queue.resolve = crashing
    worker = worker_on(queue, Script(corrected))
    until(lambda: queue.results, "the report")
    assert worker.stop(10.0) and queue.results == [(0, False)]


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_stop_finishes_or_puts_back_running_work(ends_in_time):
    queue, release = Queue(failures(4)), threading.Event()

    async def hold(failed):
        while not release.is_set():
            await asyncio.sleep(0.002)
        return corrected(failed)

    script = Script(hold)
    worker = worker_on(queue, script, max_concurrent=2)
    until(lambda: script.running == 2, "two corrections to run")
    if ends_in_time:
        release.set()
    assert worker.stop(20.0 if ends_in_time else 0.5)
    assert not queue.in_flight and len(queue.results) + len(queue.waiting) == 4
    assert (len(queue.waiting) == 4) != ends_in_time
    threads = [thread.name for thread in threading.enumerate()]
    assert "teacher-worker" not in threads
    release.set()
    worker.start()  # and it can go on
    until(lambda: len(queue.results) == 4, "the rest")
    assert worker.stop(10.0)


def test_an_outage_loses_no_failure_but_a_poisonous_one_is_given_up():
    queue = Queue(failures(3))
    healthy = threading.Event()
    script = Script(lambda failed: corrected(failed) if healthy.is_set() else DOWN)
    worker = worker_on(queue, script, max_concurrent=1, pause=1e-4)
    until(lambda: len(script.calls) > 8, "many futile tries")
    assert not queue.results
    healthy.set()
    until(lambda: len(queue.results) == 3, "all corrections")
    assert worker.stop(10.0)

    queue = Queue(failures(12))
    script = Script(lambda failed: Outcome("no_verdict", deferred=True) if failed.event == 0 else corrected(failed))
    worker = worker_on(queue, script, max_concurrent=2, pause=1e-4)
    until(lambda: len(queue.results) == 12, "all results")
    assert (0, False) in queue.results and worker.metrics()["teacher_worker/given_up"] == 1 and worker.stop(10.0)


def test_counters_survive_a_resume():
    queue = Queue(failures(4))
    worker = worker_on(queue, Script(corrected), synchronous=True)
    worker.drain(1, 20.0)
    assert worker.stop(10.0)
    resumed = TeacherWorker(queue, Script(corrected), max_concurrent=4)
    resumed.restore(worker.state())
    assert resumed.metrics() == worker.metrics() | {"teacher_worker/alive": 0.0}
