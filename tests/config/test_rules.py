"""What cannot work is refused by name, with the values that were found; what can is not."""

import pytest

from configs import carry_chain, common, eval_drgrpo, eval_seed, gsm8k_0p5b, math_1p5b, smollm2
from deepgrpo import config as config_lib
from deepgrpo.data import dataset
from deepgrpo.preflight import rules, values

POSSIBLE = {
    **{"name": "run", "model.path": "models/m"},
    **{"data.train": ("carry_chain:train:16",), "data.validation": ("carry_chain:heldout:16",)},
}
SEPARATE = {"objective.teacher_reduction": "separate_stream_mean"}
SFT = SEPARATE | {"objective.teacher_loss": "sft"}
POST = SFT | {"objective.teacher_update": "post_ppo"}
SUFFIX_SFT = {"curriculum.teacher_rows": False, "curriculum.suffix_sft": "epoch_local"}
PLAIN, VLLM = {"curriculum.pool": "none"}, {"rollout.engine": "vllm"}
TREES = PLAIN | {"loop": "treerl"}
AGENT = {"loop": "agent", "agent.environment": "lookup"}
INLINE = {"curriculum.pool": "branches_inline", "teacher.enabled": False}
BUFFERED = INLINE | {"curriculum.pool": "branches"}
SUFFIXES = SEPARATE | {"curriculum.pool": "suffixes"}
COSINE = {"optim.schedule": "cosine"}


def given(*edits, base=common.get_config):
    """A possible run with edits by dotted key."""
    config = base()
    if base is common.get_config:
        config.update_from_flattened_dict(POSSIBLE)
    for edit in edits:
        config.update_from_flattened_dict(edit)
    return config


