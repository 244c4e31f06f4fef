"""The plan of a run: without weights, data or device; against counts by hand, the learner's own metrics and XLA's account."""

import json

import jax
import numpy as np
import pytest
import rich.console

from configs import common
from deepgrpo import plan
from deepgrpo.config import ConfigError
from deepgrpo.model.transformer import abstract_params
from deepgrpo.telemetry.plan_tables import show
from tests.learner import tiny

MATH = ("--config=configs/math_1p5b.py", "--device=h200", "--prompt-tokens=100", "--response-tokens=600", "--problems=8000")


def planned(*flags):
    arguments, _, config = plan.parse(["plan", *flags])
    return plan.plan(config, arguments)


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_shapes_of_known_models_have_the_published_number_of_parameters(name, parameters):
    model = plan.preset_shapes(name)
    assert model.num_parameters == parameters == sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model)))


def test_a_run_is_planned_before_anything_is_downloaded():
    nowhere = ("--config.model.path=nowhere/model", "--config.model.origin=Qwen/Qwen2.5-Math-1.5B")
    found = planned(*MATH, *nowhere, "--config.teacher.prices=0.5,0")
    memory, learner, rollout = found["memory"], found["learner"], found["rollout"]
    assert found["model"]["parameters"] == 1_543_714_304
    assert memory["bytes"] == sum(memory["bytes_by_part"].values()) and memory["fits"]
    assert memory["bytes_by_part"]["moments"] == 2 * memory["bytes_by_part"]["parameters"] == 8 * 1_543_714_304
    assert [shape["T"] for shape in found["shapes"]] == [512, 1024, 2048, 4096]
    assert rollout["sequences"] == learner["rows"] == 1280  # 128 prompts and 32 states of 8 rollouts each
    assert rollout["kv_bytes_per_token"] == 2 * 28 * 2 * 128 * 2
    assert found["work"]["steps"] == 100 * (8000 // 128) and found["work"]["passes"] == pytest.approx(100 * 62 * 128 / 8000)
    taken = planned(*MATH, "--config.curriculum.injection_mode=replace", "--config.train.epochs=2")["work"]
    assert taken["steps"] == 2 * (8000 // 96)  # 32 of 128 prompts are states: a pass lasts longer
    assert learner["flops_reference"] == pytest.approx(learner["flops_update"] / 3)
    flops = sum(learner[f"flops_{name}"] for name in ("update", "reference", "old_log_probs"))
    assert found["seconds"]["learner"] == pytest.approx(flops / (989e12 * 0.4))
    assert found["seconds"]["step"] == found["seconds"]["learner"] + found["seconds"]["rollout"]
    step = found["teacher"]["per_step"]
    assert step["corrections"] == 640 and step["money"] == pytest.approx(step["prompt_tokens"] * 0.5e-6)
    assert found["teacher"]["per_run"]["corrections"] == 640 * found["work"]["steps"]
    assert any("nowhere/model is absent" in note for note in found["assumptions"])
    json.dumps(found)
    show(found, rich.console.Console(quiet=True))


def test_more_devices_and_fewer_groups_need_less():
    one, eight = planned(*MATH), planned(*MATH, "--devices=8")
    assert 1 / 8 <= eight["seconds"]["learner"] / one["seconds"]["learner"] < 1 / 6  # smaller cells repeat some prefixes
    assert eight["memory"]["bytes_by_part"]["moments"] < one["memory"]["bytes_by_part"]["moments"] / 7
    half = planned(*MATH, "--trained-share=0.5")
    assert half["learner"]["rows"] == 640 and half["rollout"] == one["rollout"]
    assert not planned(*MATH, "--preset=qwen2.5-32b")["memory"]["fits"]
    assert planned(*MATH, "--config.curriculum.pool=none")["teacher"] is None
    assert planned(*MATH, "--config.train.student_tokens=1000")["work"]["steps"] == 1
    unknown = planned(*MATH, "--device=cpu")
    assert unknown["seconds"] == dict.fromkeys(("learner", "rollout", "step", "run"))


def test_the_work_is_what_the_learner_reports():
    learner = tiny.make_learner(objective__kl_coef=0.0, optim__mini_batch_prompts=3)
    rows = tiny.sibling_rows()
    config = common.get_config()
    config.objective.kl_coef, config.optim.mini_batch_prompts, config.rollout.n = 0.0, 3, 4
    mini_batches = plan.cut(rows, config, 1)
    work = plan.learner_work(config, tiny.model_config(), mini_batches, learner.shapes, 1, False)
    metrics = learner.update(rows, 1)
    assert work["tokens"] == metrics["perf/tokens"] and work["flops_update"] == metrics["perf/flops"]
    assert work["optimizer_steps"] == metrics["actor/optimizer_steps"]
    np.testing.assert_allclose(work["padding_share"], metrics["perf/padding_fraction"])
    spared = work["spared_by_shared_prefixes"] / (work["spared_by_shared_prefixes"] + work["tokens"])
    np.testing.assert_allclose(spared, metrics["perf/spared_fraction"])


def test_state_and_shapes_are_the_learners():
    learner = tiny.make_learner((2, 2, 1))
    abstract = plan.programs_lib.abstract_state(learner.policy, learner.mesh, learner.objective, learner.model.dtype)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), learner.abstract_state()
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--preset=qwen9-1b",), "--preset=qwen2.5-0.5b"),
        (("--config.model.path=nowhere", "--config.model.origin="), "shapes are not known"),
        (("--prompt-tokens=5000",), "no room in rollout.max_model_len=4096"),
        (("--config.learner.mesch=1",), "learner.mesh"),
    ],
)
def test_what_cannot_be_planned_says_what_to_do(flags, message):
    with pytest.raises(ConfigError, match=message):
        planned(*MATH[:2], *flags)


def test_devices_that_the_mesh_does_not_fit():
    with pytest.raises(ValueError, match="does not fit 3 devices"):
        planned(*MATH, "--devices=3", "--config.learner.mesh=(1,2,1)")


@pytest.mark.system
@pytest.mark.parametrize("experiment", ["math_1p5b", "gsm8k_0p5b"])
def test_the_estimate_is_near_what_xla_plans(experiment):
    arguments, _, config = plan.parse(["plan", f"--config=configs/{experiment}.py"])
    found = plan.plan(config, arguments)
    model = plan.find_model(config, "", [])
    compiled = plan.compiled(config, model, 1, plan.packing.Shape(**found["memory"]["of_shape"]))
    assert compiled["estimate_over_xla"] == pytest.approx(1, abs=0.15)
