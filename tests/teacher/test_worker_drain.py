"""Synchronous corrections: a fixed order whatever the timing, no stall when the teacher is down, deadlines that lose nothing."""

import asyncio
import random

import pytest

from deepgrpo.endpoint.cache import ReplayMiss
from deepgrpo.teacher.annotate import Outcome
from tests.teacher.fakes import DOWN, NO_VERDICT, Queue, Script, corrected, failures, worker_on


@pytest.mark.parametrize("seed", range(3))
def test_drain_resolves_in_dispatch_order_whatever_the_timing(seed):
    draw = random.Random(seed)
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
    worker.drain(1, 3.0)
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
