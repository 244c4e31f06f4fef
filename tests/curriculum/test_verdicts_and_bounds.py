"""What is not known retires, hardens and labels nothing; nothing is queued without a teacher; what a bound drops is said."""

import dataclasses
import logging

import pytest

from deepgrpo.telemetry import statistics
from deepgrpo.telemetry.diagnostics import DROPS, Drops
from deepgrpo.types import Group
from tests.curriculum.made import NO_VERDICT, RIGHT, WRONG, correction, create, describe, group, problem

FEW = [RIGHT] + [NO_VERDICT] * 7
POOLS = ("forest", "chain", "flat", "suffixes")


def with_a_state(pool):
    """A curriculum with one hard state, its problem and the state."""
    made, first = create(pool, injection_ratio=1.0), problem(0)
    made.observe([group(first, [WRONG] * 8)], 1)
    [failure] = made.dispatch(1, 1)
    made.resolve(failure, correction(failure, 2), 1)
    for rest in iter(lambda: made.dispatch(1, 1), []):
        made.resolve(rest[0], None, 1)
    [state] = made.sample(1, 2)
    return made, first, state


def aborted(made: Group) -> Group:
    """The same group as it is if the rollouts without a verdict were aborted."""
    return dataclasses.replace(made, rollouts=tuple(made.verdicts()))


@pytest.mark.parametrize("as_it_is", [lambda made: made, aborted], ids=["no verdict", "aborted"])
@pytest.mark.parametrize("pool", ["forest", "chain", "flat"])
def test_a_state_is_not_mastered_on_one_verdict_of_eight(pool, as_it_is):
    made, first, state = with_a_state(pool)
    before = {k: v for k, v in made.metrics().items()}
    seen = made.observe([as_it_is(group(first, FEW, state))], 2)
    changed = {k for k, v in made.metrics().items() if before[k] != v}
    assert not changed, "nothing was concluded"
    assert not any(seen.get(name) for name in ("forest_pool/nodes_retired_this_step", "synthetic_inject/recorded_entries"))
    assert made.sample(1, 3)[0].ids.tolist() == state.ids.tolist()
    made.observe([group(first, [RIGHT] * 6 + [NO_VERDICT] * 2, made.sample(1, 4)[0] if pool == "flat" else state)], 4)
    assert any(before[k] != v for k, v in made.metrics().items()), "on most of the verdicts it is"


def test_a_root_is_not_mastered_and_a_prompt_not_hopeless_on_few_verdicts():
    made, first, _ = with_a_state("forest")
    made.observe([group(first, FEW)], 2)
    assert describe(made)[0]["nodes"][0]["active"]
    made.observe([group(first, [WRONG] + [NO_VERDICT] * 7)], 3)
    assert made.pending() == 1, "a failure is a failure, and goes to the teacher"
    other = create("chain")
    other.observe([group(first, [WRONG] + [NO_VERDICT] * 7)], 1)
    assert other.pending() == 0 and not other.chains, "one verdict does not say that all fail"


def test_labels_and_metrics_need_the_groups_verdicts():
    few, enough = group(problem(0), FEW), group(problem(0), [RIGHT] * 6 + [NO_VERDICT] * 2)
    assert "data/main_chain/groups" not in statistics.group_statistics([few], 0.0)
    assert statistics.group_statistics([few, enough], 0.0)["data/main_chain/groups_all_right_share"] == 1.0
    assert not Group(few.prompt, ()).judged and enough.judged and not few.judged


@pytest.mark.parametrize("pool", POOLS)
def test_without_a_teacher_nothing_is_queued(pool, tmp_path):
    for enabled in (True, False):
        made = create(pool, teacher__enabled=enabled)
        for step in range(1, 4):
            made.observe([group(problem(i, (i + 1,)), [WRONG] * 8) for i in range(5)], step)
        assert bool(made.pending()) == enabled, pool
        sizes = [v for k, v in made.metrics().items() if "enqueued" in k or k.endswith(("/size", "num_trees"))]
        assert any(sizes) == enabled


def test_a_chain_without_a_teacher_goes_on_with_the_states_that_it_has(tmp_path):
    made, first, state = with_a_state("chain")
    made.state(str(tmp_path))
    alone = create("chain", teacher__enabled=False, injection_ratio=1.0)
    alone.restore(str(tmp_path))
    alone.observe([group(first, [WRONG] * 8, state)], 3)
    assert alone.pending() == 0 and alone.num_to_inject(1) == 1, "it does not wait for a teacher that never comes"


def test_many_steps_of_failures_stay_within_the_bounds(caplog):
    made, drops = create("forest"), Drops()
    made.max_events, made.max_nodes = 50, 4
    with caplog.at_level(logging.WARNING):
        for step in range(1, 40):
            made.observe([group(problem(i, (i + 1,)), [WRONG] * 8) for i in range(10)], step)
            for failure in made.dispatch(5, step):
                made.resolve(failure, correction(failure, 1 + step % 3), step)
            drops.look(made.metrics())
    metrics = made.metrics()
    assert metrics["teacher/events_queued"] <= 50 and metrics["forest/num_nodes"] <= 40
    said = [record.getMessage() for record in caplog.records if "MAX_EVENTS" in record.getMessage()]
    assert metrics["teacher/events_dropped_capacity"] > 1000 and len(said) <= 4, (
        "once, and each time that it is ten times as much"
    )


def test_every_counter_of_drops_is_one_that_a_pool_reports():
    reported = {name for pool in ("forest", "flat", "suffixes") for name in create(pool).metrics()}
    assert DROPS.keys() - reported == {"buffer/dropped_capacity"}
