"""The experiments load, are possible, and hold the released settings."""

import pytest

from deepgrpo import config as config_lib
from deepgrpo.config import command_line

CHOICES = [path for path in command_line.experiments() if path != "configs/smollm2.py"]


def load(experiment: str):
    return config_lib.from_command_line(["train.py", f"--config={command_line.ROOT / experiment}"])[0]


@pytest.mark.parametrize("experiment", [*CHOICES, "configs/smollm2.py", "configs/smollm2.py:gsm8k"])
def test_every_experiment_is_possible(experiment):
    docstring = (command_line.ROOT / experiment.partition(":")[0]).read_text().split('"""')[1]
    assert "python -m deepgrpo" in docstring and "Hardware" in docstring
    load(experiment)


def test_unknown_argument_is_named():
    with pytest.raises(config_lib.ConfigError, match="no task 'sums'"):
        load("configs/smollm2.py:sums")


RELEASED = {
    "train.epochs": 100, "data.batch_size": 128, "optim.mini_batch_prompts": 16, "optim.ppo_epochs": 1, "rollout.n": 8,
    "curriculum.rollout_n": 0, "rollout.temperature": 1.0, "rollout.top_p": 1.0, "validation.temperature": 0.0, "validation.n": 1,
    "optim.lr": 1e-6, "optim.schedule": "constant", "optim.warmup_steps": 0, "optim.weight_decay": 0.01, "optim.grad_clip": 1.0,
    "objective.clip_low": 0.2, "objective.clip_high": 0.28, "objective.clip_c": 3.0, "objective.kl_coef": 1e-4,
    "objective.kl_type": "low_var_kl", "objective.advantage": "group_mean", "objective.teacher_loss": "null",
    "rewards.threshold": 0.0, "checkpoint.every": 10, "checkpoint.keep": 1, "checkpoint.save_best": True, "validation.every": 10,
    "validation.before_train": True, "curriculum.pool": "forest", "curriculum.failures": "all", "teacher.max_concurrent": 32,
    "teacher.min_prefix_match_tokens": 10, "teacher.min_prefix_match_ratio": 0.05, "teacher.min_suffix_len": 100,
    "teacher.model": "Qwen/Qwen3.5-27B-GPTQ-Int4", "teacher.enable_thinking": "false",
}  # fmt: skip
BY_TASK = {
    "configs/gsm8k_0p5b.py": {"data.max_prompt_length": 512, "rollout.max_model_len": 1024, "curriculum.injection_ratio": 0.125},
    "configs/math_1p5b.py": {"data.max_prompt_length": 1024, "rollout.max_model_len": 4096, "curriculum.injection_ratio": 0.25},
}


@pytest.mark.parametrize("experiment", BY_TASK)
def test_released_settings(experiment):
    flat = config_lib.flatten(load(experiment))
    expected = RELEASED | BY_TASK[experiment]
    assert {key: flat[key] for key in expected} == expected
