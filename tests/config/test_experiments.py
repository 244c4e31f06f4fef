"""The experiments load, are possible, and hold the released settings."""

import pytest

from configs import ablations, common
from deepgrpo import config as config_lib
from deepgrpo.config import flags
from deepgrpo.preflight import rules

ARMED = {
    "configs/smollm2.py": ("gsm8k",),
    "configs/carry_chain.py": ablations.ARMS,
    **dict.fromkeys(("configs/gsm8k_0p5b.py", "configs/math_1p5b.py"), common.TEACHER_ARMS),
}


def load(experiment: str):
    return rules.from_command_line(["train.py", f"--config={flags.ROOT / experiment}"])[0]


@pytest.mark.parametrize("experiment", [*flags.experiments(), *(f"{path}:{arm}" for path, arms in ARMED.items() for arm in arms)])
def test_every_experiment_is_possible(experiment):
    docstring = (flags.ROOT / experiment.partition(":")[0]).read_text().split('"""')[1]
    assert "python -m deepgrpo" in docstring and "Hardware" in docstring
    load(experiment)


def test_unknown_argument_is_named():
    with pytest.raises(config_lib.ConfigError, match="no task 'sums'"):
        load("configs/smollm2.py:sums")
    with pytest.raises(config_lib.ConfigError, match="no arm 'sfr'; expected null, luffy, snis, sft"):
        load("configs/math_1p5b.py:sfr")


RELEASED = {
    "train.epochs": 100, "data.batch_size": 128, "optim.mini_batch_prompts": 16, "optim.ppo_epochs": 1, "rollout.n": 8,
    "curriculum.rollout_n": 0, "rollout.temperature": 1.0, "validation.temperature": 0.0, "validation.n": 1,
    "optim.lr": 1e-6, "optim.schedule": "constant", "optim.warmup_steps": 0, "optim.weight_decay": 0.01, "optim.grad_clip": 1.0,
    "objective.clip_low": 0.2, "objective.clip_high": 0.28, "objective.clip_c": 3.0, "objective.kl_coef": 1e-4,
    "objective.kl_type": "low_var_kl", "objective.advantage": "group_mean", "objective.luffy_gamma": 0.1,
    "rewards.threshold": 0.0, "checkpoint.every": 10, "checkpoint.keep": 1, "validation.every": 10,
    "curriculum.pool": "forest", "curriculum.failures": "all", "teacher.max_concurrent": 32,
    "teacher.min_prefix_match_tokens": 10, "teacher.min_prefix_match_ratio": 0.05, "teacher.min_suffix_len": 100,
    "teacher.model": "Qwen/Qwen3.5-27B-GPTQ-Int4", "teacher.enable_thinking": "false", "objective.snis_beta": 1.0,
    "objective.teacher_coef": 1.0, "objective.whiten": False, "objective.zero_gradient_rows": "drop", "seed": 0,
    "objective.overlong": "none", "objective.aggregation": "token_mean", "objective.ratio": "token",
    "objective.entropy_coef": 0.0, "objective.tis_cap": 0.0,
    "curriculum.injection_mode": "add",
    "curriculum.min_remaining_tokens": 32, "curriculum.retire_after": 1, "curriculum.cut": "teacher",
    "optim.teacher.lr": 1e-6, "optim.teacher.mini_batch_rows": 64, "optim.teacher.allow_partial": False,
}  # fmt: skip
BY_TASK = {
    "configs/gsm8k_0p5b.py": {"data.max_prompt_length": 512, "rollout.max_model_len": 1024, "curriculum.injection_ratio": 0.125},
    "configs/math_1p5b.py": {"data.max_prompt_length": 1024, "rollout.max_model_len": 4096, "curriculum.injection_ratio": 0.25},
}
JOINT = {
    **{"curriculum.teacher_rows": True, "curriculum.suffix_sft": "off"},
    **{"objective.teacher_update": "joint", "objective.teacher_reduction": "mixed_token_mean"},
}
SFT = {
    **{"curriculum.teacher_rows": False, "curriculum.suffix_sft": "epoch_local"},
    **{"objective.teacher_update": "post_ppo", "objective.teacher_reduction": "separate_stream_mean"},
}


@pytest.mark.parametrize("arm", ["null", "luffy", "snis", "sft"])
@pytest.mark.parametrize("experiment", BY_TASK)
def test_released_settings(experiment, arm):
    flat = config_lib.flatten(load(f"{experiment}:{arm}"))
    expected = RELEASED | BY_TASK[experiment] | (SFT if arm == "sft" else JOINT) | {"objective.teacher_loss": arm}
    assert {key: flat[key] for key in expected} == expected
    assert flat["name"].endswith(f"-forest-{arm}")
    assert arm != "null" or config_lib.flatten(load(experiment)) == flat  # the default


def test_every_arm_belongs_to_a_question():
    asked = [arm for question in ablations.QUESTIONS.values() for arm in question.arms]
    assert set(asked) == set(ablations.ARMS) and list(ablations.QUESTIONS) == [f"R{n}" for n in range(1, 16)]
    changed = [tuple(sorted(edits.items())) for edits in ablations.ARMS.values()]
    assert len(set(map(str, changed))) == len(changed)  # no two are the same
