"""Branching from the student's own responses: golden expansions, rounds, feedback, resume."""

import dataclasses

import numpy as np
import pytest

from deepgrpo.curriculum.branches import BranchBuffer
from deepgrpo.types import Prompt, as_ids
from tests.conftest import golden_cases
from tests.curriculum.branch_run import branching, dataset_prompt, golden_rows, in_order, problem, roll, scored, setting
from tests.curriculum.replay import point

POINTS = {"n_branch_points": 2}


def assert_rows(found, expected, tolerance):
    expected = in_order(expected)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert {key: ours[key] for key in theirs if key != "advantage"} == {k: v for k, v in theirs.items() if k != "advantage"}
        assert ours["advantage"] == pytest.approx(theirs["advantage"], abs=tolerance["atol"], rel=tolerance["rtol"])


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"branch_expansion_inline"}))
def test_golden_inline(case):
    inputs, expected = case["inputs"], case["expected"]
    parties = setting(inputs["script"], inputs["max_model_len"])
    curriculum = branching("branches_inline", inputs)
    groups = roll(parties, [dataset_prompt(inputs)])
    groups += roll(parties, curriculum.expand(groups, 1))
    assert curriculum.expand(groups, 1) == []
    rows = golden_rows(groups)
    for name in ("main_rows", "branch_rows"):
        assert_rows(rows[name], expected[name], case["tolerance"])
    assert len({group.prompt.group_id for group in groups}) == len(groups)
    assert curriculum.observe(groups, 1)["branching/points"] == len(groups) - 1


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"branch_one_stage_collect"}))
def test_golden_collect(case):
    inputs, expected = case["inputs"], case["expected"]
    curriculum = branching("branches", inputs)
    groups = roll(setting(inputs["script"]), [dataset_prompt(inputs)])
    metrics = curriculum.observe(groups, 1)
    assert_rows(golden_rows(groups)["main_rows"], expected["main_rows"], case["tolerance"])
    found = [(p.index, p.chain_length, p.state_ids.tolist()) for p in curriculum.buffer.entries]
    points = [(p["index"], p["chain_length"], p["prompt_ids"] + p["response_ids"]) for p in expected["branch_points"]]
    assert sorted(found) == sorted(points) and metrics["buffer/new_points_collected"] == len(points)
    failed = [rollout.completion.ids.tolist() for group in groups for rollout in group.failures(0.0)]
    assert sorted(failed) == sorted(row["response_ids"] for row in expected["failed"])


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"branch_one_stage_expand"}))
def test_golden_expand(case):
    """A buffered point is continued from its context alone."""
    inputs, expected = case["inputs"], case["expected"]
    curriculum = branching("branches", {"n_branch_points": 1, "branches_per_entry": inputs["branches_per_entry"]})
    curriculum.min_index = 1
    context = inputs["context_prompt_ids"] + inputs["context_response_ids"]
    origin = Prompt(as_ids(context[:1]), problem(context[:1]), 1, "0:0")
    response = scored([0.0], origin, length=len(context) + 2)  # one segment that ends with the context, and one more
    ids = as_ids([*context[1:], 5, 6, 99])
    rollout = response.rollouts[0]
    rollout = dataclasses.replace(rollout, completion=dataclasses.replace(rollout.completion, ids=ids))
    curriculum.partition = dataclasses.replace(curriculum.partition, tokens_per_node=len(context) - 1)
    curriculum.observe([dataclasses.replace(response, rollouts=(rollout,))], 0)
    (state,) = curriculum.sample(curriculum.num_to_inject(8), 1)
    groups = roll(setting(inputs["script"]), [Prompt(state.ids, state.problem, state.n, "1:state:0", state.node, state.stream)])
    assert_rows(golden_rows(groups)["branch_rows"], expected["branch_rows"], case["tolerance"])
    assert expected["teacher_rows"] == [] and curriculum.continuation(state.node) is None
    assert curriculum.observe(groups, 1)["buffer/entries_sampled"] == 1


def main_group(rewards, step=1, length=9):
    row = problem()
    return scored(rewards, Prompt(row.prompt_ids, row, len(rewards), f"{step}:0"), length)


def test_only_failures_with_a_verdict_are_branched_and_never_branches():
    curriculum = branching("branches_inline", POINTS, branches_per_point=4)
    group = main_group([0.0, 1.0, None, 0.0])
    prompts = curriculum.expand([group], 1)
    assert [p.ids[3] for p in prompts if len(p.ids) > 3] and len(prompts) == 2 * 2
    assert {int(p.ids[-1]) for p in prompts if len(p.ids) > 3} <= {40, 43}  # the first and the last response
    assert all(p.n == 4 and p.stream == "branch" and p.node.kept == p.locked for p in prompts)
    branches = [scored([0.0, 1.0, 0.0, 0.0], prompt) for prompt in prompts]
    assert curriculum.expand([group, *branches], 1) == []
    assert branching("branches_inline", POINTS | {"expand_only_on_low_quality": False}).expand([main_group([1.0])], 1)


def test_the_model_learns_from_judged_branches():
    curriculum = branching("branches_inline", POINTS)
    prompts = [dataclasses.replace(p, n=2) for p in curriculum.expand([main_group([0.0, 0.0])], 1)]
    outcomes = map(scored, [[0.0, 0.0], [0.0, 1.0], [None, None], [None, 0.0]], prompts)
    metrics = curriculum.observe([main_group([0.0, 0.0]), *outcomes], 1)
    judged, learned = [prompts[i].node.ratio for i in (0, 1, 3)], curriculum.model.state()
    assert learned["ratios"] == judged and learned["labels"] == [False, True, False]
    assert metrics["branching/points"] == 3 and metrics["branching/recovered_share"] == pytest.approx(1 / 3)
    assert metrics["branching/contrast_share"] == pytest.approx(1 / 3)
    assert metrics["branching/avg_position_ratio"] == pytest.approx(np.mean(judged))


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"branch_buffer"}))
def test_golden_buffer(case):
    inputs = dict(case["inputs"])
    steps = inputs.pop("steps")
    buffer = BranchBuffer(**inputs)
    for step, expected in zip(steps, case["expected"]["after_each"], strict=True):
        buffer.add([point(entry["id"], entry["tree"], entry["len"]) for entry in step["add"]], step["step"])
        assert [p.kept for p in buffer.entries] == expected["ids"]
        metrics = buffer.metrics()
        assert {name: metrics[name] for name in expected["stats"]} == pytest.approx(expected["stats"])


def test_what_is_dropped_is_counted():
    buffer = BranchBuffer(20, max_size=2, max_age=1, min_remaining_ratio=0.5)
    assert buffer.add([point(0, "a", 5), point(1, "a", 11)], 1) == 1
    buffer.add([point(i, "a", 5) for i in (2, 3, 4)], 2)
    buffer.add([], 3)
    counts = {"refused_room": 1, "dropped_age": 0, "dropped_capacity": 2}
    assert {name: buffer.metrics()[f"buffer/{name}"] for name in counts} == counts
    buffer.add([], 4)
    assert len(buffer) == 0 and buffer.metrics()["buffer/dropped_age"] == 2
    assert buffer.sample(3, np.random.default_rng(0)) == []
