"""The teacher's thread: order of work, bounds, crashes, outages, stopping."""

import asyncio
import threading

import pytest

from deepgrpo.curriculum.forest import ForestCurriculum
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.teacher.annotate import Outcome
from deepgrpo.teacher.worker import TeacherWorker
from deepgrpo.types import Problem, as_ids
from tests.teacher.fakes import DOWN, Queue, Script, corrected, failures, until, worker_on
from tests.teacher.scenarios import teacher_cases


def deltas(read, previous):
    """What a trainer makes of two reads: totals of this one, growth since the last."""
    totals = {
        k: read[k] for k in ("teacher_worker/total_attempted", "teacher_worker/total_succeeded", "teacher_worker/success_rate")
    }
    growth = {
        name: read[f"teacher_worker/total_{name}"] - previous[f"teacher_worker/total_{name}"]
        for name in ("attempted", "succeeded")
    }
    return totals | {f"teacher_worker/step_{name}": value for name, value in growth.items()}


@pytest.mark.parametrize("args, result", teacher_cases("worker_modes"))
def test_golden_worker_modes(args, result):
    if args["mode"] != "forest":
        pytest.skip(f"the pools of mode {args['mode']} do not exist yet")
    forest, labels, problems = Forest(), {}, {}
    for root in args["roots"]:
        problem = Problem(0, "trace", as_ids(root["prompt"]), "", "")
        problems[tuple(root["prompt"])] = problem
        for failed in root["failed"]:
            labels[len(labels)] = failed["event"]
        forest.observe_root(problem, 0, 4, args["observe_step"], [as_ids(f["response_ids"]) for f in root["failed"]])

    def say(failed):
        scripted = args["annotator"][labels[failed.event]]
        if scripted == "raise":
            raise RuntimeError("scripted")
        return Outcome("reward_too_low") if scripted is None else corrected(failed, scripted["match"], scripted["suffix"])

    script = Script(say)
    worker = TeacherWorker(ForestCurriculum(forest, threshold=0.0), script, max_concurrent=args["concurrency"])
    worker.step = args["worker_step"]
    nothing = worker.metrics()
    worker.start()
    until(lambda: not forest.pending() and not worker.metrics()["teacher_worker/in_flight"], "the worker to finish")
    assert worker.stop(10.0)
    assert [labels[event] for event in script.calls] == result["call_order"]
    first, second = worker.metrics(), worker.metrics()
    assert deltas(first, nothing) == pytest.approx(result["worker_stats_first_read"])
    assert deltas(second, first) == pytest.approx(result["worker_stats_second_read"])
    assert {name: forest.metrics()[name] for name in result["pool"]} == result["pool"]
    for child in result["children"]:
        prompt = next(p for p in problems if forest.find(p, child["node"]) is not None)
        node = forest.debug_context(forest.find(prompt, child["node"]))["lineage"][-1]
        assert node["created_step"] == child["created_step"]


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
