"""The objective against golden numbers and against float64 NumPy written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import objective as losses
from deepgrpo.learner.objective import BRANCH, MAIN, NO_LOSS, TEACHER, Objective
from tests.conftest import golden_cases


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def objective(**changes) -> Objective:
    released = dict(clip_low=0.2, clip_high=0.28, clip_c=3.0, kl_coef=1e-4, kl_type="low_var_kl", teacher_loss="null")
    released |= dict(teacher_reduction="mixed_token_mean", teacher_coef=1.0, branch_lambda=1.0, luffy_gamma=0.1)
    return Objective(**released | changes)


def close(actual, expected, case):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), **case["tolerance"], err_msg=case["name"])


def arrays(inputs, *names):
    return [jnp.asarray(inputs[name], jnp.float64) for name in names]


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"group_advantage"}))
def test_group_advantage(case):
    inputs, mask = case["inputs"], np.array(case["inputs"]["response_mask"], float)
    advantages = losses.group_advantages(inputs["rewards"], inputs["group_ids"], inputs["mode"])[:, None] * mask
    close(advantages, case["expected"]["advantages"], case)
    if "keep_rows" in case["expected"]:
        assert np.flatnonzero(np.abs(advantages).sum(1) > 1e-8).tolist() == case["expected"]["keep_rows"]


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"whiten_advantages"}))
def test_whiten(case):
    advantages, mask = (np.array(case["inputs"][name], float) for name in ("advantages", "response_mask"))
    close(losses.whiten(advantages, mask), case["expected"]["advantages"], case)


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"snis_weight"}))
def test_snis_weight(case):
    inputs = case["inputs"]
    close(
        losses.snis_weight(inputs["student_rewards"], inputs["teacher_reward"], inputs["beta"]), case["expected"]["weight"], case
    )


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"ppo_clip_token", "kl_token", "luffy_token"}))
def test_token_losses(case):
    inputs, expected = case["inputs"], dict(case["expected"])
    if case["kind"] == "ppo_clip_token":
        old, advantages = arrays(inputs, "old_log_prob", "advantages")
        clip = [inputs[name] for name in ("clip_low", "clip_high", "clip_c")]
        names, function = (
            ("loss", "clipped", "ppo_kl", "clipped_lower"),
            lambda x: losses.ppo_clip_token(x, old, advantages, *clip),
        )
    elif case["kind"] == "kl_token":
        (reference,) = arrays(inputs, "ref_log_prob")
        names, function = ("kl",), lambda x: (losses.kl_token(x, reference, inputs["kl_type"]),)
    else:
        (advantages,) = arrays(inputs, "advantages")
        names, function = ("loss", "weight"), lambda x: losses.luffy_token(x, advantages, inputs["gamma"])
    (logp,) = arrays(inputs, "log_prob")
    close(jax.grad(lambda x: function(x)[0].sum())(logp), expected.pop("grad_log_prob_of_sum"), case)
    for name, value in zip(names, function(logp), strict=True):
        close(value, expected.pop(name), case)
    assert not expected


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"agg_loss"}))
def test_aggregate(case):
    total, weight = losses.aggregate(*arrays(case["inputs"], "loss", "mask"), case["inputs"]["mode"])
    close(total / weight, case["expected"]["value"], case)


def shares(o, source, columns, rows_each, auto_coef=1.0):
    """Loss, gradient, metrics and the parts for the automatic coefficient of a mini-batch, summed over micro-batches of rows."""
    tokens = losses.count_tokens(source).astype(jnp.float64)
    weights = losses.stream_weights(tokens, o, auto_coef)
    unit = losses.stream_weights(tokens, o, 1.0 / o.teacher_coef)[0]

    def total(logp):
        loss, sums, parts = 0.0, None, []
        for start in range(0, len(source), rows_each):
            rows = slice(start, start + rows_each)
            share, s = losses.loss_share(logp[rows], 0 * logp[rows], *(c[rows] for c in columns), source[rows], weights, o)
            loss, sums = loss + share, s if sums is None else jax.tree.map(jnp.add, sums, s)
            parts.append(unit * s["loss"])
        return loss, (sums, jnp.stack(parts))

    return tokens, total


@pytest.mark.parametrize("case", golden_cases("losses_*.json", {"minibatch_loss"}))
def test_minibatch_loss(case):
    inputs, config, expected = case["inputs"], case["inputs"]["config"], dict(case["expected"])
    o = objective(
        clip_low=config["clip_ratio_low"], clip_high=config["clip_ratio_high"], clip_c=config["clip_ratio_c"],
        kl_coef=config["kl_loss_coef"] if config["use_kl_loss"] else 0.0, kl_type=config["kl_loss_type"],
        teacher_loss=config["teacher_loss_type"] or "null", teacher_reduction=config["teacher_loss_reduction"],
        teacher_coef=config["teacher_loss_coef"], branch_lambda=config["branch_chain_loss_lambda"],
        luffy_gamma=config["luffy_gamma"],
    )  # fmt: skip
    mask = jnp.asarray(inputs["response_mask"])
    source = jnp.where(mask > 0, jnp.asarray(inputs["sources"])[:, None], NO_LOSS)
    logp, old, reference, advantages = arrays(inputs, "log_prob", "old_log_prob", "ref_log_prob", "advantages")
    auto = 0.1 if config["auto_teacher_loss_coef"] else 1.0
    tokens, total = shares(o, source, (old, reference, advantages, advantages), config["micro_batch_size"], auto)
    (loss, (sums, parts)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logp)
    metrics = jax.jit(lambda sums, tokens: losses.loss_metrics(sums, tokens, o, auto))(sums, tokens)
    close(loss, expected.pop("loss"), case)
    close(metrics["total_loss"], loss, case)
    close(grad, expected.pop("grad_log_prob"), case)
    if "ema_auto_coef_after" in expected:  # the reference passes the parts of each micro-batch
        after = losses.auto_teacher_coef(auto, parts[:, MAIN] + parts[:, BRANCH], parts[:, TEACHER], 0.9)
        close(after, expected.pop("ema_auto_coef_after"), case)
        close(auto, expected.pop("auto_coef_used"), case)
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
    source, zeros = jnp.where(mask > 0, TEACHER, NO_LOSS), jnp.zeros_like(logp)
    o = objective(teacher_loss="sft", teacher_reduction="separate_stream_mean", kl_coef=0.0)
    (loss, _), grad = jax.value_and_grad(shares(o, source, (zeros,) * 4, 1)[1], has_aux=True)(logp)
    close(loss, case["expected"]["loss"], case)
    close(grad, case["expected"]["grad_log_prob"], case)


def test_released_objective_is_two_token_means():
    rng = np.random.default_rng(0)
    logp, old, reference, advantages = rng.normal(-1.0, 0.5, (4, 5, 7))
    mask = rng.random((5, 7)) < 0.6
    source = jnp.where(mask, MAIN, NO_LOSS)
    o = objective(kl_coef=0.3)
    _, total = shares(o, source, [jnp.asarray(x) for x in (old, reference, advantages, advantages)], 2)
    ratio = np.exp(logp - old)
    ppo = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    ppo = np.where(advantages < 0, np.minimum(ppo, -3.0 * advantages), ppo)
    k3 = np.exp(reference - logp) - (reference - logp) - 1.0
    np.testing.assert_allclose(total(jnp.asarray(logp))[0], ppo[mask].mean() + 0.3 * k3[mask].mean(), rtol=1e-7)


def test_advantages_by_hand():
    rewards, groups = [1.0, 0.0, 0.3, 0.3, 0.3, 5.0], ["a", "a", "b", "b", "b", "c"]
    np.testing.assert_array_equal(losses.group_advantages(rewards, groups, "group_mean"), [0.5, -0.5, 0, 0, 0, 0])
    std = losses.group_advantages(rewards, groups, "grpo_std")
    np.testing.assert_allclose(std, [0.5**0.5, -(0.5**0.5), 0, 0, 0, 5.0], rtol=1e-5)
    assert losses.snis_weight([0.0] * 8, 1.0, 1.0) == pytest.approx(9 * np.e / (8 + np.e))
    with pytest.raises(ValueError, match="advantage mode 'median'"):
        losses.group_advantages(rewards, groups, "median")


@pytest.mark.parametrize("cap", [1.5, 0.7])
def test_truncated_importance_sampling(cap):
    """Student tokens' PPO loss times min(p_old / p_rollout, cap); not KL, not teacher tokens, not where p_rollout is unknown."""
    rng = np.random.default_rng(3)
    logp, old, rollout, reference = rng.normal(-2.0, 0.5, (4, 3, 8))
    advantages, source = rng.normal(size=(3, 8)), rng.choice([MAIN, BRANCH, TEACHER, NO_LOSS], (3, 8))
    rollout[0, :3] = np.nan
    o = objective(tis_cap=cap, teacher_loss="sft", kl_coef=0.1)
    weights = losses.stream_weights(losses.count_tokens(source).astype(jnp.float64), o)
    columns = (0 * logp, old, reference, advantages, advantages, source, weights, o, rollout)
    share, gradient = jax.value_and_grad(lambda x: losses.loss_share(x, *columns)[0])(jnp.asarray(logp))

    w = np.where(np.isnan(rollout), 1.0, np.minimum(np.exp(old - rollout), cap))
    ratio, (a, b, t) = np.exp(logp - old), (np.sum(source == s) for s in (MAIN, BRANCH, TEACHER))
    ppo = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    ppo = np.where(advantages < 0, np.minimum(ppo, -3.0 * advantages), ppo)
    student, teacher = np.isin(source, (MAIN, BRANCH)), source == TEACHER
    x = reference - logp
    expected = ((w * ppo)[student].sum() - logp[teacher].sum()) / (a + b + t) + 0.1 * (np.exp(x) - x - 1)[student].sum() / (a + b)
    np.testing.assert_allclose(share, expected, rtol=1e-7)

    free = student & (ratio > 0.8) & (ratio < 1.28)
    slope = (-w * advantages * ratio / (a + b + t) + 0.1 * (1 - np.exp(x)) / (a + b))[free]
    np.testing.assert_allclose(np.asarray(gradient)[free], slope, rtol=1e-6)


@pytest.mark.parametrize(
    "change", [{"kl_type": "k9"}, {"teacher_loss": "bc"}, {"teacher_reduction": "mean"}, {"clip_c": 1.0}, {"tis_cap": -1.0}]
)
def test_an_unknown_choice_is_named(change):
    with pytest.raises(ValueError, match=f"objective.{next(iter(change))} is"):
        objective(**change)
