"""The memory plan: parts that are exact, and the sum against XLA's own analysis of the compiled step."""

import jax
import jax.numpy as jnp
import pytest

from configs import common
from deepgrpo.learner import costs, packing, sharding
from deepgrpo.learner import step as step_lib
from deepgrpo.learner.objective import Objective
from deepgrpo.learner.packing import Shape
from deepgrpo.learner.step import Programs
from deepgrpo.model.transformer import Placement, Transformer, abstract_params
from tests.learner import tiny
from tests.learner.test_flops import qwen

ONE = {"data": 1, "fsdp": 1, "tensor": 1}


def plan(model, shape, mesh=ONE, dtype="bfloat16", remat="full", attention="xla", reference=True, teacher_update="joint"):
    config = common.get_config()
    config.model.dtype, config.model.remat, config.objective.teacher_update = dtype, remat, teacher_update
    config.learner.logprob_block = 1024
    return costs.plan_memory(model, shape, config, mesh, attention, reference=reference)


def test_what_is_held_is_exact():
    """1543.7 million parameters: four bytes each, eight for the moments, two for the reference; on eight devices an eighth."""
    parts = plan(qwen(), Shape(4, 8, 1024))
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(qwen())))
    assert count == 1_543_714_304
    assert [parts[name] / count for name in ("parameters", "moments", "reference", "gradients")] == [4, 8, 2, 4]
    assert plan(qwen(), Shape(4, 8, 1024), reference=False)["reference"] == 0
    assert plan(qwen(), Shape(4, 8, 1024), teacher_update="post_ppo")["moments"] == 16 * count
    split = plan(qwen(), Shape(4, 8, 1024), {"data": 1, "fsdp": 4, "tensor": 2})
    norms = 57 * 1536  # are whole everywhere
    assert split["parameters"] == pytest.approx(4 * (count - norms) / 8 + 4 * norms, rel=1e-3)
    assert split["activations"] == parts["activations"] / 4


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 8, 1), (2, 2, 2)], ids=str)
def test_state_and_batch_are_those_of_a_learner(mesh):
    learner = tiny.make_learner(mesh)
    shape = learner.shapes[-1]
    parts = plan(tiny.model_config(), shape, dict(learner.mesh.shape), dtype="float32", remat="none")

    def here(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    assert parts["parameters"] == here(learner.policy)
    assert parts["moments"] + 4 == here(learner.state["adam"])  # and a counter
    assert parts["reference"] == here(learner.state["reference"])
    (batch,) = packing.layout([tiny.make_rows(2)], [shape], sharding.batch_shards(learner.mesh))
    assert parts["batch"] == here(learner._place(batch))


def test_more_is_recomputed_less_is_kept():
    kept = [plan(qwen(), Shape(4, 4, 1024), remat=remat)["activations"] for remat in ("full", "dots", "none")]
    assert kept == sorted(kept) and kept[0] == 28 * 4 * 1024 * 1536 * 2
    fused = plan(qwen(), Shape(4, 4, 1024), remat="none", attention="cudnn")["activations"]
    assert fused == kept[2] == plan(qwen(), Shape(4, 1, 4096), remat="none", attention="cudnn")["activations"]
    assert fused < plan(qwen(), Shape(4, 16, 256), remat="none")["activations"]  # short rows keep the scores of their queries


@pytest.mark.system
def test_the_sum_is_what_xla_plans_at_the_shapes_of_a_1p5b_model():
    """Compiled from shapes alone, without weights: a quarter of a minute on a quiet machine."""
    shape, mesh = Shape(4, 4, 1024), sharding.make_mesh((1, 1, 1), jax.devices()[:1])
    program = abstract_programs(qwen(), mesh, "full").lower("train_step", shape).compile()
    parts = plan(qwen(), shape, reference=False)
    assert sum(parts.values()) == pytest.approx(costs.compiled(program), rel=0.15)


def abstract_programs(config, mesh, remat) -> Programs:
    """The programs of a bfloat16 learner that does not exist."""
    keys = common.get_config()
    keys.rollout.temperature, keys.learner.logprob_block = 1.0, 1024
    objective = Objective.from_config(keys.objective)
    params = abstract_params(config)
    shardings = sharding.parameter_shardings(params, mesh)
    params = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), params, shardings)
    rest = jax.eval_shape(lambda p: step_lib.optimizer_state(p, objective), params)
    adam = {"count": sharding.replicated(mesh), "mu": shardings, "nu": shardings}
    rest = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), rest, {"adam": adam})
    model = Transformer(config, dtype=jnp.bfloat16, remat=remat, placement=Placement("xla", sharding.rows(mesh)))
    return Programs(model, mesh, {"params": params} | rest, keys)
