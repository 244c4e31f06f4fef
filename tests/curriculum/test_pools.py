"""The other pools as the training loop and the teacher see them: chains, flat states, the queue of failures."""

import collections

import numpy as np
import pytest

from deepgrpo.curriculum.base import FAILURES, generator
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.flat import FlatEntry
from deepgrpo.types import as_ids
from tests.curriculum.made import NO_VERDICT, RIGHT, WRONG, correction, create, group, problem, saved
from tests.curriculum.replay import reloaded


def chains(seed=0, **changes):
    pool = create("chain", injection_ratio=1.0, **changes)
    pool.seed = seed
    return pool


def flat():
    return create("flat", injection_ratio=0.5)


def queue(priority: bool) -> FailedPool:
    return FailedPool(priority=True, max_size=0) if priority else FailedPool()


def test_a_step_of_chains():
    """Only what fails as a whole goes to the teacher; a group without a verdict says nothing; a chain deepens and retreats."""
    made = chains()
    groups = [group(problem(0), [WRONG, NO_VERDICT]), group(problem(1, (3,)), [RIGHT, WRONG])]
    metrics = made.observe([*groups, group(problem(2, (4,)), [NO_VERDICT] * 2)], step=1)
    assert metrics["chain_pool/main_failures_seen_this_step"] == metrics["chain_pool/main_failures_enqueued_this_step"] == 1
    assert (made.pending(), made.num_to_inject(8)) == (1, 0)

    (failure,) = made.dispatch(5, step=1)
    assert made.pending() == 0 and made.dispatch(5, step=1) == []
    assert made.resolve(failure, correction(failure, 2), step=1) == "deepened"
    assert made.resolve(failure, correction(failure, 2), step=1) == "stale"
    (state,) = made.sample(made.num_to_inject(8), step=2)
    assert state.ids.tolist() == [1, 2, 10, 20]

    metrics = made.observe([group(problem(0), [RIGHT, RIGHT], state), group(problem(0), [WRONG, WRONG])], step=2)
    assert metrics["chain_pool/observations_recorded_this_step"] == metrics["chain_pool/main_failures_seen_this_step"] == 1
    assert metrics["chain_pool/main_failures_enqueued_this_step"] == 0  # there is a chain
    (state,) = made.sample(1, step=3)
    assert state.ids.tolist() == [1, 2]  # back at the prompt itself
    made.observe([group(problem(0), [RIGHT, RIGHT], state)], step=3)
    assert made.sample(1, step=4) == [] and made.metrics()["chain_pool/completed"] == 1


def test_failures_of_a_chain_are_tried_one_by_one_the_longest_first():
    pool = chains()
    pool.start_chain(problem(0), [as_ids([5]), as_ids([5, 6, 7]), as_ids([5, 6])], 1)
    pool.start_chain(problem(1, (3,)), [as_ids([5])], 1)
    lengths = []
    for prefix in (None, 0, 1):
        (failure,) = pool.dispatch(1, 1)
        lengths.append(len(failure.response_ids))
        outcome = pool.resolve(failure, None if prefix is None else correction(failure, prefix), step=2)
    assert lengths == [3, 2, 1] and outcome == "deepened"
    (failure,) = pool.dispatch(5, 1)
    assert failure.state_ids.tolist() == [3] and pool.resolve(failure, correction(failure, 0), step=2) == "abandoned"


def test_what_was_put_back_is_next_and_survives_a_resume(tmp_path):
    made = chains()
    made.observe([group(problem(i, (i + 1,)), [WRONG] * 2) for i in range(3)], step=1)
    first, second = made.dispatch(2, step=1)
    assert made.resolve(second, None, step=1) == "next_failure"
    made.requeue(second)  # not in flight any more: ignored
    saved(made, tmp_path / "in_flight")
    resumed = chains()
    resumed.restore(str(tmp_path / "in_flight"))
    made.requeue(first)
    one, other = saved(made, tmp_path / "one"), saved(resumed, tmp_path / "other")
    assert one == other
    again = [[(f.failure_id, f.step, f.response_ids.tolist()) for f in each.dispatch(9, step=2)] for each in (made, resumed)]
    assert again[0] == again[1] and [event for event, *_ in again[0]] == [first.failure_id, second.failure_id + 1, 4]


def test_a_state_without_room_for_a_response_is_refused():
    pool = chains(max_model_len=10, min_remaining_tokens=7)
    pool.start_chain(problem(0), [as_ids([5, 6])], 1)
    (failure,) = pool.dispatch(1, 1)
    assert pool.resolve(failure, correction(failure, 2), step=1) == "abandoned"
    assert pool.metrics()["chain_pool/teacher_invalid_length"] == 1


def test_states_are_a_function_of_seed_and_step():
    def draws(seed):
        made = chains(seed=seed)
        made.observe([group(problem(i, (i + 1,)), [WRONG]) for i in range(12)], step=1)
        for failure in made.dispatch(12, step=1):
            made.resolve(failure, correction(failure, 1), step=1)
        return [[state.node for state in made.sample(4, step)] for step in range(2, 8)]

    assert draws(0) == draws(0) != draws(1)
    assert len({node for step in draws(0) for node in step}) > 4


