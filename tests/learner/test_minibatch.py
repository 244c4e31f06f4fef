"""Cutting a step's rows into optimizer steps."""

import numpy as np
import pytest

from configs import common
from deepgrpo.learner.minibatch import injection_count, interleave, most_rows, partition, shuffled, step_rows
from tests.conftest import golden_cases


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"minibatch_partition"}))
def test_golden_partition(case):
    inputs, expected = case["inputs"], case["expected"]
    plan = partition(
        tuple(inputs[name] for name in ("n_main", "n_branch", "n_teacher")),
        inputs["mini_batch_rows"],
        strict_reference=True,
        teacher_mini_batch_rows=inputs["teacher_mini_batch_rows"],
        post_ppo=inputs["teacher_update_mode"] == "post_ppo",
        mixed=inputs["teacher_loss_reduction"] == "mixed_token_mean",
        allow_partial=inputs["teacher_allow_partial_batch"],
        ppo_epochs=inputs["ppo_epochs"],
    )
    assert [{"kind": part.kind, "rows": list(part.rows)} for part in plan] == expected["steps"]
    ppo = [part for part in plan if part.kind == "ppo"]
    counters = {
        "total_mini_batch_steps": len(ppo),
        "optimizer_steps": len(ppo),
        "post_sft_optimizer_steps": len(plan) - len(ppo),
        "steps_with_main": sum(part.rows[0] > 0 for part in plan),
        "steps_with_branch": sum(part.rows[1] > 0 for part in plan),
        "steps_with_teacher": sum(part.rows[2] > 0 for part in plan),
    }
    assert {f"actor/{name}": value for name, value in counters.items()} == expected["counters"]


@pytest.mark.parametrize("n_main, n_branch, n_teacher", [(0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 0, 2), (100, 7, 5), (300, 60, 2)])
def test_no_row_is_lost(n_main, n_branch, n_teacher):
    plan = partition((n_main, n_branch, n_teacher), 128)
    assert [sum(part.rows[s] for part in plan) for s in range(3)] == [n_main, n_branch, n_teacher]
    assert len(plan) == (max(1, n_main // 128) if n_main + n_branch + n_teacher else 0)


def test_default_is_the_reference_where_the_reference_trains():
    for n_main in (128, 191, 300, 1152):
        assert partition((n_main, 0, 5), 128) == partition((n_main, 0, 5), 128, strict_reference=True)
    assert partition((100, 0, 5), 128, strict_reference=True) == []


GROUPS = [name for name in "abcdef" for _ in range(4)]


def test_groups_stay_together():
    orders = [shuffled(GROUPS, "groups", 0, step) for step in range(3)]
    for order in orders:
        assert sorted(order) == list(range(24))
        names = [GROUPS[i] for i in order]
        assert sum(a != b for a, b in zip(names, names[1:], strict=False)) == 5  # each is one run
        assert all(a < b for a, b in zip(order, order[1:], strict=False) if GROUPS[a] == GROUPS[b])
    assert orders[0] != orders[1] and orders[0] == shuffled(GROUPS, "groups", 0, 0) != shuffled(GROUPS, "groups", 1, 0)


def test_rows_are_the_references_permutation():
    order = shuffled(GROUPS, "rows", 3, 5)
    assert order == np.random.default_rng((3, 5, 1)).permutation(24).tolist()


@pytest.mark.parametrize("main, other", [(5, 0), (8, 2), (15, 2), (16, 0), (40, 3)])
def test_no_mini_batch_is_larger_than_promised(main, other):
    sizes = [sum(part.rows) for n in range(main + 1) for part in partition((n, 0, other), 8)]
    assert max(sizes) == most_rows(main, other, 8)


def test_rows_of_a_step():
    config = common.get_config()
    assert step_rows(config) == ((128 + 32) * 8, 0)
    config.curriculum.rollout_n, config.objective.teacher_loss = 16, "luffy"
    assert step_rows(config) == (128 * 8 + 32 * 16, 32)
    config.curriculum.injection_mode, config.curriculum.rollout_n = "replace", 2
    assert step_rows(config) == (128 * 8, 32)  # before there are any states
    config.curriculum.pool = "none"
    assert step_rows(config) == (1024, 0)


@pytest.mark.parametrize(
    "pool, other", [("branches_inline", 16 * 8 * 8), ("branches", 32 * 4), ("suffixes", 128 * 4)], ids=lambda x: str(x)
)
def test_rows_of_a_step_with_branches(pool, other):
    config = common.get_config()
    config.curriculum.pool = pool
    assert step_rows(config) == (1024, other)
    config.objective.teacher_loss = "luffy"
    assert step_rows(config) == (1024, other + (128 if pool == "suffixes" else 0))


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"injection_composition"}))
def test_golden_injection(case):
    inputs, expected = case["inputs"], case["expected"]
    b = inputs["train_batch_size"]
    n = injection_count(b, inputs["injection_ratio"], inputs["ready_trees"], strict_reference=True)
    assert (b, n) == (expected["n_dataset_prompts"], expected["n_injected_prompts"])
    rollouts = b * inputs["rollout_n"] + n * inputs["prefix_rollout_n"]
    assert rollouts == expected["n_rollouts_documented"]


def test_injection_count_does_not_lose_a_state_to_rounding():
    assert injection_count(100, 0.29, 99) == 29
    assert injection_count(100, 0.29, 99, strict_reference=True) == 28
    assert injection_count(128, 0.25, 7) == 7
    assert injection_count(3, 0.25, 50) == 0


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"interleave"}))
def test_golden_interleave(case):
    assert interleave(case["inputs"]["counts"], case["inputs"]["world_size"]) == case["expected"]["order"]
