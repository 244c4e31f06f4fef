"""The forest: a step of groups in, states, work for the teacher and metrics out; bounds, order of service, mastery."""

import collections
import dataclasses

import pytest

from deepgrpo.curriculum.forest import Forest
from deepgrpo.types import as_ids
from tests.curriculum.made import NO_VERDICT, RIGHT, WRONG, answer, check, correction, describe, forest, group, problem


def test_a_step_of_groups():
    made = forest(max_model_len=100)
    first = problem(0)
    metrics = made.observe([group(first, [WRONG, WRONG, RIGHT]), group(problem(1, (3,)), [RIGHT] * 3)], step=1)
    assert metrics["forest_pool/root_groups_seen_this_step"] == 2
    assert metrics["forest_pool/root_fail_groups_this_step"] == metrics["forest_pool/root_trees_created_this_step"] == 1
    assert metrics["forest_pool/root_events_added_this_step"] == metrics["synthetic_inject/failed_collected"] == 2
    assert (made.pending(), made.ready()) == (2, 0)

    (failure,) = made.dispatch(1, step=1)
    assert failure.problem is first and failure.response_ids.tolist() == [11, 21, 31]  # the newest
    assert made.resolve(failure, correction(failure, 2), 1) == "child_created"
    (state,) = made.sample(5, step=2)
    assert state.ids.tolist() == [1, 2, 11, 21] and state.problem is first
    (node,) = describe(made)[0]["nodes"][1:]
    assert node["origin"].failed_suffix_ids.tolist() == [31] and node["origin"].response_ids is failure.response_ids

    metrics = made.observe([group(first, [RIGHT, WRONG], state)], step=2)
    assert metrics["synthetic_inject/injected_count"] == 1 and metrics["synthetic_inject/rollout_n"] == 2
    assert metrics["forest_pool/events_added_this_step"] == 1 and metrics["forest_pool/root_groups_seen_this_step"] == 0
    metrics = made.observe([group(first, [RIGHT, RIGHT], state), group(first, [RIGHT])], step=3)
    assert metrics["forest_pool/nodes_retired_this_step"] == metrics["forest_pool/root_nodes_deactivated_this_step"] == 1
    assert metrics["forest_pool/trees_cleaned_this_step"] == 0  # failures still wait
    sizes = made.metrics()
    assert sizes["forest/num_trees"] == sizes["forest_pool/num_trees"] == 1
    assert sizes["forest/active_nodes"] == sizes["forest_pool/active_nodes"] == 0


def test_groups_of_one_prompt_are_merged():
    made = forest(max_model_len=100)
    metrics = made.observe([group(problem(0), [RIGHT, RIGHT]), group(problem(1), [WRONG, RIGHT]), group(problem(2), [WRONG])], 1)
    assert metrics["forest_pool/root_groups_seen_this_step"] == 1 and metrics["forest_pool/observations_recorded_this_step"] == 0
    (tree,) = describe(made)
    assert (tree["nodes"][0]["last_k_succ"], tree["nodes"][0]["last_k_total"]) == (3, 5)
    assert tree["problem"].index == 1 and len(tree["events"]) == 2  # the first that failed


def test_rollouts_without_a_verdict_are_no_evidence():
    made = forest(max_model_len=100)
    metrics = made.observe([group(problem(0), [NO_VERDICT] * 2), group(problem(1, (3,)), [NO_VERDICT, WRONG])], 1)
    assert metrics["forest_pool/groups_without_verdict_this_step"] == 1
    assert metrics["synthetic_inject/failure_feed_skipped"] == 0
    (tree,) = describe(made)
    assert tree["nodes"][0]["last_k_total"] == len(tree["events"]) == 1
    assert made.observe([group(problem(0), [NO_VERDICT])], 2)["synthetic_inject/failure_feed_skipped"] == 1


def test_only_the_longest_right_prefix_is_sent():
    made = forest(failures="longest_prefix")
    rewards, prefixes = [RIGHT, WRONG, WRONG, WRONG, WRONG], [99, 3, 8, 8, None]
    metrics = made.observe([group(problem(0), rewards, right_prefix=prefixes)], 1)
    assert metrics["synthetic_inject/failed_collected"] == 4
    assert [failure.response_ids[0] for failure in made.dispatch(9, 1)] == [12]
    assert made.pending() == 0
    with pytest.raises(ValueError, match="right_prefix.*curriculum.failures=all"):
        made.observe([group(problem(1, (3,)), [WRONG])], 2)


