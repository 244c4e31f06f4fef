"""Losses, advantages and teacher coefficients against the golden numbers, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import objective as losses
from deepgrpo.learner import rows as advantages_lib
from deepgrpo.learner import token_losses
from deepgrpo.learner.objective import NO_LOSS, SUFFIX_SFT, TEACHER, Objective
from deepgrpo.learner.training_rows import attach_teacher
from tests.conftest import golden_cases
from tests.learner.mini_batch import shares, slots_of


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def close(actual, expected, case):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), **case["tolerance"], err_msg=case["name"])


def arrays(inputs, *names):
    return [jnp.asarray(inputs[name], jnp.float64) for name in names]


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"group_advantage"}))
def test_group_advantage(case):
    inputs, mask = case["inputs"], np.array(case["inputs"]["response_mask"], float)
    values = advantages_lib.group_advantages(inputs["rewards"], inputs["group_ids"], inputs["mode"])[:, None] * mask
    close(values, case["expected"]["advantages"], case)
    if "keep_rows" in case["expected"]:
        assert np.flatnonzero(np.abs(values).sum(1) > 1e-8).tolist() == case["expected"]["keep_rows"]


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"whiten_advantages"}))
def test_whiten(case):
    values, mask = (np.array(case["inputs"][name], float) for name in ("advantages", "response_mask"))
    close(advantages_lib.whiten(values, mask), case["expected"]["advantages"], case)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"snis_weight"}))
def test_snis_weight(case):
    inputs = case["inputs"]
    weight = advantages_lib.snis_weight(inputs["student_rewards"], inputs["teacher_reward"], inputs["beta"])
    close(weight, case["expected"]["weight"], case)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"ppo_clip_token", "kl_token", "luffy_token"}))
def test_token_losses(case):
    inputs, expected = case["inputs"], dict(case["expected"])
    if case["kind"] == "ppo_clip_token":
        old, advantages = arrays(inputs, "old_log_prob", "advantages")
        clip = [inputs[name] for name in ("clip_low", "clip_high", "clip_c")]
        names, function = (
            ("loss", "clipped", "ppo_kl", "clipped_lower"),
            lambda x: token_losses.ppo_clip_token(x - old, advantages, *clip),
        )
    elif case["kind"] == "kl_token":
        (reference,) = arrays(inputs, "ref_log_prob")
        names, function = ("kl",), lambda x: (token_losses.kl_token(x, reference, inputs["kl_type"]),)
    else:
        (advantages,) = arrays(inputs, "advantages")
        names, function = ("loss", "weight"), lambda x: token_losses.luffy_token(x, advantages, inputs["gamma"])
    (logp,) = arrays(inputs, "log_prob")
    close(jax.grad(lambda x: function(x)[0].sum())(logp), expected.pop("grad_log_prob_of_sum"), case)
    for name, value in zip(names, function(logp), strict=True):
        close(value, expected.pop(name), case)
    assert not expected


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"agg_loss"}))
def test_aggregate(case):
    total, weight = losses.aggregate(*arrays(case["inputs"], "loss", "mask"), case["inputs"]["mode"])
    close(total / weight, case["expected"]["value"], case)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"minibatch_loss"}))
def test_minibatch_loss(case):
    inputs, config, expected = case["inputs"], case["inputs"]["config"], dict(case["expected"])
    o = Objective(
        clip_low=config["clip_ratio_low"], clip_high=config["clip_ratio_high"], clip_c=config["clip_ratio_c"],
        kl_coef=config["kl_loss_coef"] if config["use_kl_loss"] else 0.0, kl_type=config["kl_loss_type"],
        teacher_loss=config["teacher_loss_type"] or "null", teacher_update=config["teacher_update_mode"],
        teacher_reduction=config["teacher_loss_reduction"], teacher_coef=config["teacher_loss_coef"],
        auto_teacher_coef=config["auto_teacher_loss_coef"], branch_lambda=config["branch_chain_loss_lambda"],
        luffy_gamma=config["luffy_gamma"],
    )  # fmt: skip
    mask = jnp.asarray(inputs["response_mask"])
    source = jnp.where(mask > 0, jnp.asarray(inputs["sources"])[:, None], NO_LOSS)
    logp, old, reference, advantages = arrays(inputs, "log_prob", "old_log_prob", "ref_log_prob", "advantages")
    slots = slots_of(source, advantages=advantages, teacher_coef=advantages, ref_logp=reference)
    auto = o.auto_coef_init if o.auto_teacher_coef else 1.0
    tokens, totals, total = shares(o, slots, old, config["micro_batch_size"], auto)
    (loss, (sums, parts)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logp)
    metrics = jax.jit(lambda sums, tokens: losses.loss_metrics(sums, tokens, totals, o, auto))(sums, tokens)
    close(loss, expected.pop("loss"), case)
    close(metrics["total_loss"], loss, case)
    close(grad, expected.pop("grad_log_prob"), case)
    if "ema_auto_coef_after" in expected:  # the reference passes the parts of each micro-batch
        after = losses.auto_teacher_coef(auto, *parts.T, o.auto_coef_decay)
        close(after, expected.pop("ema_auto_coef_after"), case)
        close(metrics["teacher_chain/auto_coef"], expected.pop("auto_coef_used"), case)
    ours = {
        "pg_loss_main": "main_chain/pg_loss",
        "pg_loss_branch": "branch_chain/pg_loss",
        "mixed_token_loss_metric": "mixed_token_loss",
        "teacher_loss": f"teacher_chain/{o.teacher_loss}_loss",
    }
    ours |= {name: f"teacher_chain/{name}" for name in ("mean_logp", "mean_shaping_weight", "snis_weight_mean")}
    for name, value in expected.items():
        close(metrics[ours.get(name, name)], value, case)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"sft_minibatch"}))
def test_sft_minibatch(case):
    logp, mask = arrays(case["inputs"], "log_prob", "response_mask")
    slots = slots_of(jnp.where(mask > 0, TEACHER, NO_LOSS))
    (loss, _), grad = jax.value_and_grad(shares(SUFFIX_SFT, slots, 0 * logp, 1)[2], has_aux=True)(logp)
    close(loss, case["expected"]["loss"], case)
    close(grad, case["expected"]["grad_log_prob"], case)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"teacher_attach"}))
def test_attachment(case):
    inputs, expected = case["inputs"], case["expected"]
    attachment = attach_teacher(
        inputs["student_rewards"],
        inputs["teacher_reward"],
        inputs["teacher_suffix_ids"],
        teacher_loss=inputs["teacher_loss_type"] or "null",
        threshold=inputs["reward_threshold"],
        snis_beta=inputs["snis_beta"],
        stop_ids=(inputs["eos_token_id"],),
    )
    students = len(inputs["student_rewards"])
    untouched = [inputs["incoming_student_advantage_sentinel"]] * students
    close(untouched if attachment.advantages is None else attachment.advantages, expected["student_advantage"], case)
    counters = dict.fromkeys(expected["counters"], 0)
    counters["student_rows_reweighted"] = students if attachment.advantages is not None else 0
    if attachment.outcome in counters:
        counters[attachment.outcome] = 1
    assert counters == expected["counters"]
    if expected["teacher_row"] is None:
        assert attachment.coef is None and attachment.response_ids is None
    else:
        close(attachment.coef, expected["teacher_row"]["coef"], case)
        assert attachment.response_ids.tolist() == expected["teacher_row"]["response_ids"]
