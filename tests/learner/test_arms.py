"""The arms of teacher tokens and the early stop, through the learner's real update."""

import dataclasses

import jax
import numpy as np
import pytest

from deepgrpo.learner.optim import Optim
from tests.learner import tiny

POST = dict(objective__teacher_loss="sft", objective__teacher_update="post_ppo", objective__kl_coef=0.0)
POST |= dict(objective__teacher_reduction="separate_stream_mean")


def learner_of(**keys):
    return tiny.make_learner(**dict(learner__buckets=(24,), objective__kl_coef=0.0) | keys)


def test_null_and_sft_train_students_to_the_same_bits():
    """Teacher rows of a step change nothing in either arm; then the sft arm's own steps train on them alone."""
    students, teachers = tiny.make_rows(6), tiny.teacher_rows(5, coef=1.0)
    null, sft = learner_of(), learner_of(**POST)
    for learner in (null, sft):
        learner.update(students + teachers, 0)
    assert tiny.same(null.policy, sft.policy) and tiny.same(null.state["adam"], sft.state["adam"])
    alone = learner_of()
    alone.programs = null.programs
    alone.update(students, 0)
    assert tiny.same(null.state, alone.state)

    with pytest.raises(ValueError, match="teacher_update=post_ppo"):
        null.update_teacher(teachers, 0)
    assert sft.update_teacher(teachers[:3], 0)[1] == []  # fewer than optim.teacher.mini_batch_rows
    sft.config.optim.teacher.mini_batch_rows, sft.config.optim.teacher.allow_partial = 5, True
    before = jax.device_get(sft.state)
    logps = np.concatenate(sft.score([(row.prompt_ids, row.response_ids) for row in teachers]))
    resumed = learner_of(**POST)  # from a save between the PPO steps and the teacher's
    resumed.programs, resumed.config = sft.programs, sft.config
    resumed.restore(before)
    metrics, succeeded = sft.update_teacher(students + teachers, 0)
    assert succeeded == [True] and metrics["actor/post_sft_optimizer_steps"] == 1
    assert metrics["actor/teacher_chain/post_sft_loss"] == pytest.approx(-logps.mean(), rel=1e-5)
    assert metrics["actor/teacher_chain/mb_tokens"] == len(logps) and metrics["actor/teacher_chain/mb_samples"] == 5
    assert tiny.same(before["adam"], sft.state["adam"]) and int(sft.state["teacher_adam"]["count"]) == 1
    assert resumed.update_teacher(teachers, 0) == (metrics, [True]) and tiny.same(resumed.state, sft.state)
    after = np.concatenate(sft.score([(row.prompt_ids, row.response_ids) for row in teachers]))
    assert after.mean() > logps.mean() and sft.host_state()["schedule_step"] == 1


def test_the_optimizer_of_teacher_steps_inherits():
    section = dict(lr=0.1, schedule="cosine", warmup_steps=3, b2=0.9, weight_decay=0.2, grad_clip=2.0)
    for own, lr in ((-1.0, 0.1), (0.5, 0.5)):
        expected = Optim(**section | dict(lr=lr, schedule="constant", warmup_steps=0))
        assert Optim.of_teacher(section | {"teacher": {"lr": own}}) == expected


@pytest.mark.parametrize("arm", ["luffy", "snis"])
def test_an_all_fail_group_gives_students_no_gradient(arm):
    """Exactly none, to the bit; its teacher row is all that moves the policy."""
    learner = learner_of(objective__teacher_loss=arm, optim__weight_decay=0.0)
    failed = [dataclasses.replace(row, advantage=0.0) for row in tiny.make_rows(4)]
    assert learner.update(failed, 0)["actor/grad_norm"] == 0.0 and tiny.same(learner.policy, tiny.parameters())
    metrics = learner.update(failed + tiny.teacher_rows(1, coef=0.8), 1)
    assert metrics["actor/grad_norm"] > 0.0 and metrics["actor/main_chain/pg_loss"] == 0.0
    assert metrics[f"actor/teacher_chain/{arm}_loss"] != 0.0


def test_steps_after_the_policy_has_moved_too_far_are_void():
    """Three epochs over one mini-batch: the first step moves the policy, the others find that it did. The next update trains."""
    stopping = learner_of(objective__kl_stop=1e-9, optim__ppo_epochs=3)
    rows = tiny.make_rows(4)
    for step in (0, 1):
        metrics = stopping.update(rows, step)
        assert metrics["actor/kl_stopped_steps"] == 2 and metrics["actor/optimizer_steps"] == 1
        assert metrics["actor/total_mini_batch_steps"] == 3 and metrics["actor/ppo_kl_k3"] == 0.0
    once = learner_of()
    for step in (0, 1):
        once.update(rows, step)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), stopping.policy, once.policy)
    assert int(stopping.state["adam"]["count"]) == 2 and stopping.host_state()["optimizer_steps"] == 2


def test_the_automatic_coefficient_lives_in_the_state():
    """Each mini-batch is weighed with the value before it, of which 0.9 stays; all of it after a gradient that is not finite."""
    keys = dict(objective__teacher_loss="sft", objective__teacher_reduction="separate_stream_mean")
    learner = learner_of(objective__auto_teacher_coef=True, **keys)
    students, teachers = tiny.make_rows(4), tiny.teacher_rows(2, coef=1.0)
    metrics = learner.update(students + teachers, 0)
    ratio = abs(metrics["actor/main_chain/pg_loss"] / metrics["actor/teacher_chain/sft_loss"])
    assert metrics["actor/teacher_chain/auto_coef"] == pytest.approx(0.1)
    loss = metrics["actor/main_chain/pg_loss"] + 0.1 * metrics["actor/teacher_chain/sft_loss"]
    assert metrics["actor/total_loss"] == pytest.approx(loss, rel=1e-4)
    moved = float(learner.state["auto_coef"])
    assert moved == pytest.approx(0.09 + 0.1 * ratio, rel=1e-4)
    learner.update(students, 1)  # without teacher tokens there is nothing to compare
    assert float(learner.state["auto_coef"]) == moved
    broken = [dataclasses.replace(row, advantage=1e25) for row in students]  # of an infinite norm
    learner.update(broken + teachers, 2)
    assert float(learner.state["auto_coef"]) == moved
