"""The loss that docs/method.md shows works as it stands there: one function and one entry."""

import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from deepgrpo.learner import TEACHER_LOSSES
from deepgrpo.learner import objective as losses
from deepgrpo.learner.objective import Objective
from deepgrpo.preflight.values import wrong
from tests.conftest import enter_documented


def test_the_documented_loss_is_selected_by_its_name(monkeypatch):
    name = enter_documented("A loss of your own", "my_losses", TEACHER_LOSSES, monkeypatch)
    config = common.get_config()
    config.objective.teacher_loss = name
    assert not wrong("objective.teacher_loss", name)
    o = Objective.from_config(config.objective)
    logp = jnp.array([[-0.1, -3.0, -4.0]])
    slots = {"source": jnp.array([[2, 2, 2]]), "advantages": 0 * logp, "teacher_coef": 0 * logp + 0.5, "ref_logp": logp}
    slots |= {"row_share": 0 * logp + 1 / 3}
    weights = losses.stream_weights(jnp.array([0.0, 0.0, 3.0]), o)
    share = lambda x: losses.loss_share(x, 0 * x, x, slots, weights, o)  # noqa: E731
    (value, sums), gradient = jax.value_and_grad(share, has_aux=True)(logp)
    np.testing.assert_allclose(value, 0.5 * 7 / 3, rtol=1e-6)  # only the two tokens below luffy_gamma = 0.1 count
    np.testing.assert_allclose(gradient, [[0, -0.5 / 3, -0.5 / 3]], rtol=1e-6)
    metrics = losses.loss_metrics(sums, jnp.array([0.0, 0.0, 3.0]), jnp.array([0.0, 0.0, 3.0]), o)
    np.testing.assert_allclose(metrics[f"teacher_chain/{name}_loss"], 3.5 / 3, rtol=1e-6)
