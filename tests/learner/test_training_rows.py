"""A step's rows by the configuration: teacher rows, rows that leave, whitening; and what is said when none are left."""

import logging

import numpy as np
import pytest

from configs import common
from deepgrpo.learner.objective import MAIN, TEACHER
from deepgrpo.learner.training_rows import IDLE_STEPS, Idle, training_rows
from deepgrpo.types import as_ids
from tests.learner.test_rows import group

SUFFIX = as_ids([4, 9])


def of(arm: str, **changes):
    config = common.get_config()
    common.edit(config, common.TEACHER_ARMS, arm)
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    dataset, failed = group([0.0, 1.0]), group([0.0, 0.0], "b", (7,))
    rows, metrics = training_rows([dataset, failed], {failed.prompt.group_id: (SUFFIX, 1.0)}, config, (9,), Idle())
    return [(row.source, round(row.advantage, 6), round(row.teacher_coef, 6)) for row in rows], metrics


STUDENTS = [(MAIN, -0.5, 0.0), (MAIN, 0.5, 0.0)]


def test_arms_differ_in_teacher_rows_alone():
    assert of("null")[0] == of("sft")[0] == STUDENTS  # the injected group failed as a whole: it has no gradient
    assert of("luffy")[0] == [*STUDENTS, (TEACHER, 0.0, round(2 / 3, 6))]
    weight = 3 * np.e / (2 + np.e)
    assert of("snis")[0] == [*STUDENTS, (TEACHER, 0.0, round(weight, 6))]
    metrics = of("luffy")[1]
    assert metrics["prefix_luffy/teacher_rows_built"] == metrics["data/teacher_chain_count"] == 1
    assert metrics["data/main_chain/filtered_count"] == 2
    assert of("null")[1]["prefix_luffy/candidate_groups"] == 1 and not any(k.startswith("prefix_luffy") for k in of("sft")[1])


@pytest.mark.parametrize("keep, rows", [("drop", 2), ("keep", 4)])
def test_rows_without_gradient(keep, rows):
    assert len(of("null", objective__zero_gradient_rows=keep)[0]) == rows


def test_whitening_and_long_answers():
    whitened, _ = of("sft", objective__whiten=True)
    assert np.isclose(sum(advantage for _, advantage, _ in whitened), 0) and whitened[1][1] > 0.5
    assert of("sft", objective__overlong="mask")[1]["data/overlong_masked"] == 0


def test_why_nothing_trains_is_said_once_a_stretch(caplog):
    """Groups that are all alike are ordinary for a while; answers without any verdict never are."""
    config, idle = common.get_config(), Idle()

    def steps(count, *groups):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(count):
                training_rows(groups, {}, config, (9,), idle)
        return [record.message for record in caplog.records]

    alike, mixed, unknown = group([0.0, 0.0]), group([0.0, 1.0]), group([None, None])
    assert steps(IDLE_STEPS - 1, alike) == []
    (said,) = steps(3 * IDLE_STEPS, alike)
    assert f"no update in the last {IDLE_STEPS} steps: none of 1 groups has a contrast" in said
    assert "again, after" in steps(2, mixed)[0]
    (said,) = steps(5, unknown)
    assert "no update in this step: none of 2 rollouts has a verdict" in said
