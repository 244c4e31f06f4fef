"""The flat pool as the training loop sees it, and its keys."""

import numpy as np
import pytest

from deepgrpo.curriculum import flat
from deepgrpo.curriculum.failed_pool import FailedPool
from deepgrpo.curriculum.flat_pool import FlatPool
from deepgrpo.curriculum.header import write_header
from deepgrpo.types import as_ids
from tests.curriculum.test_chain import correction, saved
from tests.curriculum.test_forest import NO_VERDICT, RIGHT, WRONG, group, problem


def curriculum(seed=0, **arguments) -> flat.FlatCurriculum:
    failed = FailedPool(priority=True)
    return flat.FlatCurriculum(FlatPool(**arguments), failed, seed=seed, threshold=0.0, injection_ratio=0.5)


def test_a_step_of_groups():
    made = curriculum()
    groups = [group(problem(0), [WRONG, NO_VERDICT, WRONG]), group(problem(1, (3,)), [RIGHT, WRONG])]
    metrics = made.observe([*groups, group(problem(2, (4,)), [NO_VERDICT])], step=1)
    assert metrics["synthetic_inject/failed_gated_to_teacher"] == 2 and metrics["synthetic_inject/failed_collected"] == 3
    assert "synthetic_inject/escape_rate_groups" not in metrics
    assert made.pending() == 2 and made.wanted(8) == 0

    newest, other = made.dispatch(5, step=1)
    assert newest.response_ids.tolist() == [12, 22, 32]
    assert made.resolve(newest, correction(newest, 2), step=1) == "added"
    assert made.resolve(newest, correction(newest, 2), step=1) == "stale"
    assert made.resolve(other, None, step=1) == "failed"
    assert made.wanted(8) == 1 and made.wanted(1) == 0
    (state,) = made.sample(4, step=2)
    assert state.ids.tolist() == [1, 2, 12, 22] and made.pool.entries()[0].initial_p_hat == 0.5  # 2 of 2 + 2 tokens

    metrics = made.observe([group(problem(0), [RIGHT, WRONG], state), group(problem(0), [WRONG], state)], step=2)
    assert metrics["synthetic_inject/recorded_entries"] == 2 and metrics["synthetic_inject/escape_rate_groups"] == 0.5
    (failure,) = made.dispatch(5, step=2)
    assert failure.state_ids.tolist() == [1, 2, 12, 22]  # of a state, too, if its group fails as a whole


def test_the_prior_is_the_prefix_share():
    assert (flat.prior(3, 2), flat.prior(0, 4), flat.prior(0, 0)) == (0.6, 0.0, 0.5)


def test_a_resumed_pool_is_the_same_and_keeps_what_was_with_the_teacher(tmp_path):
    made = curriculum()
    made.observe([group(problem(i, (i + 1,)), [WRONG] * 3) for i in range(4)], step=1)
    for failure in made.dispatch(5, step=1):
        made.resolve(failure, correction(failure, 1), step=1)
    made.observe([group(s.problem, [RIGHT, WRONG], s) for s in made.sample(2, step=2)], step=2)
    in_flight = made.dispatch(3, step=2)
    saved(made, tmp_path / "in_flight")
    resumed = curriculum()
    resumed.restore(str(tmp_path / "in_flight"))
    for failure in reversed(in_flight):
        made.requeue(failure)
    assert saved(made, tmp_path / "one") == saved(resumed, tmp_path / "other")
    assert [f.event for f in made.dispatch(9, step=3)] == [f.event for f in resumed.dispatch(9, step=3)]
    assert [s.node for s in made.sample(3, step=3)] == [s.node for s in resumed.sample(3, step=3)]


def test_the_cap_may_be_of_the_problem():
    random = np.random.default_rng(0)
    for cap_by, keys, candidates in (("state", 4, 4), ("prompt", 1, 2)):
        pool = FlatPool(max_per_prompt=2, cap_by=cap_by)
        for last in range(4):
            pool.add(problem(0), as_ids([1, 2, last]))
        assert len(pool.candidates(random)) == candidates
        assert pool.metrics()["synthetic_pool/unique_prompts"] == keys


def test_a_bounded_pool_keeps_the_newest():
    pool = FlatPool(max_size=2)
    handles = [pool.add(problem(0), as_ids([1, 2, last])) for last in range(3)]
    assert [entry.handle for entry in pool.entries()] == handles[1:]
    assert pool.record_usage(handles[0], 1, 2, 3) is None
    assert pool.metrics()["synthetic_pool/dropped_capacity"] == 1 and pool.metrics()["synthetic_pool/unique_prompts"] == 2


@pytest.mark.parametrize("wrong", [{"max_per_prompt": 0}, {"w_floor_hard": -1.0}, {"cap_by": "group"}, {"max_size": -1}])
def test_impossible_settings(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FlatPool(**wrong)


def test_another_pools_folder_is_refused(tmp_path):
    write_header(str(tmp_path), "chain", 1, {})
    with pytest.raises(ValueError, match="curriculum.pool=chain"):
        curriculum().restore(str(tmp_path))
