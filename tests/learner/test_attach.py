"""Teacher rows on injected groups."""

import math

import numpy as np
import pytest

from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner import training_rows
from deepgrpo.learner.objective import TEACHER
from deepgrpo.types import as_ids
from tests.learner.test_rows import group

SUFFIX = as_ids([4, 9])
FIELDS = dict(threshold=0.0, snis_beta=1.0, stop_ids=(9, 8))


def decide(students, teacher, suffix=SUFFIX, **changes):
    return training_rows.attach_teacher(students, teacher, suffix, **dict(teacher_loss="luffy") | FIELDS | changes)


def test_decisions_by_hand():
    assert decide([0.0] * 8, 1.0).coef == pytest.approx(8 / 9)
    assert decide([0.0] * 8, 1.0, teacher_loss="snis").coef == pytest.approx(2.283, abs=1e-3)
    assert decide([0.0, 1.0], 1.0).outcome == "teacher_not_better_skipped"
    assert decide([0.0, 0.0], None).outcome == "missing_reward_skipped"
    assert decide([0.0], 1.0, None).outcome == decide([0.0], 1.0, []).outcome == "missing_suffix_skipped"
    assert decide([], 1.0).outcome == "no_student_rows_skipped"
    assert decide([0.0], 0.0).outcome == "low_reward_teacher_skipped"
    assert decide([0.0], 1.0, room=1).outcome == "suffix_too_long_skipped"
    assert decide([0.0], 1.0, teacher_loss="null").outcome == "no_teacher_loss"


def test_a_suffix_is_closed_once():
    closed = {(4, 9): [4, 9], (4, 8): [4, 8], (4,): [4, 9]}
    assert {ids: decide([0.0], 1.0, ids).response_ids.tolist() for ids in closed} == closed


def test_a_suffix_as_a_row_of_its_own():
    row = training_rows.suffix_row(as_ids([1, 2]), as_ids([4]), None, (9, 8), "node:3")
    assert (row.source, row.teacher_coef, row.response_ids.tolist()) == (TEACHER, 1.0, [4, 9]) and math.isnan(row.reward)


def test_snis_weights_do_not_depend_on_a_shift_and_are_positive():
    plain, shifted = (decide([s, s + 0.5, s], s + 1, threshold=-1e3, teacher_loss="snis").coef for s in (0.0, 70.0))
    assert plain == pytest.approx(shifted) and 0.0 < plain <= math.e
    assert decide([0.0] * 8, 1.0, teacher_loss="snis", snis_beta=1e-3).coef == pytest.approx(9.0)


def attached(groups, continuations, teacher_loss="luffy"):
    rows = rows_lib.rows_from_groups(groups, "group_mean")
    out, metrics = training_rows.add_teacher_rows(
        rows, groups, continuations, teacher_loss=teacher_loss, max_model_len=16, **FIELDS
    )
    assert all(a is b for a, b in zip(out, rows, strict=False))  # students stay as they are
    return out[len(rows) :], metrics


def test_rows_and_counters():
    solved, failed, lost = (group(r, name, (7,)) for r, name in (([1.0, 0.0], "a"), ([0.0, 0.0, 0.0], "b"), ([0.0], "c")))
    groups = [group([0.0, 1.0]), solved, failed, lost]
    known = {solved.prompt.node: (SUFFIX, 1.0), failed.prompt.node: (as_ids([4, 4, 9]), 1.0)}
    found = training_rows.find_continuations(groups, known.get)
    assert found.keys() == {"a", "b"}
    (row,), metrics = attached(groups, found)
    assert (row.source, row.group_id, row.dataset_index, row.teacher_coef) == (TEACHER, "b", -1, 0.75)
    assert row.prompt_ids.tolist() == [1, 2, 7] and row.response_ids.tolist() == [4, 4, 9] and row.rollout_logps is None
    expected = dict(candidate_groups=3, teacher_rows_built=1, teacher_not_better_skipped=1, missing_suffix_skipped=1)
    expected |= dict(student_rows_reweighted=5, mixed_token_count=8 * 2 + 3, teacher_token_fraction=3 / 19, len_ratio=1.5)
    expected |= dict(teacher_reward_mean=1.0, student_reward_mean=0.25, baseline_mean=(2 / 3 + 0.25) / 2, snis_weight_mean=0.0)
    expected |= dict(teacher_advantage_mean=(1 / 3 + 0.75) / 2, teacher_positive_advantage_rate=1.0, low_reward_teacher_skipped=0)
    assert {name: metrics[f"prefix_luffy/{name}"] for name in expected} == pytest.approx(expected)


def test_joining_needs_room_and_takes_the_configured_advantage():
    whole = group([0.0, 0.0, 1.0], "b", (7,))
    rows = rows_lib.rows_from_groups([whole], "rloo")
    fields = dict(teacher_loss="luffy", advantage="rloo", stop_ids=(9,))
    out, metrics = training_rows.add_teacher_to_groups(rows, [whole], {"b": (SUFFIX, 1.0)}, max_model_len=5, **fields)
    assert [row.advantage for row in out[:3]] == pytest.approx([-2 / 3, -2 / 3, 2 / 3]) and out[3].teacher_coef == pytest.approx(
        2 / 3
    )
    assert metrics == {"teacher/rows_built": 1.0, "teacher/suffix_too_long": 0.0, "teacher/no_student_verdict": 0.0}
    out, metrics = training_rows.add_teacher_to_groups(rows, [whole], {"b": (SUFFIX, 1.0)}, max_model_len=4, **fields)
    assert out == rows and metrics["teacher/suffix_too_long"] == 1.0


def test_arms():
    groups = [group([0.0, 0.0], "b", (7,))]
    found = training_rows.find_continuations(groups, lambda node: (SUFFIX, 1.0))
    none, metrics = attached(groups, found, "null")
    assert none == [] and metrics["prefix_luffy/student_rows_reweighted"] == 2 and metrics["prefix_luffy/teacher_rows_built"] == 0
    (row,), metrics = attached(groups, found, "snis")
    assert row.teacher_coef == metrics["prefix_luffy/snis_weight_max"] == pytest.approx(3 * math.e / (2 + math.e))
    empty, metrics = attached([group([0.0, 1.0])], {})
    assert empty == [] and not any(
        value for name, value in metrics.items() if not name.endswith(("enabled", "mixed_token_count"))
    )
    assert np.isfinite(list(metrics.values())).all()