@pytest.mark.parametrize(
    ("edits", "parts"),
    [
        ({"curriculum.injection_ratio": 1.5}, "curriculum.injection_ratio = 1.5 | (0, 1]"),
        ({"optim.lr": float("nan")}, "optim.lr = nan"),
        ({"validation.every": -1}, "validation.every = -1: expected in [0, inf)"),
        ({"teacher.temperatures": (0.3, -1.0)}, "teacher.temperatures = (0.3, -1.0): expected each in [0, inf)"),
        ({"curriculum.pool": "forst"}, "curriculum.pool | did you mean forest"),
        ({"rollout.n": 1}, "rollout.n = 1"),
        ({"rollout.temperature": 0.0}, "rollout.temperature"),
        ({"rollout.max_staleness": 2}, "rollout.max_staleness = 2"),
        ({"objective.clip_c": 1.0}, "objective.clip_c"),
        ({"objective.snis_beta": 0.0}, "objective.snis_beta = 0.0"),
        ({"objective.kl_type": "k4"}, "objective.kl_type = 'k4' | k1"),
        ({"optim.teacher.lr": 0.0}, "optim.teacher.lr = 0.0 | -1"),
        ({"data.train": ("gsm8:x",)}, "data.train = ('gsm8:x',) | NAME one of gsm8k | did you mean gsm8k?"),
        ({"data.train": ("gsm8k:",)}, "expected gsm8k:PATH, PATH a file or folder"),
        ({"name": "a/b"}, "name = 'a/b'"),
        ({"data.train": ()}, "data.train = () | --config.data.train=NAME:PATH"),
        ({"learner.buckets": (512, 256)}, "learner.buckets | rising"),
        ({"learner.buckets": (256,)}, "learner.buckets | rollout.max_model_len = 1024"),
        ({"learner.mesh": (2, -1, -1)}, "learner.mesh"),
        ({"learner.coordinator": "host"}, "learner.coordinator | HOST:PORT"),
        ({"learner.process": (0, 2)}, "learner.coordinator=HOST:PORT | rollout.engine=vllm | weights.folder"),
        ({"learner.process": (1, 1)}, "learner.process = (1, 1) | below the count"),
        ({"data.max_prompt_length": 1000}, "data.max_prompt_length = 1000 | curriculum.min_remaining_tokens = 32"),
        ({"optim.mini_batch_prompts": 256}, "optim.mini_batch_prompts = 256 | data.batch_size = 128"),
        ({"curriculum.injection_ratio": 0.001}, "data.batch_size = 128 | injected"),
        ({"curriculum.failures": "longest_prefix", "data.train": ("gsm8k:x",)}, "longest_prefix | steps"),
        ({"curriculum.cut": "random", "objective.teacher_loss": "luffy"}, "cut = 'random' | teacher_loss=null"),
        ({"curriculum.start_from": "runs/x", **PLAIN}, "pool = 'none'"),
        ({"teacher.base_url": "oracle", "data.train": ("gsm8k:x",)}, "teacher.oracle | its own questions"),
        ({"teacher.base_url": "host:8001"}, "teacher.base_url = 'host:8001' | http://HOST:PORT"),
        ({"teacher.replay": "/nowhere"}, "teacher.replay | does not exist"),
        ({"teacher.prices": (1.0,)}, "teacher.prices = (1.0,) | expected two"),
        ({"judge.base_url": "http://x"}, "judge.model = ''"),
        (SFT | {"objective.teacher_reduction": "mixed_token_mean"}, "teacher_reduction = 'mixed_token_mean' | separate_stream"),
        ({"objective.teacher_loss": "luffy", "objective.teacher_update": "post_ppo"}, "teacher_loss=sft"),
        ({"objective.teacher_coef": 0.5}, "objective.teacher_coef = 0.5 | no coefficient"),
        (SEPARATE | {"objective.auto_teacher_coef": True}, "auto_teacher_coef = True | no teacher loss to weigh"),
        (SEPARATE | {"objective.teacher_loss": "snis"}, "snis | teacher_reduction=mixed_token_mean"),
        ({"objective.teacher_loss": "snis", "curriculum.teacher_rows": False}, "teacher_rows=True"),
        (SFT, "curriculum.teacher_rows = True | teacher_rows=False"),
        (POST | {"curriculum.teacher_rows": False}, "suffix_sft = 'off' | epoch_local or post_step"),
        (SUFFIX_SFT, "teacher_update = 'joint' | teacher_update=post_ppo"),
        (POST | SUFFIX_SFT | {"curriculum.pool": "chain"}, "pool = 'chain' | only the forest"),
        ({"objective.whiten": True}, "objective.whiten = True | teacher_rows=False"),
        (PLAIN | {"objective.teacher_loss": "luffy"}, "there are no teacher tokens"),
        ({"curriculum.pool": "flat", "objective.teacher_loss": "luffy"}, "pool = 'flat' | forest or suffixes"),
        ({"objective.aggregation": "dr_grpo"}, "objective.length_constant = 0"),
        ({"objective.overlong": "soft"}, "objective.overlong_buffer = 0 | rollout.max_model_len"),
        ({"validation.n": 4}, "validation.temperature = 0.0 | greedy"),
        ({"data.selection": ("carry_chain:heldout:16",)}, "data.selection | data.validation"),
        (VLLM | {"rollout.temperature": 2.5}, "rollout.temperature = 2.5 | [0.01, 2]"),
        (VLLM | {"vllm.gpu_ids": (0, 1, 1)}, "vllm.gpu_ids = (0, 1, 1) | vllm.tensor_parallel = 1"),
        (VLLM | {"vllm.attach": ("host:8000",)}, "vllm.attach | http://HOST:PORT"),
        ({"rewards.extra": ("length",)}, "rewards.extra = ('length',) | NAME=WEIGHT"),
        ({"rewards.weight": 0.0}, "rewards.weight = 0.0 | nothing would be rewarded"),
        ({"diagnostics.dump_every": 1, "curriculum.pool": "flat"}, "diagnostics.dump_every = 1 | forest"),
        # trees
        ({"loop": "treerl"}, "loop = 'treerl' | curriculum.pool = 'forest' | curriculum.pool=none"),
        (TREES | {"treerl": (2, 1, 1, 0)}, "treerl = (2, 1, 1, 0) | only L may be 0"),
        (TREES | {"treerl": (1, 2, 0, 2)}, "treerl = (1, 2, 0, 2) | single response"),
        (TREES | {"objective.advantage": "rloo"}, "objective.advantage = 'rloo' | advantages of their own"),
        (TREES | {"objective.overlong": "mask"}, "objective.overlong = 'mask'"),
        (AGENT | {"curriculum.pool": "suffixes"}, "curriculum.pool = 'suffixes' | no branches inside a conversation"),
        (AGENT | {"curriculum.cut": "random"}, "curriculum.cut = 'random' | curriculum.cut=teacher"),
        (AGENT | {"agent.environment": "serch"}, "agent.environment = 'serch' | known: none, lookup, search"),
        (AGENT | {"agent.environment": "code", "curriculum.pool": "chain"}, "curriculum.pool = 'chain' | only the forest"),
        (AGENT | {"agent.max_turns": 0}, "agent.max_turns = 0"),
        ({"data.train": ("reasoning_gym:gcd:train:9",)}, "rewards.threshold = 0.0 | rewards.threshold=0.01"),
        (AGENT | {"agent.observation_tokens": 4096}, "agent.observation_tokens = 4096 | no room"),
        (AGENT | {"diagnostics.recover_every": 5}, "diagnostics.recover_every = 5"),
        # branches
        ({"curriculum.pool": "branches"}, "teacher.enabled = True | nothing goes to the teacher"),
        (INLINE | {"curriculum.injection_mode": "replace"}, "injection_mode = 'replace' | injection_mode=add"),
        (INLINE | SEPARATE | {"objective.teacher_loss": "luffy"}, "teacher_loss | the student's own"),
        (INLINE | {"branches.branches_per_point": 1}, "branches.branches_per_point = 1 | [2, inf)"),
        (BUFFERED | {"branches.branches_per_entry": 1}, "branches.branches_per_entry = 1 | at least 2"),
        (SUFFIXES | {"branches.branches_per_entry": 0}, "branches_per_entry = 0 | only for objective.teacher_loss=sft"),
        (SUFFIXES | {"curriculum.teacher_rows": False}, "teacher_rows = False | teacher_rows=True"),
        # a cosine without an end
        (COSINE | {"train.student_tokens": 500}, "train.student_tokens = 500 | the cosine ends with the run"),
        (COSINE | {"curriculum.injection_mode": "replace"}, "injection_mode = 'replace' | the cosine ends with the run"),
        (COSINE | {"rollout.dynamic_sampling": 2}, "rollout.dynamic_sampling = 2 | the cosine ends with the run"),
    ],
)  # fmt: skip
def test_what_cannot_work(edits, parts):
    text = "\n".join(rules.problems(given(edits)))
    assert all(part in text for part in parts.split(" | ")), text


