"""The loss of a mini-batch against float64 NumPy written from the papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from deepgrpo.learner import objective as losses
from deepgrpo.learner.objective import BRANCH, MAIN, NO_LOSS, TEACHER, Objective
from deepgrpo.learner.token_losses import moved_token, sequence_log_ratio
from deepgrpo.preflight import values
from tests.learner.mini_batch import shares, slots_of


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


LENGTHS = [7, 1, 4, 6, 2]  # a row's scored tokens come first
MASK = np.arange(7) < np.array(LENGTHS)[:, None]
RNG = np.random.default_rng(0)
OLD, REFERENCE = RNG.normal(-1.0, 0.5, (2, 5, 7))
LOGP = OLD + RNG.normal(0.0, 0.2, (5, 7))
A = np.broadcast_to(RNG.normal(size=(5, 1)), (5, 7))  # of a whole row
ROWS = len(LENGTHS)


def ppo(log_ratio, low, high):
    """Clipped surrogate with the dual clip at 3, of each token."""
    ratio = np.exp(log_ratio)
    loss = np.maximum(-A * ratio, -A * np.clip(ratio, 1 - low, 1 + high))
    return np.where(A < 0, np.minimum(loss, -3.0 * A), loss)


def value_and_gradient(o, logp=LOGP, mask=MASK, rows_each=2, entropy=None, **arrays):
    slots = slots_of(np.where(mask, MAIN, NO_LOSS), **dict(advantages=A, ref_logp=REFERENCE) | arrays)
    tokens, totals, total = shares(o, slots, jnp.asarray(OLD), rows_each, entropy=entropy)
    (loss, (sums, _)), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp))
    np.testing.assert_allclose(losses.loss_metrics(sums, tokens, totals, o)["total_loss"], loss, rtol=1e-12)
    return float(loss), np.asarray(gradient), losses.loss_metrics(sums, tokens, totals, o)


def numeric(function, logp=LOGP, h=1e-6):
    """Central differences of a scalar function of [B, R]."""
    gradient = np.zeros_like(logp)
    for i in np.ndindex(logp.shape):
        step = np.zeros_like(logp)
        step[i] = h
        gradient[i] = (function(logp + step) - function(logp - step)) / (2 * h)
    return gradient


def test_released_objective_is_two_token_means():
    x = REFERENCE - LOGP
    loss, _, _ = value_and_gradient(Objective(kl_coef=0.3))
    expected = ppo(LOGP - OLD, 0.2, 0.28)[MASK].mean() + 0.3 * (np.exp(x) - x - 1.0)[MASK].mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-7)
    assert Objective() == Objective.from_config(common.get_config().objective)


def test_sequence_mean_is_the_mean_of_row_means():
    """GRPO as first published (Shao et al. 2024): 1/G sum_i 1/|o_i| sum_t."""
    token = ppo(LOGP - OLD, 0.2, 0.28)
    expected = np.mean([token[i, :n].mean() for i, n in enumerate(LENGTHS)])
    loss, _, metrics = value_and_gradient(Objective(kl_coef=0.0, aggregation="sequence_mean"))
    np.testing.assert_allclose([loss, metrics["pg_loss"]], expected, rtol=1e-7)


def test_dr_grpo_divides_by_a_constant():
    """Dr. GRPO (Liu et al. 2025): the sum over tokens over rows times a fixed length, KL likewise."""
    token, x = ppo(LOGP - OLD, 0.2, 0.28), REFERENCE - LOGP
    expected = (token + 0.1 * (np.exp(x) - x - 1.0))[MASK].sum() / (ROWS * 50)
    loss, _, _ = value_and_gradient(Objective(kl_coef=0.1, aggregation="dr_grpo", length_constant=50))
    np.testing.assert_allclose(loss, expected, rtol=1e-7)


def gspo(logp):
    """GSPO (Zheng et al. 2025): the clipped surrogate of s_i = exp(1/|y_i| sum_t log ratio_t), mean over rows."""
    s = np.array([(logp - OLD)[i, :n].mean() for i, n in enumerate(LENGTHS)])[:, None]
    return ppo(np.broadcast_to(s, A.shape), 0.05, 0.06)[:, 0].mean()


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token"])
def test_gspo(ratio):
    """Both variants have the value, and for one advantage a row the gradient, of the paper's objective."""
    o = Objective(kl_coef=0.0, ratio=ratio, aggregation="sequence_mean", sequence_clip_low=0.05, sequence_clip_high=0.06)
    loss, gradient, metrics = value_and_gradient(o)
    np.testing.assert_allclose(loss, gspo(LOGP), rtol=1e-7)
    np.testing.assert_allclose(gradient, numeric(gspo), atol=1e-7)
    assert 0.0 < metrics["pg_clipfrac"] < 1.0 and not gradient[~MASK].any()


