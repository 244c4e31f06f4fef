"""The loss that docs/method.md shows works as it stands there: one function and one entry."""

import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from deepgrpo.config.values import wrong
from deepgrpo.learner import TEACHER_LOSSES
from deepgrpo.learner import objective as losses
from deepgrpo.learner.objective import Objective
from tests.conftest import ROOT


def test_the_documented_loss_is_selected_by_its_name(monkeypatch):
    section = (ROOT / "docs" / "method.md").read_text().partition("## A loss of your own")[2].partition("\n## ")[0]
    source, entry = re.findall(r"```python\n(.*?)```", section, re.S)
    module = types.ModuleType("my_losses")
    monkeypatch.setitem(sys.modules, "my_losses", module)
    exec(compile(source, "docs/method.md", "exec"), module.__dict__)
    ((name, place),) = re.findall(r'TEACHER_LOSSES\["(\w+)"\] = "(.+)"', entry)
    monkeypatch.setitem(TEACHER_LOSSES, name, place)
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
