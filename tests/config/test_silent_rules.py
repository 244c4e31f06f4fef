"""Settings that do nothing are warned of, each with what would use it; the experiments here have none."""

import pytest

from configs import ablations, common, eval_drgrpo, eval_seed, gsm8k_0p5b, math_1p5b, smollm2
from deepgrpo import config as config_lib
from deepgrpo.config.silent_rules import settings_problems
from tests.conftest import ROOT

DEMO = f"--config={ROOT / 'configs' / 'carry_chain.py'}"


def told(*overrides: str) -> str:
    config, _ = config_lib.from_command_line(["train", DEMO, *(f"--config.{text}" for text in overrides)])
    found = settings_problems(config)
    assert not any(finding.fatal for finding in found)
    return "\n".join(f"{finding.what} -> {finding.remedy}" for finding in found)


def test_experiments_have_none():
    made = [ablations.get_config(arm) for arm in ablations.ARMS]
    made += [module.get_config(arm) for module in (gsm8k_0p5b, math_1p5b) for arm in common.TEACHER_ARMS]
    made += [smollm2.get_config(), smollm2.get_config("gsm8k"), eval_drgrpo.get_config(), eval_seed.get_config()]
    assert [settings_problems(config) for config in made] == [[]] * len(made)


@pytest.mark.parametrize(
    ("override", "user"),
    [
        ("vllm.servers=2", "rollout.engine=vllm"),
        ("weights.keep=3", "rollout.engine=vllm"),
        ("rollout.dynamic_on_cap=skip", "rollout.dynamic_sampling above 0"),
        ("treerl.M=3", "loop=treerl"),
        ("judge.model=m", "judge.base_url"),
        ("objective.luffy_gamma=0.5", "objective.teacher_loss=luffy"),
        ("objective.length_constant=9", "objective.aggregation=dr_grpo"),
        ("objective.overlong_buffer=9", "objective.overlong=soft"),
        ("objective.kl_type=mse", "objective.kl_coef above 0"),
        ("optim.teacher.b1=0.5", "objective.teacher_update=post_ppo"),
        ("branches.n_segments=2", "curriculum.pool=branches_inline, branches or suffixes"),
        ("teacher.model=m", "a teacher.base_url of an endpoint"),
    ],
)
def test_a_setting_that_nothing_uses_is_told(override, user):
    text = told(override)
    assert text.startswith(f"settings: {override} without effect: only {user} uses it ->") and text.count("\n") == 0


def test_rollouts_ahead_without_a_correction_are_told():
    assert "objective.tis_cap=0 does not correct that -> set --config.objective.tis_cap=2" in told("rollout.max_staleness=1")
    assert told("rollout.max_staleness=1", "objective.tis_cap=2") == ""
    both = told("validation.every=0", "validation.n=4", "validation.temperature=1", "checkpoint.best_metric=x")
    assert "validation.n=4, validation.temperature=1.0 without effect: only validation.every" in both and "best_metric=x" in both


@pytest.mark.parametrize(
    "open_end", ["train.student_tokens=500000", "curriculum.injection_mode=replace", "rollout.dynamic_sampling=2"]
)
def test_a_cosine_without_an_end_is_refused(open_end):
    others = ["train.student_tokens=0", "curriculum.injection_mode=add", "optim.schedule=cosine"]
    flags = [flag for flag in others if flag.partition("=")[0] != open_end.partition("=")[0]] + [open_end]
    with pytest.raises(config_lib.ConfigError, match="the cosine ends with the run"):
        told(*flags)
    assert told(*flags, "train.steps=50") == "" == told(*others)
