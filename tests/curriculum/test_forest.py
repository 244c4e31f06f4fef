"""The forest as the training loop sees it: groups of a step in, states, work for the teacher and metrics out."""

import dataclasses
import importlib

import numpy as np
import pytest

from deepgrpo.curriculum import forest, none
from deepgrpo.curriculum.base import Correction
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids

WRONG, RIGHT, NO_VERDICT = 0.0, 1.0, None


def problem(index: int, prompt=(1, 2)) -> Problem:
    return Problem(index, "test", as_ids(prompt), "", "")


def group(problem: Problem, rewards, state=None, right_prefix=None) -> Group:
    """Rollout i has response [10 + i, 20 + i, 30 + i]."""
    prefixes = right_prefix or [None] * len(rewards)
    rollouts = []
    for i, (reward, prefix) in enumerate(zip(rewards, prefixes, strict=True)):
        completion = Completion(as_ids([10 + i, 20 + i, 30 + i]), np.zeros(3, np.float32), "stop", 0)
        rollouts.append(Rollout(completion, Grade(reward, True, "", right_prefix=prefix)))
    ids, node = (problem.prompt_ids, None) if state is None else (state.ids, state.node)
    return Group(Prompt(ids, problem, len(rewards), f"g{problem.index}", node), tuple(rollouts))


def curriculum(**arguments) -> forest.ForestCurriculum:
    return forest.ForestCurriculum(Forest(max_model_len=100), threshold=0.0, **arguments)


def correct(made: forest.ForestCurriculum, failure, step: int, prefix: int = 1) -> str:
    ids = failure.response_ids
    return made.resolve(failure, Correction(ids[:prefix], as_ids([7, 0]), 1.0, ids[prefix:]), step)


def test_a_step_of_groups():
    made = curriculum()
    first = problem(0)
    metrics = made.observe([group(first, [WRONG, WRONG, RIGHT]), group(problem(1, (3,)), [RIGHT] * 3)], step=1)
    assert metrics["forest_pool/root_groups_seen_this_step"] == 2
    assert metrics["forest_pool/root_fail_groups_this_step"] == metrics["forest_pool/root_trees_created_this_step"] == 1
    assert metrics["forest_pool/root_events_added_this_step"] == metrics["synthetic_inject/failed_collected"] == 2
    assert (made.pending(), made.ready()) == (2, 0)

    (failure,) = made.dispatch(1, step=1)
    assert failure.problem is first and failure.response_ids.tolist() == [11, 21, 31]  # the newest
    assert correct(made, failure, step=1, prefix=2) == "child_created"
    (state,) = made.sample(5, step=2)
    assert state.ids.tolist() == [1, 2, 11, 21] and state.problem is first
    (node,) = made.pool.describe()[0]["nodes"][1:]
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
    made = curriculum()
    metrics = made.observe([group(problem(0), [RIGHT, RIGHT]), group(problem(1), [WRONG, RIGHT]), group(problem(2), [WRONG])], 1)
    assert metrics["forest_pool/root_groups_seen_this_step"] == 1 and metrics["forest_pool/observations_recorded_this_step"] == 0
    (tree,) = made.pool.describe()
    assert (tree["nodes"][0]["last_k_succ"], tree["nodes"][0]["last_k_total"]) == (3, 5)
    assert tree["problem"].index == 1 and len(tree["events"]) == 2  # the first that failed


def test_rollouts_without_a_verdict_are_no_evidence():
    made = curriculum()
    metrics = made.observe([group(problem(0), [NO_VERDICT] * 2), group(problem(1, (3,)), [NO_VERDICT, WRONG])], 1)
    assert metrics["forest_pool/groups_without_verdict_this_step"] == 1
    assert metrics["synthetic_inject/failure_feed_skipped"] == 0
    (tree,) = made.pool.describe()
    assert tree["nodes"][0]["last_k_total"] == len(tree["events"]) == 1
    assert made.observe([group(problem(0), [NO_VERDICT])], 2)["synthetic_inject/failure_feed_skipped"] == 1


def test_only_the_longest_right_prefix_is_sent():
    made = curriculum(failures="longest_prefix")
    rewards, prefixes = [RIGHT, WRONG, WRONG, WRONG, WRONG], [99, 3, 8, 8, None]
    metrics = made.observe([group(problem(0), rewards, right_prefix=prefixes)], 1)
    assert metrics["synthetic_inject/failed_collected"] == 4
    assert [failure.response_ids[0] for failure in made.dispatch(9, 1)] == [12]
    assert made.pending() == 0
    with pytest.raises(ValueError, match="right_prefix.*curriculum.failures=all"):
        made.observe([group(problem(1, (3,)), [WRONG])], 2)
    with pytest.raises(ValueError, match="one of all, longest_prefix"):
        curriculum(failures="some")


def test_exhausted_trees_are_removed_around_a_step():
    made = curriculum()
    made.observe([group(problem(0), [WRONG])], 1)
    (failure,) = made.dispatch(1, 1)
    made.observe([group(problem(0), [RIGHT])], 2)
    assert made.resolve(failure, None, 2) == "stale_parent_inactive"
    assert made.sample(1, 3) == [] and len(made.pool) == 0
    assert made.observe([], 3)["forest_pool/trees_cleaned_pre_sample"] == 1
    assert correct(made, failure, 3) == "stale_unknown_event"
    with pytest.raises(ValueError, match="step must be >= 0"):
        made.sample(1, -1)


def test_creation_from_the_configuration():
    config = importlib.import_module("configs.common").get_config()
    config.curriculum.max_events_per_parent = 3
    made = forest.create(config)
    bounds = {
        name: getattr(made.pool.bounds, name) for name in ("max_model_len", "min_remaining_tokens", "max_events_per_parent")
    }
    assert bounds == {"max_model_len": 1024, "min_remaining_tokens": 32, "max_events_per_parent": 3}
    plain = none.create(config)
    assert (plain.wanted(8), plain.pending()) == (0, 0)
    assert (plain.sample(3, 1), plain.observe([], 1), plain.dispatch(1, 1)) == ([], {}, [])


def test_counters_are_in_the_metrics():
    names = {field.name for field in dataclasses.fields(Forest()._counters)} - {"deactivated"}
    pool = Forest()
    for number, name in enumerate(sorted(names)):
        setattr(pool._counters, name, 100 + number)
    assert set(range(100, 100 + len(names))) <= set(pool.metrics().values())