@pytest.mark.parametrize(
    "edits",
    [
        *({"objective.teacher_loss": name} for name in ("null", "luffy", "snis")),
        POST | SUFFIX_SFT,
        PLAIN | {"teacher.replay": "/nowhere"},  # a plain run is not judged by what it does not use
        PLAIN | SEPARATE | {"objective.whiten": True},
        TREES | {"treerl": (6, 2, 0, 2)},
        {"treerl": (1, 2, 0, 2)},  # another loop
        INLINE | SEPARATE,
        BUFFERED | {"curriculum.injection_ratio": 0.001},  # which only the other pools look at
        SUFFIXES | {"objective.teacher_loss": "luffy", "objective.advantage": "rloo"},
        SUFFIXES | POST | {"branches.branches_per_entry": 0},
        {"branches.branches_per_entry": 0},  # another pool
        COSINE,
        COSINE | {"train.steps": 50, "train.student_tokens": 500},
    ],
)  # fmt: skip
def test_what_works(edits):
    assert rules.problems(given(edits)) == []


def test_all_problems_come_in_one_error_and_none_over_a_value_that_is_wrong_by_itself():
    with pytest.raises(config_lib.ConfigError) as error:
        rules.validate(given({"rollout.n": 1, "data.batch_size": 0, "learner.buckets": (256,)}))
    assert "3 problems" in str(error.value) and "mini_batch" not in str(error.value)
    (problem,) = rules.problems(given({"data.train": ("carrychain:train:16",)}, base=carry_chain.get_config))
    assert problem.startswith("data.train = ") and problem.endswith("did you mean carry_chain?")


def test_the_tables_name_keys_that_exist():
    keys = config_lib.flatten(common.get_config())
    assert not (values.INTERVALS.keys() | values.CHOICES.keys()) - keys.keys()