def test_a_step_of_flat_states():
    made = flat()
    groups = [group(problem(0), [WRONG, NO_VERDICT, WRONG]), group(problem(1, (3,)), [RIGHT, WRONG])]
    metrics = made.observe([*groups, group(problem(2, (4,)), [NO_VERDICT])], step=1)
    assert metrics["synthetic_inject/failed_gated_to_teacher"] == 2 and metrics["synthetic_inject/failed_collected"] == 3
    assert "synthetic_inject/escape_rate_groups" not in metrics
    assert made.pending() == 2 and made.num_to_inject(8) == 0

    newest, other = made.dispatch(5, step=1)
    assert newest.response_ids.tolist() == [12, 22, 32]
    assert made.resolve(newest, correction(newest, 2), step=1) == "added"
    assert made.resolve(newest, correction(newest, 2), step=1) == "stale"
    assert made.resolve(other, None, step=1) == "failed"
    assert made.num_to_inject(8) == 1 and made.num_to_inject(1) == 0
    (state,) = made.sample(4, step=2)
    assert state.ids.tolist() == [1, 2, 12, 22] and made.entries[0].initial_p_hat == 0.5  # 2 of 2 + 2 tokens

    metrics = made.observe([group(problem(0), [RIGHT, WRONG], state), group(problem(0), [WRONG], state)], step=2)
    assert metrics["synthetic_inject/recorded_entries"] == 2 and metrics["synthetic_inject/escape_rate_groups"] == 0.5
    (failure,) = made.dispatch(5, step=2)
    assert failure.state_ids.tolist() == [1, 2, 12, 22]  # of a state, too, if its group fails as a whole


def test_a_bounded_pool_keeps_the_newest():
    pool = flat()
    pool.max_size = 2
    handles = [pool.add(FlatEntry(problem(0), as_ids([1, 2, last]))) for last in range(3)]
    assert list(pool.entries) == handles[1:] and pool.record_usage(handles[0], 1, 2, 3) is None
    assert pool.metrics()["synthetic_pool/dropped_capacity"] == 1 and pool.metrics()["synthetic_pool/unique_prompts"] == 2


def failed(state=(1,), response=(5, 6)) -> FailedRollout:
    return FailedRollout(problem(0, state[:1]), "g", as_ids(list(state)), as_ids(list(response)))


def waiting(pool) -> list[list[int]]:
    return [[f.event for f in stack] for stack in pool.contents()]


def test_a_failure_in_flight_returns_to_its_place():
    for priority in (False, True):
        pool = queue(priority)
        pool.add([failed((1,)), failed((1,)), failed((2,)), failed((1,))], step=1)
        before, random = waiting(pool), np.random.default_rng(0)
        taken = pool.dispatch(2, random)
        assert pool.metrics()["failed_pool/in_flight"] == 2 and len(pool) == 2 == pool.counts["dispatched"]
        for failure in taken:
            pool.requeue(failure.failure_id)
            pool.requeue(failure.failure_id)
        assert sorted(waiting(pool)) == sorted(before)
        (failure,) = pool.dispatch(1, random)
        for _ in range(2):
            pool.settle(failure.failure_id)
        assert pool.metrics()["failed_pool/settled"] == 1


def test_a_resumed_queue_hands_out_again_what_was_in_flight():
    for priority in (False, True):
        pool = queue(priority)
        pool.add([failed((i % 3,)) for i in range(9)], step=1)
        pool.dispatch(4, np.random.default_rng(0))
        resumed = queue(priority)
        resumed.load(reloaded(pool.saved(), FailedRollout))
        assert len(resumed) == 9 and resumed.counts["dispatched"] == 4
        assert resumed.add([failed()], step=2) == 10 and max(map(max, waiting(resumed))) == 9  # numbers are not used twice


def test_draws_of_a_step_differ_and_repeat():
    def events():
        pool = FailedPool()
        pool.add([failed()] * 50, step=1)
        return [pool.dispatch(1, generator(0, 7, FAILURES, pool.counts["dispatched"]))[0].failure_id for _ in range(50)]

    assert events() == events() and sorted(events()) == list(range(50)) != events()


def test_bounds_of_the_round_robin_drop_the_oldest_and_are_counted():
    for bounds, left in (({"max_per_state": 2}, [[2, 3], [1]]), ({"max_size": 2}, [[2, 3]])):
        pool = FailedPool(priority=True, **{"max_size": 0} | bounds)
        pool.add([failed((1,)), failed((2,)), failed((1,)), failed((1,))], step=1)
        assert waiting(pool) == left and pool.metrics()["failed_pool/dropped_capacity"] == 4 - sum(map(len, left))
        assert pool.metrics()["failed_pool/unique_keys"] == len(left)


def test_age_and_size_are_counted_apart():
    pool = FailedPool(max_size=2, max_age=3)
    pool.add([failed()], step=1)
    pool.add([failed()] * 3, step=5)
    metrics = pool.metrics()
    assert (metrics["failed_pool/dropped_age"], metrics["failed_pool/dropped_capacity"], len(pool)) == (1, 1, 2)
    with pytest.raises(ValueError, match=">= 0, got -1"):
        pool.take(-1, np.random.default_rng(0))
    assert queue(True).take(-1, np.random.default_rng(0)) == []


def test_states_of_the_flat_pool_are_served_in_turn_also_after_a_restart():
    pool, random = FailedPool(priority=True, fair=True, max_size=0), np.random.default_rng(0)
    pool.add([failed((state,)) for state in range(100) for _ in range(8)], 1)
    given = [pool.take(1, random)[0] for _ in range(150)]
    again = FailedPool(priority=True, fair=True, max_size=0)
    again.load(pool.saved())
    given += [again.take(1, random)[0] for _ in range(150)]
    assert set(collections.Counter(f.state_ids[0] for f in given).values()) == {3}