def test_exhausted_trees_are_removed_around_a_step():
    made = forest(max_model_len=100)
    made.observe([group(problem(0), [WRONG])], 1)
    (failure,) = made.dispatch(1, 1)
    made.observe([group(problem(0), [RIGHT])], 2)
    assert made.resolve(failure, None, 2) == "stale_parent_inactive"
    assert made.sample(1, 3) == [] and len(made) == 0
    assert made.observe([], 3)["forest_pool/trees_cleaned_pre_sample"] == 1
    assert made.resolve(failure, correction(failure, 1), 3) == "stale_unknown_event"
    with pytest.raises(ValueError, match="step must be >= 0"):
        made.sample(1, -1)


def test_every_counter_is_in_the_metrics():
    pool = forest()
    numbers = {field.name: 100 + i for i, field in enumerate(dataclasses.fields(pool.counters)) if i < 14}  # those of failures
    for name, number in numbers.items():
        setattr(pool.counters, name, number)
    assert set(numbers.values()) - {100, 101} <= set(pool.metrics().values())


def fail(pool, n, step=1, prompt=(1, 2)) -> dict[str, int]:
    return pool.observe_root(problem(0, prompt), 0, max(n, 1), step, [as_ids([5, 6])] * n)


def test_a_state_retires_after_so_many_whole_successes_in_a_row(tmp_path):
    pool = forest(retire_after=2)
    fail(pool, 1)
    node = grow(pool, [7], 1)
    outcomes = [(2, 2), (1, 2), (2, 2)]  # the second one breaks the row
    assert not any(pool.observe_node(node, *outcome, step, None)["node_retired"] for step, outcome in enumerate(outcomes, 2))
    pool.state(str(tmp_path))
    restored = forest(retire_after=2)
    restored.restore(str(tmp_path))
    assert restored.observe_node(node, 2, 2, 5, None)["node_retired"] == 1

    assert pool.observe_root(problem(), 2, 2, 6, None)["root_deactivated"] == 1  # a root with the first
    assert pool.continuation(0) is None and pool.continuation(99) is None
    suffix, reward = pool.continuation(node)
    assert suffix.tolist() == [9] and reward == 1.0


def grow(pool: Forest, prefix: list[int], step: int) -> int:
    """Has the failure that the teacher is given next corrected: the child adds `prefix` to its state."""
    (failure,) = pool.dispatch(1, step)
    return answer(pool, failure, prefix, step)


def served(pool, answers, at_once):
    """Events that a teacher of so many answers a step is given, `at_once` at a time."""
    given = []
    while len(given) < answers and (failures := pool.dispatch(at_once, 1)):
        given += failures
        for failure in failures:
            pool.resolve(failure, None, 1)
    return given


def test_within_a_step_trees_and_states_are_served_in_turn():
    pool = forest(strict_reference=False)
    for prompt in range(1, 101):
        pool.observe_root(problem(0, (prompt,)), 0, 8, 1, [as_ids([5, 6])] * 8)
    by_tree = collections.Counter(failure.state_ids[0] for failure in served(pool, 300, 1))
    assert set(by_tree.values()) == {3}
    pool = forest(strict_reference=False)
    fail(pool, 5, prompt=(1,))
    state = grow(pool, [5], 1)
    pool.observe_node(state, 0, 8, 2, [as_ids([5, 6])] * 5)
    assert [len(failure.state_ids) for failure in served(pool, 8, 1)] == [2, 1] * 4


def test_a_tree_has_only_so_many_events_in_flight_but_those_at_rest_do_not_count():
    pool = forest(strict_reference=False)
    pool.observe_root(problem(0, (1,)), 0, 8, 1, [as_ids([5, 6])] * 8)
    first, second = pool.dispatch(1, 1) + pool.dispatch(1, 1)
    assert pool.dispatch(5, 1) == [] and pool.pending() == 6
    pool.rest(first)
    [third] = pool.dispatch(5, 1)
    assert pool.dispatch(5, 1) == []
    pool.requeue(first)  # put back from its rest: it had given its place up already
    assert pool.dispatch(5, 1) == []
    pool.resolve(second, None, 1)
    assert len(pool.dispatch(5, 1)) == 1
    check(pool)
    assert not pool.withdraw(third)
    pool.observe_root(problem(0, (1,)), 8, 8, 2, [])
    assert pool.withdraw(third) and pool.withdraw(third), "the state is mastered: no answer could be used"
    assert pool.metrics()["teacher/events_stale_parent_inactive"] == 1
    check(pool)


@pytest.fixture
def lived() -> Forest:
    """One tree: its root fails (step 1), is observed twice more, gets a state (step 3), which is mastered with its second group
    (step 5); the root is observed again, better."""
    pool = forest()
    pool.observe_root(problem(), 0, 4, 1, [as_ids([5, 6])] * 4)  # makes the tree
    pool.observe_root(problem(), 1, 4, 2, [as_ids([5, 7])])
    pool.observe_root(problem(), 2, 4, 3, None)
    state = grow(pool, [5], 3)
    pool.observe_node(state, 3, 4, 4, [as_ids([6, 6])])
    pool.observe_node(state, 4, 4, 5, None)
    pool.observe_root(problem(), 3, 4, 6, None)
    return pool


