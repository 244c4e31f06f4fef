"""Whom the teacher gets next: in turn within a step, a few of a tree at a time, and what is put back keeps its place."""

from collections import Counter

import numpy as np

from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Annotation
from deepgrpo.types import Problem, as_ids
from tests.curriculum.forest_check import check

RESPONSE = as_ids([5, 6])


def problem(prompt) -> Problem:
    return Problem(0, "test", as_ids(prompt), "", "")


def served(pool, answers, at_once):
    """Events that a teacher of so many answers a step is given, `at_once` at a time."""
    given = []
    while len(given) < answers and (failures := pool.dispatch_teacher(at_once, 1)):
        given += failures
        for failure in failures:
            pool.teacher_result(failure.event, None, 1)
    return given


def test_within_a_step_trees_and_states_are_served_in_turn():
    pool = Forest(most_in_flight=2)
    for prompt in range(1, 101):
        pool.observe_root(problem((prompt,)), 0, 8, 1, [RESPONSE] * 8)
    by_tree = Counter(failure.state_ids[0] for failure in served(pool, 300, 1))
    assert set(by_tree.values()) == {3}
    pool = Forest(most_in_flight=2)
    pool.observe_root(problem((1,)), 0, 8, 1, [RESPONSE] * 5)
    pool.teacher_result(0, Annotation(as_ids([1, 5]), as_ids([7])), 1)
    pool.observe_node(pool.find((1,), (1, 5)), 0, 8, 1, [RESPONSE] * 4)
    assert [len(failure.state_ids) for failure in served(pool, 8, 1)] == [1, 2] * 4


def test_a_tree_has_only_so_many_events_in_flight_but_those_at_rest_do_not_count():
    pool = Forest(most_in_flight=2)
    pool.observe_root(problem((1,)), 0, 8, 1, [RESPONSE] * 8)
    first, second = pool.dispatch_teacher(1, 1) + pool.dispatch_teacher(1, 1)
    assert pool.dispatch_teacher(5, 1) == [] and pool.pending() == 6
    pool.rest(first.event)
    [third] = pool.dispatch_teacher(5, 1)
    assert pool.dispatch_teacher(5, 1) == []
    pool.requeue(first.event)  # put back from its rest: it had given its place up already
    assert pool.dispatch_teacher(5, 1) == []
    pool.teacher_result(second.event, None, 1)
    assert len(pool.dispatch_teacher(5, 1)) == 1
    check(pool)
    assert not pool.withdraw(third.event)
    pool.observe_root(problem((1,)), 8, 8, 2, [])
    assert pool.withdraw(third.event) and pool.withdraw(third.event), "the state is mastered: no answer could be used"
    assert pool.metrics()["teacher/events_stale_parent_inactive"] == 1
    check(pool)


def test_states_of_the_flat_pool_are_served_in_turn_also_after_a_restart():
    pool, random = FailedPool(priority=True, fair=True), np.random.default_rng(0)
    states = [as_ids([i]) for i in range(100)]
    pool.add([FailedRollout(problem(state), "g", state, RESPONSE) for state in states for _ in range(8)], 1)
    given = [pool.take(1, random)[0] for _ in range(150)]
    again = FailedPool(priority=True, fair=True)
    again.load(pool.saved())
    given += [again.take(1, random)[0] for _ in range(150)]
    assert set(Counter(failed.state_ids[0] for failed in given).values()) == {3}
