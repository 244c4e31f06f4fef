"""Every clamp of the loss is counted: a token is counted exactly where the clamp takes its gradient away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner import objective as losses
from deepgrpo.learner.objective import MAIN, TEACHER, Objective
from deepgrpo.learner.token_losses import k3_clipped, kl_token, luffy_token, ppo_clip_token, tis_weight
from tests.learner.mini_batch import shares, slots_of

DISTANCES = np.array([-40.0, -20.5, -12.0, -10.5, -3.0, 0.5, 2.6, 2.62, 5.0, 19.0, 25.0])  # ref - logp, none of them 0


def gradient(function, x):
    return np.asarray(jax.vmap(jax.grad(function))(jnp.asarray(x, jnp.float32)))


def test_k3s_clip_is_counted_where_its_gradient_is_0():
    """k = exp(x) - x - 1 reaches 10 at x = 2.61 and at x = -11."""
    lost = gradient(lambda logp: kl_token(logp, 0.0, "low_var_kl"), -DISTANCES) == 0
    np.testing.assert_array_equal(k3_clipped(jnp.asarray(-DISTANCES, jnp.float32), 0.0), lost)
    assert lost.tolist() == [x > 2.61 or x < -11 for x in DISTANCES]
    assert not gradient(lambda logp: kl_token(logp, 0.0, "mse"), DISTANCES)[0] == 0


def metrics_of(o: Objective, logp, old, **arrays):
    source = arrays.pop("source", np.full(logp.shape, MAIN))
    slots = slots_of(source, **dict(advantages=np.ones(logp.shape), ref_logp=old) | arrays)
    tokens, totals, total = shares(o, slots, jnp.asarray(old), 1)
    _, (sums, _) = total(jnp.asarray(logp))
    return losses.loss_metrics(sums, tokens, totals, o)


def test_each_clamp_has_its_share_of_the_tokens():
    old = np.full((1, 4), -30.0)
    logp = np.array([[-30.0, -30.5, -9.0, -3.0]])  # ratios e^0, e^-0.5, and two beyond e^20
    reference = logp + np.array([[3.0, -12.0, 0.5, 0.1]])
    rollout = old - np.array([[0.0, 0.5, 1.0, 2.0]])
    found = metrics_of(Objective(kl_coef=0.1, tis_cap=2.0), logp, old, ref_logp=reference, rollout_logp=rollout)
    assert {key: float(value) for key, value in found.items() if key.endswith(("_clampfrac", "kl_clipfrac", "_capfrac"))} == {
        "ratio_clampfrac": pytest.approx(0.5),
        "kl_clipfrac": pytest.approx(0.5),
        "tis_capfrac": pytest.approx(0.5),
    }
    for value in (21.0, 2.0):  # what the counts stand for
        moves = gradient(lambda x: ppo_clip_token(x, -1.0, 0.2, 0.28, 1e30)[0], np.array([value]))[0] != 0
        assert moves == (value < 20)
    assert tis_weight(jnp.asarray(old), jnp.asarray(rollout), 2.0).max() == pytest.approx(2.0)


def test_only_what_is_in_use_is_counted():
    one = np.full((1, 2), -1.0)
    found = metrics_of(Objective(kl_coef=0.0), one, one)
    assert "kl_clipfrac" not in found and "tis_capfrac" not in found and found["ratio_clampfrac"] == 0
    assert "kl_clipfrac" not in metrics_of(Objective(kl_coef=0.1, kl_type="mse"), one, one)


def test_shaped_teacher_tokens_too_unlikely_to_learn_are_counted():
    logp = np.array([[-1.0, -19.0, -21.0, -50.0]])
    assert (gradient(lambda x: luffy_token(x, 1.0, 0.1)[0], logp[0]) == 0).tolist() == [False, False, True, True]
    arrays = dict(source=np.full((1, 4), TEACHER), teacher_coef=np.ones((1, 4)))
    found = metrics_of(Objective(kl_coef=0.0, teacher_loss="luffy"), logp, logp, **arrays)
    assert found["teacher_chain/shaping_clampfrac"] == pytest.approx(0.5)
