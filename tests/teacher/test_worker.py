"""The teacher's thread: order of work, bounds, crashes, outages, stopping; and, synchronous, a fixed order and deadlines."""

import asyncio
import collections
import random
import threading

import pytest

from deepgrpo.endpoint.cache import ReplayMiss
from deepgrpo.teacher.annotate import Outcome
from deepgrpo.teacher.worker import TeacherWorker
from tests.teacher.fakes import DOWN, NO_VERDICT, Queue, Script, corrected, failures, until, worker_on


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


def test_crashes_of_tasks_and_of_the_loop_lose_nothing_and_label_nothing():
    queue = Queue(failures(6))
    queue.crashes = 2
    seen = collections.Counter()

    def say(failed):
        seen[failed.failure_id] += 1
        return 1 / 0 if failed.failure_id == 3 and seen[3] < 3 else corrected(failed)

    worker = worker_on(queue, Script(say))
    until(lambda: len(queue.results) == 6, "all results")
    assert dict(queue.results) == dict.fromkeys(range(6), True) and not queue.in_flight, "a crash says nothing of the failure"
    metrics = worker.metrics()
    assert metrics["teacher_worker/restarts"] == 2 and metrics["teacher_worker/alive"] == 1
    assert metrics["teacher_worker/deferred"] == 2 and metrics["teacher_worker/total_attempted"] == 6
    assert worker.stop(10.0) and worker.metrics()["teacher_worker/alive"] == 0
    with pytest.raises(RuntimeError, match="start"):
        worker.drain(1, 0.01)


def test_a_report_that_crashes_is_made_again_later():
    queue = Queue(failures(1))
    resolve, crashes = queue.resolve, [1, 1]

    def crashing(failed, correction, step):
        if crashes:
            raise RuntimeError(f"planted crash of resolve, {crashes.pop()}")
        return resolve(failed, correction, step)

    queue.resolve = crashing
    worker = worker_on(queue, Script(corrected))
    until(lambda: queue.results, "the report")
    assert worker.stop(10.0) and queue.results == [(0, True)] and worker.metrics()["teacher_worker/report_errors"] == 2


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


def test_an_outage_loses_no_failure():
    queue = Queue(failures(3))
    healthy = threading.Event()
    script = Script(lambda failed: corrected(failed) if healthy.is_set() else DOWN)
    worker = worker_on(queue, script, max_concurrent=1, pause=1e-4, patience=2, outage=1e-4)
    until(lambda: len(script.calls) > 8, "many futile tries")
    assert not queue.results
    healthy.set()
    until(lambda: len(queue.results) == 3, "all corrections")
    assert worker.stop(10.0)


def test_a_failure_without_a_verdict_is_held_back_alone_and_never_rejected():
    queue = Queue(failures(40))
    script = Script(lambda failed: NO_VERDICT if failed.failure_id % 10 == 0 else corrected(failed))
    worker = worker_on(queue, script, max_concurrent=2, pause=60.0, outage=60.0, patience=5)
    until(lambda: len(queue.results) == 36, "the others, at once")
    assert sorted(queue.in_flight) == [0, 10, 20, 30] and all(done for _, done in queue.results)
    assert worker.metrics()["teacher_worker/held_back"] == 4 and max(collections.Counter(script.calls).values()) == 1
    assert worker.stop(10.0) and sorted(f.failure_id for f in queue.waiting) == [0, 10, 20, 30] and not queue.in_flight


def test_nothing_is_asked_after_several_in_a_row_without_an_answer():
    queue = Queue(failures(40))
    script = Script(lambda failed: NO_VERDICT)
    worker = worker_on(queue, script, max_concurrent=1, pause=1e-3, outage=600.0, patience=5)
    until(lambda: worker.metrics()["teacher_worker/held_back"] == 5, "five failures without a verdict")
    worker.notify()
    assert len(set(script.calls)) == 5 and len(queue.waiting) == 35
    assert worker.stop(10.0) and len(queue.waiting) == 40