def test_names_are_those_of_the_code():
    grade = pytest.importorskip("deepgrpo.rewards.grade")
    teacher_rules = pytest.importorskip("deepgrpo.teacher.oracle")
    templates = pytest.importorskip("deepgrpo.data.templates")
    assert set(rules.STEP_CHECKED) == grade.STEP_CHECKING
    known = ("carry_chain", "lookup_chain", "arithmetic", "solutions:x")
    assert {name.partition(":")[0] for name in known} == set(teacher_rules.RULES)
    assert not any(values.wrong("teacher.oracle", name) for name in known) and values.wrong("teacher.oracle", "solutions")
    assert set(values.CHOICES["data.template"]) == templates.TEMPLATES.keys()


@pytest.mark.parametrize("name", ["carry_chain:train:4", "carry_chain:heldout:16", "arithmetic:train:3", "arithmetic:train:2:3"])
def test_a_right_name_of_a_generated_set_is_read(name):
    assert not values.wrong_set(name) and dataset.read(name)


@pytest.mark.parametrize(
    "name",
    [
        *("carry_chain:trian:4", "carry_chain:train", "carry_chain:train:x", "carry_chain:train:0", "carry_chain:train:4:1"),
        *("arithmetic:test:3", "arithmetic:train:3:4", "arithmetic:train:3:0", "arithmetic:train:-1", "arithmetic:train:3:1:1"),
    ],
)
def test_a_wrong_name_of_a_generated_set_says_the_shape(name):
    text = values.wrong_set(name)
    assert name in text and "SPLIT:COUNT" in text and "train or heldout" in text
    with pytest.raises(ValueError):
        dataset.read(name)


def test_a_scheduler_may_start_more_processes_than_the_configuration_can_use():
    assert rules.process_problems(given(), 1) == []
    engine, folder = rules.process_problems(given(), 2)
    assert "2 processes" in engine and "rollout.engine=vllm" in engine and "weights.folder" in folder
    assert rules.process_problems(given(VLLM | {"weights.folder": "/shared"}), 2) == []


#### Settings that do nothing


def unused(edits) -> str:
    found = rules.settings_problems(given(edits, base=carry_chain.get_config))
    assert not any(finding.fatal for finding in found)
    return "\n".join(f"{finding.what} -> {finding.remedy}" for finding in found)


def test_experiments_have_none():
    made = [carry_chain.get_config(arm) for arm in carry_chain.ARMS]
    made += [module.get_config(arm) for module in (gsm8k_0p5b, math_1p5b) for arm in common.TEACHER_ARMS]
    made += [smollm2.get_config(), smollm2.get_config("gsm8k"), eval_drgrpo.get_config(), eval_seed.get_config()]
    assert [rules.settings_problems(config) for config in made] == [[]] * len(made)


@pytest.mark.parametrize(
    ("edit", "user"),
    [
        ({"vllm.servers": 2}, "rollout.engine=vllm"),
        ({"treerl": (3, 2, 1, 2)}, "loop=treerl"),
        ({"judge.model": "m"}, "judge.base_url"),
        ({"objective.luffy_gamma": 0.5}, "objective.teacher_loss=luffy"),
        ({"objective.overlong_buffer": 9}, "objective.overlong=soft"),
        ({"objective.kl_type": "mse"}, "objective.kl_coef above 0"),
        ({"branches.n_branch_points": 2}, "curriculum.pool=branches_inline, branches or suffixes"),
        ({"teacher.model": "m"}, "a teacher.base_url of an endpoint"),
    ],
)
def test_a_setting_that_nothing_uses_is_told(edit, user):
    ((key, value),) = edit.items()
    assert unused(edit) == f"settings: {key}={value} without effect: only {user} uses it -> leave it out"


def test_rollouts_ahead_without_a_correction_are_told():
    assert "objective.tis_cap=0 does not correct that -> set --config.objective.tis_cap=2" in unused({"rollout.max_staleness": 1})
    assert unused({"rollout.max_staleness": 1, "objective.tis_cap": 2.0}) == ""
    both = unused({"validation.every": 0, "validation.n": 4, "checkpoint.best_metric": "x"})
    assert "checkpoint.best_metric=x, validation.n=4 without effect: only validation.every" in both
