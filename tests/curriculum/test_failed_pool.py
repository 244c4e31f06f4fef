"""The queue of failed rollouts: bounds, leases, and randomness that a resume repeats."""

import numpy as np
import pytest

from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.weighted import FAILURES, generator
from deepgrpo.types import as_ids
from tests.curriculum.replay import problem, reloaded


def failed(state=(1,), response=(5, 6)) -> FailedRollout:
    return FailedRollout(problem(state[:1]), "g", as_ids(list(state)), as_ids(list(response)))


def waiting(pool) -> list[list[int]]:
    return [[f.event for f in stack] for stack in pool.contents()]


def test_a_failure_in_flight_returns_to_its_place():
    for priority in (False, True):
        pool = FailedPool(priority=priority)
        pool.add([failed((1,)), failed((1,)), failed((2,)), failed((1,))], step=1)
        before, random = waiting(pool), np.random.default_rng(0)
        taken = pool.dispatch(2, random)
        assert pool.metrics()["failed_pool/in_flight"] == 2 and len(pool) == 2 == pool.dispatched
        for failure in taken:
            pool.requeue(failure.event)
            pool.requeue(failure.event)
        assert sorted(waiting(pool)) == sorted(before)
        (failure,) = pool.dispatch(1, random)
        settled = pool.settle(failure.event)
        assert settled.event == failure.event and settled.group_id == "g" and pool.settle(failure.event) is None


def test_a_resumed_queue_hands_out_again_what_was_in_flight():
    for priority in (False, True):
        pool = FailedPool(priority=priority)
        pool.add([failed((i % 3,)) for i in range(9)], step=1)
        pool.dispatch(4, np.random.default_rng(0))
        resumed = FailedPool(priority=priority)
        resumed.load(reloaded(pool.saved(), FailedRollout))
        assert len(resumed) == 9 and resumed.dispatched == 4
        assert resumed.add([failed()], step=2) == 10 and max(map(max, waiting(resumed))) == 9  # numbers are not used twice


def test_draws_of_a_step_differ_and_repeat():
    def events():
        pool = FailedPool()
        pool.add([failed()] * 50, step=1)
        return [pool.dispatch(1, generator(0, 7, FAILURES, pool.dispatched))[0].event for _ in range(50)]

    assert events() == events() and sorted(events()) == list(range(50)) != events()


def test_bounds_of_the_round_robin_drop_the_oldest_and_are_counted():
    pool = FailedPool(priority=True, max_per_state=2)
    pool.add([failed((1,)), failed((2,)), failed((1,)), failed((1,))], step=1)
    assert waiting(pool) == [[2, 3], [1]] and pool.metrics()["failed_pool/dropped_capacity"] == 1
    pool = FailedPool(priority=True, max_waiting=2)
    pool.add([failed((1,)), failed((2,)), failed((1,)), failed((1,))], step=1)
    assert waiting(pool) == [[2, 3]] and pool.metrics()["failed_pool/unique_keys"] == 1
    with pytest.raises(ValueError, match="max_age must be >= 0"):
        FailedPool(max_age=-1)


def test_age_and_size_are_counted_apart():
    pool = FailedPool(max_size=2, max_age=3)
    pool.add([failed()], step=1)
    pool.add([failed()] * 3, step=5)
    metrics = pool.metrics()
    assert (metrics["failed_pool/dropped_age"], metrics["failed_pool/dropped_capacity"], len(pool)) == (1, 1, 2)
    with pytest.raises(ValueError, match=">= 0, got -1"):
        pool.take(-1, np.random.default_rng(0))
    priority = FailedPool(priority=True)
    assert priority.take(-1, np.random.default_rng(0)) == []
