"""Every failure that is queued ends as a state, as a rejection that the teacher's answer justifies, as dropped by a bound and
counted, or is still queued: over random schedules of answers, outages, crashes, retirements, restarts and restored snapshots."""

import asyncio
import importlib
import random
import time

import pytest

from deepgrpo import curriculum
from deepgrpo.curriculum.chain import DEEPENING
from deepgrpo.teacher.annotate import Outcome
from tests.curriculum.made import RIGHT, WRONG, check, group, problem
from tests.teacher.fakes import DOWN, NO_VERDICT, Script, corrected, until, worker_on

STEPS = 10
NAMES = ("accept", "accept", "reject", "no_verdict", "down", "crash", "slow")


class Run:
    """A curriculum with a worker on it, and what was said of each failure and reported of it."""

    def __init__(self, pool: str, seed: int, synchronous: bool):
        self.pool, self.draw, self.synchronous = pool, random.Random(f"{pool}{seed}{synchronous}"), synchronous
        self.said: dict[int, bool] = {}  # the last answer to a failure: whether it was a correction
        self.reported: dict[int, bool] = {}
        self.healthy = False
        self.curriculum = self.open()
        self.start()

    def open(self):
        config = importlib.import_module("configs.common").get_config()
        config.model.path, config.curriculum.pool, config.curriculum.min_remaining_tokens = "", self.pool, 1
        config.curriculum.injection_ratio = 1.0
        made = curriculum.create(config)
        resolve = made.resolve

        def watched(failure, correction, step):
            if not self.healthy and self.draw.random() < 0.1:
                raise RuntimeError("planted crash of a report")
            said = self.said.pop(failure.failure_id)  # raises if nothing was said: unknown would have become a label
            assert said == (correction is not None)
            self.reported[failure.failure_id] = said
            return resolve(failure, correction, step)

        made.resolve = watched
        return made

    def say(self, failure):
        kind = "accept" if self.healthy else self.draw.choice(NAMES)
        if kind == "crash":
            raise ValueError("planted crash of an annotation")
        if kind in ("no_verdict", "down"):
            return NO_VERDICT if kind == "no_verdict" else DOWN
        self.said[failure.failure_id] = accepted = kind != "reject"
        outcome = corrected(failure, self.draw.randint(1, 3)) if accepted else Outcome("prefix_too_short")

        async def later():
            await asyncio.sleep(0.003)
            return outcome

        return later() if kind == "slow" else outcome

    def start(self):
        settings = {"synchronous": self.synchronous, "max_concurrent": 4, "pause": 1e-3, "outage": 2e-3, "patience": 3}
        self.worker = worker_on(self.curriculum, Script(self.say), **settings)

    def work(self, step):
        self.worker.step = step
        if self.synchronous:
            self.worker.drain(step, 20.0)
        else:
            self.worker.notify()
            time.sleep(self.draw.choice((0.0, 0.01)))  # it may get somewhere before the next step, or not

    def observe(self, step):
        sampled = self.curriculum.sample(self.curriculum.num_to_inject(2), step)
        groups = [group(problem(i, (i + 1,)), self.rewards()) for i in range(3)]
        groups += [group(state.problem, self.rewards(), state) for state in sampled]
        self.curriculum.observe(groups, step)

    def rewards(self):
        return self.draw.choice(([WRONG] * 4, [WRONG] * 4, [WRONG, RIGHT, WRONG, RIGHT], [RIGHT] * 4))

    def restart(self, folder=None):
        """Ends the worker, in time or not; with a folder, goes on from a snapshot that was taken while it ran."""
        if folder is not None:
            folder.mkdir()
            known = dict(self.said), dict(self.reported)
            self.curriculum.state(str(folder))
        assert self.worker.stop(self.draw.choice((0.05, 10.0))) or self.worker.stop(20.0)
        self.conserved()
        if folder is not None:
            self.curriculum = self.open()
            self.curriculum.restore(str(folder))
            self.said, self.reported = known
            self.conserved()
        self.start()

    def conserved(self):
        """Nothing is in flight while no worker runs, and every failure is accounted for."""
        counts = self.curriculum.metrics()
        if self.pool == "forest":
            check(self.curriculum)  # whose counters must add up
            assert not self.curriculum.index.in_flight
        elif self.pool == "chain":
            pool = self.curriculum
            waiting = {id(pool.chains[key]) for key in pool.queue}
            assert not pool.in_flight
            assert waiting >= {id(made) for made in pool.chains.values() if made.state == DEEPENING}
        else:
            gone = sum(counts[f"failed_pool/{name}"] for name in ("settled", "dropped_capacity", "dropped_age"))
            assert counts["failed_pool/enqueued"] == gone + counts["failed_pool/size"] and not counts["failed_pool/in_flight"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("synchronous", [False, True], ids=["beside", "in_step"])
@pytest.mark.parametrize("pool", ["forest", "chain", "flat", "suffixes"])
def test_no_failure_is_lost_and_none_is_labelled_by_what_is_unknown(pool, synchronous, seed, tmp_path):
    run = Run(pool, seed, synchronous)
    for step in range(1, STEPS + 1):
        run.observe(step)
        run.work(step)
        if run.draw.random() < 0.4:
            run.restart(tmp_path / str(step) if run.draw.random() < 0.5 else None)
    assert run.worker.stop(20.0)
    run.conserved()

    run.healthy = True  # all that is left is answered
    run.start()
    if run.synchronous:
        run.work(STEPS + 1)
    until(lambda: not run.curriculum.pending() and not run.worker.metrics()["teacher_worker/in_flight"], "the queue to empty")
    assert run.worker.stop(20.0)
    run.conserved()
    assert not run.curriculum.pending() and run.reported