def test_sequence_ratio_of_packed_rows():
    """Responses that share a packed row do not share a ratio; empty slots are nobody's."""
    x = np.array([[1.0, 2.0, 6.0, 5.0, 9.0]])
    sample, share = np.array([[1, 1, 2, 3, 0]]), np.array([[0.5, 0.5, 1.0, 1.0, 0.0]])
    out = sequence_log_ratio(jnp.asarray(x), jnp.asarray(sample), jnp.asarray(share), False)
    np.testing.assert_allclose(out, [[1.5, 1.5, 6.0, 5.0, 0.0]])


def test_entropy_bonus():
    o = Objective(kl_coef=0.0, entropy_coef=0.2)
    loss, gradient, metrics = value_and_gradient(o, entropy=lambda logp: logp**2)  # stands for the entropy of the distribution
    plain, slope, _ = value_and_gradient(Objective(kl_coef=0.0))
    np.testing.assert_allclose(loss, plain - 0.2 * (LOGP**2)[MASK].mean(), rtol=1e-7)
    np.testing.assert_allclose(gradient[MASK], (slope - 0.4 * LOGP / MASK.sum())[MASK], rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy_loss"], (LOGP**2)[MASK].mean(), rtol=1e-7)


def test_how_far_the_policy_has_moved():
    d = LOGP - OLD
    _, _, metrics = value_and_gradient(Objective(kl_coef=0.0, kl_stop=1.0))
    np.testing.assert_allclose(metrics["ppo_kl_k3"], (np.exp(d) - 1 - d)[MASK].mean(), rtol=1e-7)
    assert float(moved_token(jnp.zeros(1))[0]) == 0.0


@pytest.mark.parametrize("cap", [1.5, 0.7])
def test_truncated_importance_sampling(cap):
    """Student tokens' PPO loss times min(p_old / p_rollout, cap); not KL, not teacher tokens, not where p_rollout is unknown."""
    rng = np.random.default_rng(3)
    logp, old, rollout, reference = rng.normal(-2.0, 0.5, (4, 3, 8))
    advantages, source = rng.normal(size=(3, 8)), rng.choice([MAIN, BRANCH, TEACHER, NO_LOSS], (3, 8))
    rollout[0, :3] = np.nan
    o = Objective(tis_cap=cap, teacher_loss="sft", kl_coef=0.1)
    slots = slots_of(source, advantages=advantages, ref_logp=reference, rollout_logp=rollout)
    weights = losses.stream_weights(losses.denominators(slots["source"], slots["row_share"], o), o)
    share = lambda x: losses.loss_share(x, 0 * x, jnp.asarray(old), slots, weights, o)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(share)(jnp.asarray(logp))

    w = np.where(np.isnan(rollout), 1.0, np.minimum(np.exp(old - rollout), cap))
    ratio, (a, b, t) = np.exp(logp - old), (np.sum(source == s) for s in (MAIN, BRANCH, TEACHER))
    surrogate = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    surrogate = np.where(advantages < 0, np.minimum(surrogate, -3.0 * advantages), surrogate)
    student, teacher = np.isin(source, (MAIN, BRANCH)), source == TEACHER
    x = reference - logp
    expected = ((w * surrogate)[student].sum() - logp[teacher].sum()) / (a + b + t)
    expected += 0.1 * (np.exp(x) - x - 1)[student].sum() / (a + b)
    np.testing.assert_allclose(value, expected, rtol=1e-7)

    free = student & (ratio > 0.8) & (ratio < 1.28)
    slope = (-w * advantages * ratio / (a + b + t) + 0.1 * (1 - np.exp(x)) / (a + b))[free]
    np.testing.assert_allclose(np.asarray(gradient)[free], slope, rtol=1e-6)


def test_names_of_the_kl_and_of_the_config():
    section = common.get_config().objective
    for name, meant in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")):
        section.kl_type = name
        assert Objective.from_config(section).kl_type == meant and Objective.from_config(section).kl_coef > 0
    section.kl_type = "off"
    assert Objective.from_config(section).kl_coef == 0.0
    for name, known in losses.CHOICES.items():
        assert set(known) <= set(values.CHOICES[f"objective.{name}"])
    assert set(values.CHOICES["objective.kl_type"]) == losses.KL_NAMES.keys()


@pytest.mark.parametrize(
    "change", [{"kl_type": "k9"}, {"teacher_loss": "bc"}, {"teacher_reduction": "mean"}, {"clip_c": 1.0}, {"tis_cap": -1.0}]
)
def test_an_unknown_choice_is_named(change):
    with pytest.raises(ValueError, match=f"objective.{next(iter(change))} is"):
        Objective(**change)
