"""Every way to get a key wrong ends with an error that names the key, and the right ways work, without JAX, in no time."""

import ast
import re
import subprocess
import sys

import pytest

from configs import common
from deepgrpo import config as config_lib
from deepgrpo.config import flags
from deepgrpo.preflight import rules
from tests.conftest import ROOT

EXPERIMENT = """
from configs import common

def get_config(argument="none"):
    config = common.get_config()
    config.name = "test-" + argument
    config.model.path = "models/m"
    config.data.train = ("carry_chain:train:4",)
    config.data.validation = ("carry_chain:heldout:4",)
    {line}
    return config
"""


@pytest.fixture
def experiment(tmp_path):
    def write(line: str = "pass") -> str:
        path = tmp_path / "experiment.py"
        path.write_text(EXPERIMENT.format(line=line))
        return f"--config={path}"

    return write


def message(*arguments, others=()) -> str:
    with pytest.raises(config_lib.ConfigError) as error:
        rules.from_command_line(["train.py", *arguments], others)
    return str(error.value)


def test_values_of_every_type(experiment):
    arguments = [
        *(experiment() + ":luffy", "--config.seed=3", "--config.optim.lr=3e-4", "--config.strict_reference"),
        *("--config.curriculum.pool=none", "--config.learner.mesh=(1,2,-1)", "--config.teacher.temperatures=0,1"),
        *("--config.data.train=(gsm8k:a b.jsonl, math:c.parquet)", "--config.data.validation_limit", "5"),
    ]
    config, line = rules.from_command_line(["train.py", *arguments])
    assert (config.name, config.seed, config.optim.lr, config.strict_reference) == ("test-luffy", 3, 3e-4, True)
    assert config.learner.mesh == (1, 2, -1) and config.teacher.temperatures == (0.0, 1.0)
    assert config.data.train == ("gsm8k:a b.jsonl", "math:c.parquet") and config.data.validation_limit == 5
    assert line.file.endswith(".py:luffy") and ("optim.lr", "3e-4") in line.overrides
    with pytest.raises(AttributeError):
        config.optim.learning_rate = 1.0  # locked: later code cannot invent keys either


@pytest.mark.parametrize(
    ("flag", "value"),
    [("=1", True), ("=true", True), ("=false", False), ("no", False)],
)
def test_truth(experiment, flag, value):
    flag = "--noconfig.strict_reference" if flag == "no" else f"--config.strict_reference{flag}"
    assert rules.from_command_line(["train.py", experiment(), flag])[0].strict_reference is value


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("--config.curriculum.injecton_ratio=0.5", "curriculum.injecton_ratio | curriculum.injection_ratio"),
        ("--config.rollout.injection_ratio=0.5", "rollout.injection_ratio | curriculum.injection_ratio"),
        ("--config.curiculum.pool=none", "curiculum.pool | curriculum.pool"),
        ("--config.curriculum=forest", "section | curriculum.pool"),
        ("--config.rollout.n=8.5", "rollout.n | '8.5' | type int"),
        ("--config.optim.lr=fast", "optim.lr | 'fast' | type float"),
        ("--config.optim.lr=nan", "optim.lr | nan"),
        ("--config.strict_reference=maybe", "strict_reference | maybe | type bool"),
        ("--config.learner.mesh=(1,two,1)", "learner.mesh | 1,two,1"),
        ("--config.num_generations=8", "num_generations | rollout.n"),  # TRL's name
        ("--config.actor.ppo_mini_batch_size=8", "ppo_mini_batch_size | optim.mini_batch_prompts"),  # verl's
        ("--config.seed", "--config.seed | no value"),
        ("--confg.seed=1", "--confg.seed | did you mean | --config.seed"),
        ("--injection_ratio=1", "--injection_ratio | --config.curriculum.injection_ratio"),
        ("injection_ratio=1", "injection_ratio | --config.KEY=VALUE"),
        ("--config.sed=1 --config.modle.path=y", "did you mean seed | did you mean model.path"),  # all at once
        ("--config.seed=1 --config.seed=2", "given twice: 1 and 2"),
        ("--config=configs/common.py", "given twice"),
    ],
)
def test_wrong_override_is_named(experiment, override, parts):
    text = message(experiment(), *override.split())
    assert all(part in text for part in parts.split(" | ")), text


def test_names_of_other_trainers_lead_to_keys():
    assert not set(flags.ALIASES.values()) - config_lib.flatten(common.get_config()).keys()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("config.curriculum.injecton_ratio = 0.5", "experiment.py | line 10 | injecton_ratio | injection_ratio"),
        ("config.rollout.n = 'eight'", "experiment.py | line 10 | config.rollout.n = 'eight'"),
        ("config.rollout.n = True", "rollout.n | True"),
        ("config.learner.buckets = (64, 'x')", "learner.buckets | 'x'"),
        ("config.name = None", "name is required"),
        ("1 / 0", "experiment.py | line 10 | ZeroDivisionError"),
    ],
)
def test_wrong_experiment_is_located(experiment, line, parts):
    text = message(experiment(line))
    assert all(part in text for part in parts.split(" | ")), text


def test_wrong_files_and_arguments():
    assert "--config=PATH" in message()
    text = message("--config=configs/carrychain.py")
    assert "does not exist" in text and "configs/" in text
    assert "get_config() takes 0 positional arguments" in message("--config=configs/common.py:sft")
    assert "model.path is required" in message("--config=configs/common.py")
    assert "did you mean --config=configs/carry_chain.py:luffy?" in message("configs/carry_chain.py:luffy")


def test_unknown_argument_is_compared_with_the_programs_own_flags():
    own = ("--checkpoint", "--best", "compare")
    for typed, meant in {"--chekpoint": "--checkpoint", "compre": "compare", "--confg": "--config"}.items():
        assert f"{typed}: did you mean {meant}?" in message(f"{typed}=x", others=own)
    assert "expected --config=PATH, --config.KEY=VALUE, --checkpoint" in message("something", others=own)


@pytest.mark.parametrize("program", ["train", "warm_start", "serve"])
def test_help_is_the_programs_own_and_lists_every_key_with_its_default(program, capsys):
    with pytest.raises(SystemExit) as error:
        rules.from_command_line([f"/elsewhere/{program}.py", "--help"])
    text = capsys.readouterr().out
    assert error.value.code == 0
    assert text.count(f"python -m deepgrpo.{program} --config=") > 1  # the usage, and an example of the docstring
    keys = config_lib.flatten(common.get_config())
    listed = dict(re.findall(r"^  --config\.([\w.]+)=(.*)$", text, re.M))
    assert {key: None if text == "(required)" else ast.literal_eval(text) for key, text in listed.items()} == keys


def test_before_jax():
    """A key that is wrong ends the program before JAX is imported."""
    code = (
        "import sys; from deepgrpo.preflight import rules\n"
        "try: rules.from_command_line(['x', '--config=configs/carry_chain.py', '--config.sede=1'])\n"
        "finally: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "False\n", done.stderr
    assert "did you mean seed" in done.stderr and "Traceback" not in done.stderr
