"""Metrics of optimizer steps, from results as the device gives them."""

import numpy as np
import pytest

from deepgrpo.learner import objective as losses
from deepgrpo.learner import report, training_rows
from deepgrpo.learner.objective import Objective
from deepgrpo.loops.ahead import sample_dynamically
from tests.learner import tiny
from tests.telemetry.test_documented import documented

ROWS = tiny.make_rows(3)


def result(loss, norm=1.0, **more):
    return {"actor": {"total_loss": loss}, "tokens": np.array([5.0, 0.0, 0.0]), "grad_norm": norm} | more


def test_void_steps_are_only_counted():
    results = [result(1.0), result(3.0, np.inf), result(100.0, kl_stopped=True)]
    results[0]["kl_stopped"] = results[1]["kl_stopped"] = False
    metrics = report.actor_metrics(results, [ROWS], 0.5)
    assert report.count_steps(results) == (1, 1)
    assert metrics["actor/total_loss"] == 2.0 and metrics["actor/kl_stopped_steps"] == 1 and metrics["actor/optimizer_steps"] == 1
    assert metrics["actor/total_mini_batch_steps"] == 3 and metrics["actor/steps_with_main"] == 2
    assert metrics["actor/grad_clipfrac"] == 1.0  # of the two that were tried
    assert "actor/kl_stopped_steps" not in report.actor_metrics([result(1.0)], [ROWS], 1.0)


def names_of(objective: Objective) -> set[str]:
    counted = "loss kl entropy_loss clipped approx_kl lower tis shaping logp entropy coef moved"
    counted += " ratio_clampfrac kl_clipfrac tis_capfrac shaping_clampfrac"
    sums = dict.fromkeys(counted.split(), np.ones(3))
    return set(losses.loss_metrics(sums, np.ones(3), np.ones(3), objective))


@pytest.mark.parametrize("teacher_loss", ["null", "sft", "luffy", "snis"])
def test_every_metric_is_documented(teacher_loss):
    everything = dict(
        entropy_coef=0.1, kl_stop=1.0, tis_cap=2.0, teacher_reduction="separate_stream_mean", auto_teacher_coef=True
    )
    names = {f"actor/{name}" for name in names_of(Objective(teacher_loss=teacher_loss, **everything))}
    teacher = {"actor": dict.fromkeys(("post_sft_loss", "mean_logp", "entropy"), 0.0)}
    names |= report.teacher_metrics([result(0.0) | teacher], [ROWS], 0.1).keys()
    names |= report.actor_metrics([result(0.0, kl_stopped=False)], [ROWS], 1.0).keys()
    names |= training_rows.attachment_metrics([], [], [], teacher_loss).keys()
    names |= training_rows.add_teacher_to_groups(
        [], [], {}, teacher_loss=teacher_loss, advantage="group_mean", stop_ids=(0,), max_model_len=1
    )[1].keys()
    names |= sample_dynamically(lambda prompts, number: [], [], lambda *_: [], 1).metrics.keys()
    known = documented()
    assert not [name for name in names if not known.fullmatch(name)]
