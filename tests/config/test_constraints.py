"""Values and combinations that cannot work are refused by name; names are those of the code that they stand for."""

import pytest

from configs import common
from deepgrpo import config as config_lib
from deepgrpo.config import constraints, curriculum_rules, flags

POSSIBLE = (
    *("--config.name=run", "--config.model.path=models/m"),
    *("--config.data.train=carry_chain:train:16", "--config.data.validation=carry_chain:heldout:16"),
)

SEPARATE = ("--config.objective.teacher_reduction=separate_stream_mean",)
SFT_ARM = (*SEPARATE, "--config.objective.teacher_loss=sft", "--config.objective.teacher_update=post_ppo")
SUFFIX_SFT = ("--config.curriculum.teacher_rows=false", "--config.curriculum.suffix_sft=epoch_local")


def parse(*overrides):
    """Overrides on top of a possible run; one of a key that `POSSIBLE` sets takes its place."""
    keys = {override.partition("=")[0] for override in overrides}
    base = [override for override in POSSIBLE if override.partition("=")[0] not in keys]
    return config_lib.from_command_line(["train.py", f"--config={flags.SCHEMA}", *base, *overrides])


def message(*overrides) -> str:
    with pytest.raises(config_lib.ConfigError) as error:
        parse(*overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--config.curriculum.injection_ratio=1.5"], ["curriculum.injection_ratio = 1.5", "(0, 1]"]),
        (["--config.curriculum.pool=forst"], ["curriculum.pool", "did you mean forest"]),
        (["--config.rollout.n=1"], ["rollout.n = 1"]),
        (["--config.rollout.temperature=0"], ["rollout.temperature"]),
        (["--config.objective.clip_c=1"], ["objective.clip_c"]),
        (["--config.learner.buckets=512,256"], ["learner.buckets", "rising"]),
        (["--config.learner.buckets=256"], ["learner.buckets", "rollout.max_model_len = 1024"]),
        (["--config.data.max_prompt_length=1000"], ["data.max_prompt_length = 1000", "curriculum.min_remaining_tokens = 32"]),
        (["--config.optim.mini_batch_prompts=256"], ["optim.mini_batch_prompts = 256", "data.batch_size = 128"]),
        (["--config.curriculum.failures=longest_prefix", "--config.data.train=gsm8k:x"], ["longest_prefix", "steps"]),
        (
            ["--config.teacher.base_url=oracle", "--config.data.train=gsm8k:x"],
            ["teacher.oracle", "its own questions"],
        ),
        (["--config.teacher.replay=/nowhere"], ["teacher.replay", "does not exist"]),
        (["--config.learner.mesh=2,-1,-1"], ["learner.mesh"]),
        (["--config.learner.coordinator=host"], ["learner.coordinator", "HOST:PORT"]),
        (["--config.learner.num_processes=2"], ["learner.coordinator=HOST:PORT", "rollout.engine=vllm", "weights.folder"]),
        (["--config.learner.process_id=1"], ["learner.process_id = 1", "learner.num_processes"]),
        (["--config.objective.teacher_loss=sft"], ["teacher_reduction = 'mixed_token_mean'", "separate_stream_mean"]),
        (["--config.objective.teacher_loss=luffy", "--config.objective.teacher_update=post_ppo"], ["teacher_loss=sft"]),
        (["--config.objective.teacher_coef=0.5"], ["objective.teacher_coef = 0.5", "no coefficient"]),
        ([*SEPARATE, "--config.objective.teacher_loss=snis"], ["snis", "teacher_reduction=mixed_token_mean"]),
        (["--config.objective.teacher_loss=snis", "--config.curriculum.teacher_rows=false"], ["teacher_rows=True"]),
        (["--config.objective.snis_beta=0"], ["objective.snis_beta = 0.0"]),
        ([*SEPARATE, "--config.objective.teacher_loss=sft"], ["curriculum.teacher_rows = True", "teacher_rows=False"]),
        ([*SFT_ARM, "--config.curriculum.teacher_rows=false"], ["suffix_sft = 'off'", "epoch_local or post_step"]),
        ([*SUFFIX_SFT], ["teacher_update = 'joint'", "teacher_update=post_ppo"]),
        ([*SFT_ARM, *SUFFIX_SFT, "--config.curriculum.pool=chain"], ["pool = 'chain'", "only the forest"]),
        (["--config.curriculum.cut=random", "--config.objective.teacher_loss=luffy"], ["cut = 'random'", "teacher_loss=null"]),
        (["--config.objective.whiten=true"], ["objective.whiten = True", "teacher_rows=False"]),
        (["--config.objective.teacher_loss=luffy", "--config.curriculum.pool=none"], ["there are no teacher tokens"]),
        (["--config.objective.teacher_loss=luffy", "--config.curriculum.pool=flat"], ["forest or suffixes"]),
        (["--config.objective.teacher_loss=luffy", "--config.curriculum.pool=chain"], ["pool = 'chain'", "teacher_loss=null"]),
        ([*SEPARATE, "--config.objective.auto_teacher_coef=true"], ["auto_teacher_coef = True", "no teacher loss to weigh"]),
        (["--config.optim.teacher.lr=0"], ["optim.teacher.lr = 0.0", "-1"]),
        (["--config.objective.aggregation=dr_grpo"], ["objective.length_constant = 0"]),
        (["--config.objective.overlong=soft"], ["objective.overlong_buffer = 0", "rollout.max_model_len"]),
        (["--config.objective.kl_type=k4"], ["objective.kl_type = 'k4'", "k1"]),
        (["--config.data.train=gsm8:x"], ["data.train = ('gsm8:x',)", "NAME one of gsm8k"]),
        (["--config.validation.n=4"], ["validation.temperature = 0.0", "greedy"]),
        (["--config.curriculum.injection_ratio=0.001"], ["data.batch_size = 128", "injected"]),
        (["--config.name=a/b"], ["name = 'a/b'"]),
        (["--config.rollout.top_p=0.9"], ["rollout.top_p = 0.9", "the whole distribution"]),
        (["--config.rollout.top_k=20"], ["rollout.top_k = 20", "the whole distribution"]),
        (["--config.rollout.max_staleness=2"], ["rollout.max_staleness = 2"]),
        (["--config.rollout.engine=vllm", "--config.rollout.temperature=2.5"], ["rollout.temperature = 2.5", "[0.01, 2]"]),
        (["--config.rollout.engine=vllm", "--config.vllm.gpu_ids=0,1,1"], ["vllm.gpu_ids", "servers times tensor_parallel"]),
        (["--config.rollout.engine=vllm", "--config.vllm.attach=host:8000"], ["vllm.attach", "http://HOST:PORT"]),
    ],
)
def test_what_cannot_work(overrides, parts):
    text = message(*overrides)
    assert all(part in text for part in parts), text


