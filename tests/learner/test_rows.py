"""From scored groups to rows."""

import numpy as np
import pytest

from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.objective import MAIN
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.conftest import golden_cases
from tests.learner import tiny


def group(rewards, name="g", locked=(), index=3) -> Group:
    """A group with one rollout a reward; the prompt is [1, 2] and a locked prefix."""
    problem = Problem(index, "toy", as_ids([1, 2]), "", "")
    prompt = Prompt(as_ids([1, 2, *locked]), problem, len(rewards), name, node=object() if locked else None)
    completions = [Completion(as_ids([5, 6 + i]), np.full(2, -0.5, np.float32), "stop", 0) for i in range(len(rewards))]
    grades = [Grade(reward, True, "toy") for reward in rewards]
    return Group(prompt, tuple(Rollout(c, g) for c, g in zip(completions, grades, strict=True)))


def test_advantages_are_relative_to_the_verdicts_of_the_group():
    rows = rows_lib.rows_from_groups(
        [group([1.0, None, 0.0, 0.0]), group([None, None]), group([1.0, 0.0], "h", (7,))], "group_mean"
    )
    assert [row.advantage for row in rows] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5])
    assert [row.response_ids[1] for row in rows] == [6, 8, 9, 6, 7]
    assert [(row.group_id, row.dataset_index, row.injected) for row in rows[2:4]] == [("g", 3, False), ("h", -1, True)]
    assert rows[3].prompt_ids.tolist() == [1, 2, 7] and all(row.source == MAIN for row in rows)


def test_groups_without_a_contrast_leave_and_teacher_rows_stay():
    student = rows_lib.rows_from_groups([group([0.0, 0.0]), group([0.4, 0.4, 0.4]), group([1.0, 0.0], "h")], "group_mean")
    teacher = tiny.teacher_rows(2, coef=0.5)
    kept = rows_lib.keep_rows(student + teacher)
    assert [row.group_id for row in kept] == ["h", "h"] + [row.group_id for row in teacher]
    counts = rows_lib.filter_metrics(student + teacher, kept)
    assert counts["data/main_chain_count"] == 2 and counts["data/main_chain/filtered_count"] == 5
    assert counts["data/teacher_chain_count"] == 2 and counts["data/teacher_chain/filtered_count"] == 0


def test_data_metrics():
    rows = rows_lib.rows_from_groups([group([1.0, 0.0]), group([1.0, 1.0], "h", (7, 8, 9))], "group_mean")
    metrics = rows_lib.data_metrics(rows, max_model_len=7)
    assert metrics["critic/main_chain/rewards/mean"] == 0.75 and metrics["critic/main_chain_original/rewards/mean"] == 0.5
    assert metrics["prompt_length/main_chain_synthetic/max"] == 5 and metrics["response_length/main_chain/min"] == 2
    assert metrics["sequence_length/main_chain/clip_ratio"] == 0.5
    assert not any("teacher" in name for name in metrics)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"teacher_attach"}))
def test_golden_attachment(case):
    inputs, expected = case["inputs"], case["expected"]
    attachment = rows_lib.attach_teacher(
        inputs["student_rewards"],
        inputs["teacher_reward"],
        inputs["teacher_suffix_ids"],
        teacher_loss=inputs["teacher_loss_type"] or "null",
        threshold=inputs["reward_threshold"],
        snis_beta=inputs["snis_beta"],
        eos_id=inputs["eos_token_id"],
    )
    students = len(inputs["student_rewards"])
    untouched = [inputs["incoming_student_advantage_sentinel"]] * students
    advantages = untouched if attachment.advantages is None else attachment.advantages
    np.testing.assert_allclose(advantages, expected["student_advantage"], **case["tolerance"])
    counters = dict.fromkeys(expected["counters"], 0)
    counters["student_rows_reweighted"] = students if attachment.advantages is not None else 0
    if attachment.outcome in counters:
        counters[attachment.outcome] = 1
    assert counters == expected["counters"]
    if expected["teacher_row"] is None:
        assert attachment.coef is None and attachment.response_ids is None
    else:
        np.testing.assert_allclose(attachment.coef, expected["teacher_row"]["coef"], **case["tolerance"])
        assert attachment.response_ids.tolist() == expected["teacher_row"]["response_ids"]


def test_attachment_by_hand():
    def attach(students, teacher, **changes):
        fields = dict(teacher_loss="luffy", threshold=0.0, snis_beta=1.0, eos_id=9) | changes
        return rows_lib.attach_teacher(students, teacher, [4, 9], **fields)

    assert attach([0.0] * 8, 1.0).coef == pytest.approx(8 / 9)
    assert attach([0.0] * 8, 1.0, teacher_loss="snis").coef == pytest.approx(2.283, abs=1e-3)
    assert attach([0.0] * 8, 1.0).response_ids.tolist() == [4, 9]
    assert attach([0.0, 1.0], 1.0).outcome == "teacher_not_better_skipped"
    assert attach([0.0, 0.0], None).outcome == "missing_reward_skipped"
    assert attach([], 1.0).outcome == "no_student_rows_skipped"
    assert attach([0.0], 1.0, teacher_loss="null").outcome == "no_teacher_loss"