def test_a_call_whose_answer_is_of_no_more_use_is_cancelled():
    queue = Queue(failures(2))

    async def hold(failed):
        await asyncio.Event().wait()

    script = Script(hold)
    worker = worker_on(queue, script)
    until(lambda: script.running == 2, "two corrections to run")
    queue.useless = {0}
    worker.notify()
    until(lambda: script.running == 1, "the useless one to end")
    assert queue.in_flight.keys() == {1} and not queue.results and worker.metrics()["teacher_worker/withdrawn"] == 1
    assert worker.stop(0.5) and [f.failure_id for f in queue.waiting] == [1]


def test_counters_survive_a_resume():
    queue = Queue(failures(4))
    worker = worker_on(queue, Script(corrected), synchronous=True)
    worker.drain(1, 20.0)
    assert worker.stop(10.0)
    resumed = TeacherWorker(queue, Script(corrected), max_concurrent=4)
    resumed.restore(worker.state())
    assert resumed.metrics() == worker.metrics() | {"teacher_worker/alive": 0.0}


#### Synchronous


def test_drain_resolves_in_dispatch_order_whatever_the_timing():
    draw = random.Random(0)
    queue = Queue(failures(30))

    async def some_time(failed):
        await asyncio.sleep(draw.random() / 200)
        return corrected(failed) if failed.failure_id % 3 else Outcome("prefix_too_short")

    script = Script(some_time)
    worker = worker_on(queue, script, synchronous=True)
    assert not queue.results, "nothing moves before drain"
    worker.drain(1, 20.0)
    assert queue.results == [(i, i % 3 > 0) for i in range(30)] and script.most == 4
    assert script.recorded[:2] == ["prefix_too_short", "accepted"]
    assert worker.stop(10.0)


def test_drain_returns_at_once_when_the_teacher_is_down_and_goes_on_when_it_is_back():
    queue = Queue(failures(5))
    script = Script(lambda failed: DOWN, capacity=0)
    worker = worker_on(queue, script, synchronous=True)
    worker.drain(1, 20.0)
    assert not script.calls, "not even asked"
    script.room = 4  # it is not known yet that it is down
    worker.drain(2, 20.0)
    assert sorted(queue.in_flight) == list(range(5)) and not queue.results and len(script.calls) == 5, "held back a step"
    script.say, script.room = corrected, 1  # half open: one probe, then all
    worker.drain(3, 20.0)
    assert len(queue.results) == 5 and worker.stop(10.0)


def test_drain_puts_back_what_its_deadline_cuts_short():
    queue = Queue(failures(3))

    async def slow(failed):
        await asyncio.sleep(0 if failed.failure_id == 1 else 60)
        return corrected(failed)

    worker = worker_on(queue, Script(slow), synchronous=True)
    worker.drain(1, 1.5)
    assert queue.results == [(1, True)] and sorted(f.failure_id for f in queue.waiting) == [0, 2]
    assert worker.metrics()["teacher_worker/cut_short"] == 2 and worker.stop(10.0)


def test_a_failure_without_a_verdict_waits_twice_as_many_steps_each_time_and_holds_no_other_back():
    queue = Queue(failures(20))
    script = Script(lambda failed: NO_VERDICT if failed.failure_id == 1 else corrected(failed))
    worker = worker_on(queue, script, synchronous=True, patience=3)
    tries = []
    for step in range(1, 17):
        worker.drain(step, 20.0)
        tries += [step] * script.calls.count(1)
        script.calls.clear()
    assert tries == [1, 2, 4, 8, 16] and [event for event, _ in queue.results] == [0, *range(2, 20)]
    assert worker.stop(10.0) and [f.failure_id for f in queue.waiting] == [1]


def test_a_replay_that_misses_a_reply_stops_the_run():
    def miss(failed):
        raise ReplayMiss("request 17 was never recorded")

    queue = Queue(failures(2))
    worker = worker_on(queue, Script(miss), synchronous=True)
    with pytest.raises(ReplayMiss, match="17"):
        worker.drain(1, 20.0)
    with pytest.raises(ReplayMiss, match="17"):
        worker.raise_if_failed()
    assert worker.stop(10.0) and len(queue.waiting) == 2