def test_a_plain_run_is_not_judged_by_what_it_does_not_use():
    parse("--config.curriculum.pool=none", "--config.teacher.replay=/nowhere")
    parse("--config.curriculum.pool=none", "--config.objective.whiten=true", *SEPARATE)


@pytest.mark.parametrize(
    "arm",
    [
        ["--config.objective.teacher_loss=null"],
        ["--config.objective.teacher_loss=luffy"],
        ["--config.objective.teacher_loss=snis"],
        [*SFT_ARM, *SUFFIX_SFT],
    ],
)
def test_the_four_arms_are_possible(arm):
    parse(*arm)


def test_every_number_has_a_range():
    flat = config_lib.flatten(common.get_config())
    numbers = {key for key, value in flat.items() if type(value) in (int, float)}
    assert numbers - constraints.RANGES.keys() == {"rewards.threshold"}  # any number is a threshold
    assert not (constraints.RANGES.keys() | constraints.CHOICES.keys()) - flat.keys()


def test_names_are_those_of_the_code():
    grade = pytest.importorskip("deepgrpo.rewards.grade")
    rules = pytest.importorskip("deepgrpo.teacher.rules")
    readers = pytest.importorskip("deepgrpo.data.readers")
    templates = pytest.importorskip("deepgrpo.data.templates")
    assert set(curriculum_rules.STEP_CHECKED) == grade.STEP_CHECKING
    assert set(constraints.CHOICES["teacher.oracle"]) == set(rules.RULES)
    assert set(constraints.CHOICES["data.template"]) == templates.TEMPLATES.keys()
    assert set(constraints.READERS) == readers.READERS.keys()


def test_a_scheduler_may_start_more_processes_than_the_configuration_can_use():
    config, _ = parse()
    assert config_lib.process_problems(config, 1) == []
    assert [line.partition(",")[0] for line in config_lib.process_problems(config, 2)] == ["rollout.engine", "weights.folder"]
    fits = ("--config.rollout.engine=vllm", "--config.weights.folder=/shared")
    assert config_lib.process_problems(parse(*fits)[0], 2) == []
