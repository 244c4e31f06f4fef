"""The learner as the training loop sees it: update, score, state."""

import dataclasses

import jax
import numpy as np
import pytest

from deepgrpo.learner.learner import Learner
from deepgrpo.types import as_ids
from tests.learner import tiny


def snapshot(learner: Learner):
    return jax.device_get(learner.state), learner.host_state()


def test_update_resumes_to_the_bit():
    """Warm-up, cosine, two mini-batches, KL: five steps at once equal three, a save through host memory, and two more."""
    keys = dict(optim__warmup_steps=2, optim__schedule="cosine", objective__kl_coef=0.1)
    steps = [tiny.make_rows(17, seed=s) for s in range(5)]
    whole, first = tiny.make_learner(**keys), tiny.make_learner(**keys)
    expected = [whole.update(rows, step) for step, rows in enumerate(steps)]
    for step in range(3):
        first.update(steps[step], step)
    saved, counters = snapshot(first)
    second = tiny.make_learner(**keys)
    second.restore(jax.tree.map(np.copy, saved))
    second.restore_host(counters)
    resumed = [second.update(steps[step], step) for step in (3, 4)]
    assert tiny.same(whole.state, second.state) and whole.host_state() == second.host_state()
    for a, b in zip(expected[3:], resumed, strict=True):
        timeless = [{k: v for k, v in m.items() if not k.startswith(("timing_s", "perf"))} for m in (a, b)]
        assert timeless[0] == timeless[1]
    assert [m["actor/lr"] for m in expected[:3]] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert expected[0]["actor/total_mini_batch_steps"] == 2 and expected[4]["perf/new_compilations"] == 0
    assert tiny.same(whole.state["reference"], tiny.parameters())  # neither donated nor trained, and not the caller's arrays


def test_score_at_another_temperature():
    pair = [(row.prompt_ids, row.response_ids) for row in tiny.make_rows(2, seed=3)]
    cold, plain = tiny.make_learner(rollout__temperature=0.7), tiny.make_learner()
    for a, b, c in zip(cold.score(pair, at_temperature_1=True), plain.score(pair), cold.score(pair), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert np.abs(a - c).max() > 1e-2


def test_score_is_the_policys_log_prob():
    rows = tiny.make_rows(7, seed=3)
    learner = tiny.make_learner((1, 8, 1))
    scores = learner.score([(row.prompt_ids, row.response_ids) for row in rows] + [(as_ids([1]), as_ids([]))])
    tokens, segments, scored = tiny.alone(rows)
    dense = tiny.dense_logps(tiny.parameters(), tiny.model_config(), tokens, segments)
    for i in range(len(rows)):
        np.testing.assert_allclose(scores[i], np.asarray(dense)[i][scored[i] > 0], atol=2e-5)
    assert scores[-1].shape == (0,)


def test_without_rows_nothing_changes():
    learner = tiny.make_learner()
    before = snapshot(learner)
    (row,) = tiny.make_rows(1)
    truncated_to_nothing = dataclasses.replace(row, response_ids=as_ids([]), rollout_logps=np.zeros(0, np.float32))
    for rows in ([], [truncated_to_nothing], tiny.teacher_rows(2, 1.0)):
        metrics = learner.update(rows, 0)
        assert metrics["training/all_chains_empty_skip"] == 1 and metrics["actor/lr_scheduler_step"] == 0
    assert tiny.same(before[0], learner.state)
    assert learner.host_state() == before[1] | {"skipped_updates": 3}


def test_a_small_batch_trains_unless_the_reference_is_meant():
    rows = tiny.make_rows(3)
    assert tiny.make_learner(objective__kl_coef=0.0).update(rows, 0)["actor/optimizer_steps"] == 1
    skipped = tiny.make_learner(strict=True).update(rows, 0)
    assert skipped["training/skipped_updates"] == 1 and skipped["actor/optimizer_steps"] == 0


def test_rows_without_advantage_are_pulled_to_the_reference():
    """With the KL term on; with it off they give no gradient, to the bit (test_arms)."""
    rows = [dataclasses.replace(row, advantage=0.0) for row in tiny.make_rows(4)]
    pulled = tiny.make_learner(objective__kl_coef=0.1)
    pulled.update(tiny.make_rows(4), 0)  # away from the reference
    assert pulled.update(rows, 1)["actor/grad_norm"] > 0.0


def test_metrics_of_the_old_policy():
    """The first mini-batch is on policy, later ones and epochs are not; the engine's log-probs are compared with the old ones."""
    rows = tiny.make_rows(8)
    scores = tiny.make_learner().score([(row.prompt_ids, row.response_ids) for row in rows])
    rows = [dataclasses.replace(row, rollout_logps=logps + 0.25) for row, logps in zip(rows, scores, strict=True)]
    once = tiny.make_learner().update(rows, 0)
    assert once["actor/ppo_kl"] == 0.0 and once["actor/total_mini_batch_steps"] == 1 and once["timing_s/old_log_prob"] < 0.1
    assert once["rollout_mismatch/abs_mean"] == pytest.approx(0.25, abs=1e-4) == once["rollout_mismatch/abs_max"]
    assert once["rollout_mismatch/k3"] == pytest.approx(np.exp(-0.25) - 1 + 0.25, abs=1e-4)
    twice = tiny.make_learner(optim__ppo_epochs=2).update(rows, 0)
    assert twice["actor/ppo_kl"] != 0.0 and twice["actor/total_mini_batch_steps"] == 2
    assert twice["rollout_mismatch/abs_mean"] == once["rollout_mismatch/abs_mean"]


def test_teacher_rows_share_the_denominator():
    learner = tiny.make_learner(objective__teacher_loss="luffy", objective__kl_coef=0.0)
    students, teachers = tiny.make_rows(4), tiny.teacher_rows(2, coef=0.5)
    with jax.transfer_guard("disallow"):
        metrics = learner.update(students + teachers, 0)
    tokens = [sum(len(row.response_ids) for row in rows) for rows in (students, teachers)]
    assert [metrics["actor/main_chain/mb_tokens"], metrics["actor/teacher_chain/mb_tokens"]] == tokens
    parts = metrics["actor/main_chain/pg_loss"] * tokens[0] + metrics["actor/teacher_chain/luffy_loss"] * tokens[1]
    assert metrics["actor/total_loss"] == pytest.approx(parts / sum(tokens), rel=1e-4)
    assert metrics["actor/steps_with_teacher"] == 1


def test_bad_input_is_named():
    (row,) = tiny.make_rows(1)
    learner = tiny.make_learner()
    with pytest.raises(ValueError, match="expected below 40 .* and 32"):
        learner.update([dataclasses.replace(row, response_ids=as_ids([35]), rollout_logps=None)], 0)
    with pytest.raises(ValueError, match="prompt is empty"):
        learner.update([dataclasses.replace(row, prompt_ids=as_ids([]))], 0)
    with pytest.raises(ValueError, match="has parts .'params'., expected"):
        learner.restore({"params": learner.policy})
    other = tiny.make_learner(config=tiny.model_config(width=32))
    with pytest.raises(ValueError, match="adam/mu/embed_tokens/embedding: stored float32.40, 16., expected float32.40, 32."):
        other.restore(learner.state)
