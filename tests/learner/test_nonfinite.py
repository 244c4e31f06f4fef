"""What is not finite is refused at the door, named where it first appears, and ends a run that can learn nothing more."""

import dataclasses
import logging
import re

import jax
import numpy as np
import pytest

from deepgrpo.config import ConfigError
from deepgrpo.learner import report, sharding
from deepgrpo.model.transformer import abstract_params
from deepgrpo.weights import hf
from tests.learner import tiny

OVERFLOWS = 1e25  # an advantage whose gradient float32 holds, and the square of it not


def rows(advantage: float = 1.0, n: int = 4):
    return [dataclasses.replace(row, advantage=advantage) for row in tiny.make_rows(n)]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        *(("advantage", value, f"advantage is {value}") for value in (np.nan, np.inf, -np.inf, 1e39)),
        ("advantage", np.array([0.0, np.nan]), "advantage is nan"),
        ("teacher_coef", np.inf, "teacher's weight is inf"),
        ("rollout_logps", np.array([-1.0, np.nan], np.float32), "engine's log-prob is nan"),
        ("rollout_logps", np.array([-np.inf, -1.0], np.float32), "engine's log-prob is -inf"),
    ],
)
def test_the_door_names_the_row_and_the_number(field, value, named):
    (row,) = tiny.make_rows(1, length=2)
    learner = tiny.make_learner()
    with pytest.raises(
        ValueError,
        match=re.escape(f"row of group g0: the {named}, expected a finite number of float32 (the row's reward is 1.0)"),
    ):
        learner.start_update([dataclasses.replace(row, **{field: value})], 0)
    assert learner.programs.count == 0


def test_a_run_without_a_finite_step_ends_and_names_the_first_part(caplog):
    learner = tiny.make_learner(objective__kl_coef=0.0)
    with caplog.at_level(logging.WARNING):
        for step in range(report.PATIENCE - 1):
            metrics = learner.update(rows(OVERFLOWS), step)
            assert metrics["actor/nonfinite_steps"] == 1 and metrics["actor/optimizer_steps"] == 0
        (record,) = caplog.records  # said once
        assert "step 0: 1 of 1 optimizer steps were refused" in record.message and "the gradient's norm" in record.message
        with pytest.raises(ConfigError, match=r"3 updates in a row had no finite step.*\n.*optim\.lr"):
            learner.update(rows(OVERFLOWS), 2)
    assert tiny.same(learner.policy, tiny.parameters()) and "the run ends" in caplog.records[-1].message


def test_a_finite_step_between_begins_the_count_anew():
    learner = tiny.make_learner(objective__kl_coef=0.0)
    for step in range(2 * report.PATIENCE):
        learner.update(rows(OVERFLOWS if step % report.PATIENCE else 1.0), step)
    assert learner.host_state()["nonfinite_steps"] == 4


def broken(path: str, layer: int | None = None):
    """The tiny parameters with one NaN."""
    tree = jax.tree.map(np.copy, tiny.parameters())
    leaf = tree
    for key in path.split("/"):
        leaf = leaf[key]
    (leaf if layer is None else leaf[layer]).flat[0] = np.nan
    return tree


@pytest.mark.parametrize(
    ("path", "layer", "name"),
    [
        ("layers/mlp/up_proj/kernel", 1, "model.layers.1.mlp.up_proj.weight"),
        ("layers/self_attn/k_proj/bias", 0, "model.layers.0.self_attn.k_proj.bias"),
        ("lm_head/kernel", None, "lm_head.weight"),
        ("norm/scale", None, "model.norm.weight"),
    ],
)
def test_broken_weights_end_the_run_at_once_and_are_never_saved(path, layer, name):
    learner = tiny.make_learner(objective__kl_coef=0.0, params=broken(path, layer))
    with pytest.raises(ConfigError, match=rf"not finite: the weights of {name}; no later update can be finite"):
        learner.update(rows(), 0)
    with pytest.raises(ConfigError, match=rf"the weights of {name} are not finite, and a checkpoint"):
        tiny.make_learner(objective__kl_coef=0.0, params=broken(path, layer)).host_state()


def test_a_broken_optimizer_is_never_saved():
    learner = tiny.make_learner(objective__kl_coef=0.0)
    state = jax.tree.map(np.array, jax.device_get(learner.state))
    state["adam"]["nu"]["embed_tokens"]["embedding"][3, 2] = np.inf
    learner.restore(state)
    with pytest.raises(ConfigError, match=r"optimizer's moments \(nu\) of model.embed_tokens.weight are not finite"):
        learner.host_state()


def test_names_are_those_of_the_hugging_face_table():
    for config in (tiny.model_config(), tiny.model_config(qk_norm=True, qkv_bias=False)):
        leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
        names = {report.weight_name(sharding.path_name(path), 1) for path, _ in leaves}
        assert names == {row.name.format(1) for row in hf.table(config)}


def found(**changes):
    """What `explain` returns of a step that is all finite, but for the changes."""
    gradient = {
        "embed_tokens": {"embedding": 1.0},
        "layers": {"mlp": {"up_proj": {"kernel": np.ones(3)}}},
        "norm": {"scale": 1.0},
    }
    return {"ref_logp": 0.0, "sums": {"logp": np.zeros(3), "loss": np.zeros(3)}, "gradient": gradient, "norm": 1.0} | changes


def test_the_order_is_that_of_the_computation():
    bad = np.array([0.0, np.nan, 0.0])
    gradient = found()["gradient"] | {"layers": {"mlp": {"up_proj": {"kernel": np.array([np.inf, np.inf, 1.0])}}}}
    for changes, expected in (
        (dict(ref_logp=np.nan, sums={"loss": bad}), "the reference's log-probs (objective.kl_coef)"),
        (dict(sums={"loss": bad, "logp": bad}), "the policy's log-probs of the branch tokens"),
        (dict(sums={"loss": bad}, gradient=gradient), "the loss of the branch tokens"),
        (dict(sums={"kl": bad}), "the KL term of the branch tokens"),
        (dict(gradient=gradient, norm=np.nan), "the gradient of model.layers.1.mlp.up_proj.weight and 1 further tensors"),
        (dict(norm=np.inf), "the gradient's norm, which is too large for float32 although every entry is finite"),
        ({}, ""),
    ):
        assert report.first_of_step(found(**changes)) == expected


def test_an_engines_broken_log_probs_end_the_run_without_a_traceback(caplog):
    with pytest.raises(ConfigError, match="the run ends: request 0: log-prob nan"), report.end_if_not_finite():
        raise FloatingPointError("request 0: log-prob nan")
    assert "log-prob nan" in caplog.text


def test_the_teachers_own_steps_are_watched_too():
    keys = dict(objective__teacher_loss="sft", objective__teacher_update="post_ppo", optim__teacher__mini_batch_rows=2)
    keys = {key: value for key, value in keys.items() if key.count("__") == 1}
    learner = tiny.make_learner(objective__teacher_reduction="separate_stream_mean", params=broken("norm/scale"), **keys)
    with pytest.raises(ConfigError, match="the weights of model.norm.weight"):
        learner.update_teacher(tiny.teacher_rows(64, 1.0), 0)