def test_root_transfer_leaves_out_the_group_that_made_the_tree(lived):
    metrics = lived.metrics()
    assert metrics["transfer/trees"] == 1
    before, after = 3 / 8, 3 / 4
    assert metrics["transfer/root_success_before"] == pytest.approx(before, abs=1e-9)
    assert metrics["transfer/root_success_after"] == pytest.approx(after, abs=1e-9)
    assert metrics["transfer/gain"] == pytest.approx(after - before, abs=1e-9)
    lived.observe_root(problem(), 4, 4, 7, None)
    assert lived.metrics()["transfer/root_success_after"] == pytest.approx(7 / 8, abs=1e-9)


def test_a_tree_that_is_gone_still_counts():
    pool = forest()
    for number, (k_before, k_after) in enumerate([(0, 4), (2, 3)]):
        pool.observe_root(problem(number, (1, 2, number)), 0, 4, 1, [as_ids([5, 6])])
        pool.observe_root(problem(number, (1, 2, number)), k_before, 4, 2, None)
        pool.observe_node(grow(pool, [5], 3), 4, 4, 4, None)
        pool.observe_root(problem(number, (1, 2, number)), k_after, 4, 5, None)
        pool.observe_root(problem(number, (1, 2, number)), 4, 4, 6, None)
    assert pool.cleanup() == 2 and len(pool) == 0
    metrics = pool.metrics()
    assert metrics["transfer/trees"] == 2
    assert metrics["transfer/root_success_before"] == pytest.approx((0 / 4 + 2 / 4) / 2, abs=1e-9)
    assert metrics["transfer/root_success_after"] == pytest.approx((8 / 8 + 7 / 8) / 2, abs=1e-9)


def test_mastery_and_waiting(lived):
    metrics = lived.metrics()
    assert (metrics["mastery/nodes"], metrics["mastery/visits_mean"], metrics["mastery/steps_mean"]) == (1, 2, 5 - 3)
    assert metrics["mastery/unfailed_share"] == 0 and metrics["mastery/reopened_roots"] == 0
    assert metrics["mastery/first_node_step"] == 3 and metrics["mastery/first_node_wait_mean"] == 3 - 1
    assert metrics["mastery/node_event_age_mean"] == 3 - 2  # the newest failure of the root was of step 2
    # Of the five failures of the root one was corrected; that of the retired state cannot be dispatched.
    ages = lived.event_ages(10)
    assert ages == {f"teacher/event_age_{name}": 9 for name in ("mean", "max", "p50", "p90")}
    lived.observe_root(problem(), 4, 4, 8, None)
    assert lived.event_ages(10) == {}
    lived.observe_root(problem(), 0, 4, 9, [as_ids([8])])
    assert lived.metrics()["mastery/reopened_roots"] == 1
    assert lived.event_ages(10)["teacher/event_age_mean"] == pytest.approx((4 * 9 + 1) / 5)
    assert lived.event_ages(10)["teacher/event_age_p50"] == 9


def test_depths_count_active_states():
    pool = forest()
    pool.observe_root(problem(), 0, 2, 1, [as_ids([5, 6, 7, 8])])
    nodes = []
    for step in range(2, 9):
        nodes.append(grow(pool, [step], step))
        pool.observe_node(nodes[-1], 0, 2, step, [as_ids([5])])
    metrics = pool.metrics()
    assert [metrics[f"forest_depth/{d}"] for d in (1, 2, 3, 4)] == [1] * 4 and metrics["forest_depth/from_5"] == 3
    assert metrics["forest_depth/mean"] == 4 and metrics["forest_depth/max"] == 7
    pool.observe_node(nodes[-1], 2, 2, 9, None)
    assert pool.metrics()["forest_depth/max"] == 6 and pool.metrics()["mastery/unfailed_share"] == 0


def test_what_is_known_of_a_node(lived):
    lived.observe_root(problem(), 0, 4, 9, [as_ids([8, 8])])
    child = grow(lived, [8], 10)
    about = lived.look_up(child)
    assert about["ids"].tolist() == [1, 2, 8] and about["depth_edges"] == 1 and about["created_step"] == 10
    assert about["suffix_ids"].tolist() == [9] and about["reward"] == 1.0 and about["root_success_rate"] == 0.0
    root = lived.look_up(about["tree"])
    assert root["parent"] is None and root["suffix_ids"] is None and root["descendants"] == 2
    assert lived.look_up(99) == {}
