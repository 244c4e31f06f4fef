"""Chains as the training loop sees them, and what the reference's rules are improved by behind keys."""

import pytest

from deepgrpo.curriculum import chain
from deepgrpo.curriculum.base import Correction
from deepgrpo.curriculum.chain_pool import ABANDONED, LEARNING, ChainPool
from deepgrpo.types import as_ids
from tests.curriculum.test_forest import NO_VERDICT, RIGHT, WRONG, group, problem


def curriculum(seed=0, **arguments) -> chain.ChainCurriculum:
    return chain.ChainCurriculum(ChainPool(**arguments), seed=seed, threshold=0.0, injection_ratio=1.0)


def correction(failure, prefix: int) -> Correction:
    ids = failure.response_ids
    return Correction(ids[:prefix], as_ids([7, 0]), 1.0, ids[prefix:])


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saved(made, folder) -> dict[str, bytes]:
    folder.mkdir()
    made.state(str(folder))
    return content(folder)


def test_a_step_of_groups():
    """Only what fails as a whole goes to the teacher; a group without a verdict says nothing; a chain deepens and retreats."""
    made = curriculum()
    groups = [group(problem(0), [WRONG, NO_VERDICT]), group(problem(1, (3,)), [RIGHT, WRONG])]
    metrics = made.observe([*groups, group(problem(2, (4,)), [NO_VERDICT] * 2)], step=1)
    assert metrics["chain_pool/main_failures_seen_this_step"] == metrics["chain_pool/main_failures_enqueued_this_step"] == 1
    assert (made.pending(), made.wanted(8)) == (1, 0)

    (failure,) = made.dispatch(5, step=1)
    assert made.pending() == 0 and made.dispatch(5, step=1) == []
    assert made.resolve(failure, correction(failure, 2), step=1) == "deepened"
    assert made.resolve(failure, correction(failure, 2), step=1) == "stale"
    (state,) = made.sample(made.wanted(8), step=2)
    assert state.ids.tolist() == [1, 2, 10, 20]

    metrics = made.observe([group(problem(0), [RIGHT, RIGHT], state), group(problem(0), [WRONG, WRONG])], step=2)
    assert metrics["chain_pool/observations_recorded_this_step"] == metrics["chain_pool/main_failures_seen_this_step"] == 1
    assert metrics["chain_pool/main_failures_enqueued_this_step"] == 0  # there is a chain
    (state,) = made.sample(1, step=3)
    assert state.ids.tolist() == [1, 2]  # back at the prompt itself
    made.observe([group(problem(0), [RIGHT, RIGHT], state)], step=3)
    assert made.sample(1, step=4) == [] and made.metrics()["chain_pool/completed"] == 1


def test_failures_of_a_chain_are_tried_one_by_one_the_longest_first():
    pool = ChainPool()
    pool.main_failure(problem(0), [as_ids([5]), as_ids([5, 6, 7]), as_ids([5, 6])], step=1)
    pool.main_failure(problem(1, (3,)), [as_ids([5])], step=1)
    lengths = []
    for prefix in (None, 0, 1):
        (failure,) = pool.dispatch(1)
        lengths.append(len(failure.response_ids))
        outcome = pool.resolve(failure, None if prefix is None else correction(failure, prefix), step=2)
    assert lengths == [3, 2, 1] and outcome == "deepened"
    (failure,) = pool.dispatch(5)
    assert failure.state_ids.tolist() == [3] and pool.resolve(failure, correction(failure, 0), step=2) == "abandoned"


def test_what_was_put_back_is_next_and_survives_a_resume(tmp_path):
    made = curriculum()
    made.observe([group(problem(i, (i + 1,)), [WRONG] * 2) for i in range(3)], step=1)
    first, second = made.dispatch(2, step=1)
    assert made.resolve(second, None, step=1) == "next_failure"
    made.requeue(second)  # not in flight any more: ignored
    saved(made, tmp_path / "in_flight")
    resumed = curriculum()
    resumed.restore(str(tmp_path / "in_flight"))
    made.requeue(first)
    one, other = saved(made, tmp_path / "one"), saved(resumed, tmp_path / "other")
    assert one == other
    again = [[(f.event, f.step, f.response_ids.tolist()) for f in each.dispatch(9, step=2)] for each in (made, resumed)]
    assert again[0] == again[1] and [event for event, *_ in again[0]] == [first.event, second.event + 1, 4]


def test_a_second_chance_and_a_new_start_are_keys():
    for retries, states in ((0, [ABANDONED]), (1, [LEARNING, ABANDONED])):
        pool = ChainPool(max_retries=retries)
        pool.main_failure(problem(0), [as_ids([5])], step=1)
        (made,) = pool.chains()
        for state in states:
            (failure,) = pool.dispatch(1)
            pool.resolve(failure, None, step=2)
            assert made.state == state
            pool.observe(made.problem.prompt_ids, 0, 2, 3, [as_ids([5])])
        assert pool.metrics()["chain_pool/retries"] == retries

    pool = ChainPool(restart_after=10)
    pool.main_failure(problem(0), [as_ids([5])], step=1)
    pool.teacher_result(as_ids([1, 2]), None, step=2)
    assert not pool.main_failure(problem(0), [as_ids([5])], step=11)
    assert pool.main_failure(problem(0), [as_ids([5])], step=12) and len(pool) == 1 and pool.pending() == 1
    assert pool.metrics()["chain_pool/restarts"] == pool.metrics()["chain_pool/abandoned_cumulative"] == 1


def test_a_state_without_room_for_a_response_is_refused():
    pool = ChainPool(max_state_len=3)
    pool.main_failure(problem(0), [as_ids([5, 6])], step=1)
    assert pool.teacher_result(as_ids([1, 2]), as_ids([1, 2, 5, 6]), step=1) == "abandoned"
    assert pool.metrics()["chain_pool/teacher_invalid_length"] == 1


def test_states_are_a_function_of_seed_and_step():
    def draws(seed):
        made = curriculum(seed)
        made.observe([group(problem(i, (i + 1,)), [WRONG]) for i in range(12)], step=1)
        for failure in made.dispatch(12, step=1):
            made.resolve(failure, correction(failure, 1), step=1)
        return [[state.node for state in made.sample(4, step)] for step in range(2, 8)]

    assert draws(0) == draws(0) != draws(1)
    assert len({node for step in draws(0) for node in step}) > 4


def test_what_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="max_retries"):
        ChainPool(max_retries=-1)
    with pytest.raises(ValueError, match="step must be >= 0"):
        curriculum().sample(1, -1)
    with pytest.raises(ValueError, match="longest"):
        chain.ChainCurriculum(ChainPool(), seed=0, threshold=0.0, failures="shortest")
    made = curriculum()
    made.observe([group(problem(0), [WRONG])], step=1)
    (failure,) = made.dispatch(1, step=1)
    made.resolve(failure, correction(failure, 1), step=1)
    with pytest.raises(ValueError, match="read-only"):
        made.sample(1, step=2)[0].ids[0] = 9
