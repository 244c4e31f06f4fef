"""Every way to get a key wrong ends with an error that names the key, and the right ways work, without JAX, in no time."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from configs import common
from deepgrpo import config as config_lib
from deepgrpo.config import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
        return str(path)

    return write


def parse(file, *overrides):
    return config_lib.from_command_line(["train.py", f"--config={file}", *overrides])


def message(file, *overrides) -> str:
    with pytest.raises(config_lib.ConfigError) as error:
        parse(file, *overrides)
    return str(error.value)


def test_values_of_every_type(experiment):
    config, line = parse(
        experiment() + ":luffy",
        "--config.seed=3",
        "--config.optim.lr=3e-4",
        "--config.strict_reference",
        "--config.curriculum.pool=none",
        "--config.learner.mesh=(1,2,-1)",
        "--config.teacher.temperatures=0,1",
        "--config.data.train=(gsm8k:a b.jsonl, math:c.parquet)",
        "--config.data.limit",
        "5",
    )
    assert (config.name, config.seed, config.optim.lr, config.strict_reference) == ("test-luffy", 3, 3e-4, True)
    assert config.learner.mesh == (1, 2, -1) and config.teacher.temperatures == (0.0, 1.0)
    assert config.data.train == ("gsm8k:a b.jsonl", "math:c.parquet") and config.data.limit == 5
    assert line.file.endswith(".py:luffy") and ("optim.lr", "3e-4") in line.overrides
    with pytest.raises(AttributeError):
        config.optim.learning_rate = 1.0  # locked: later code cannot invent keys either


@pytest.mark.parametrize(("flag", "value"), [("=1", True), ("=true", True), ("", True), ("=false", False)])
def test_truth(experiment, flag, value):
    assert parse(experiment(), f"--config.strict_reference{flag}")[0].strict_reference is value
    assert parse(experiment(), "--noconfig.strict_reference")[0].strict_reference is False


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("--config.curriculum.injecton_ratio=0.5", ["curriculum.injecton_ratio", "curriculum.injection_ratio"]),
        ("--config.rollout.injection_ratio=0.5", ["rollout.injection_ratio", "curriculum.injection_ratio"]),
        ("--config.curiculum.pool=none", ["curiculum.pool", "curriculum.pool"]),
        ("--config.curriculum=forest", ["section", "curriculum.pool"]),
        ("--config.rollout.n=8.5", ["rollout.n", "'8.5'", "type int"]),
        ("--config.optim.lr=fast", ["optim.lr", "'fast'", "type float"]),
        ("--config.optim.lr=nan", ["optim.lr", "nan"]),
        ("--config.strict_reference=maybe", ["strict_reference", "maybe", "type bool"]),
        ("--config.learner.mesh=(1,two,1)", ["learner.mesh", "1,two,1"]),
        ("--config.num_generations=8", ["num_generations", "rollout.n"]),  # TRL's name
        ("--config.actor.ppo_mini_batch_size=8", ["ppo_mini_batch_size", "optim.mini_batch_prompts"]),  # verl's
        ("--config.seed", ["--config.seed", "no value"]),
        ("--confg.seed=1", ["--confg.seed", "did you mean", "--config.seed"]),
        ("--injection_ratio=1", ["--injection_ratio", "--config.curriculum.injection_ratio"]),
        ("injection_ratio=1", ["injection_ratio", "--config.KEY=VALUE"]),
    ],
)
def test_wrong_override_is_named(experiment, override, parts):
    text = message(experiment(), override)
    assert all(part in text for part in parts), text


def test_duplicates_are_refused(experiment):
    assert "given twice: 1 and 2" in message(experiment(), "--config.seed=1", "--config.seed=2")
    assert "given twice" in message(experiment(), "--config=configs/common.py")


def test_all_mistyped_keys_come_at_once(experiment):
    text = message(experiment(), "--config.sed=1", "--config.modle.path=y")
    assert all(name in text for name in ("sed", "modle.path", "did you mean seed", "did you mean model.path"))


def test_names_of_other_trainers_lead_to_keys():
    assert not set(flags.ALIASES.values()) - config_lib.flatten(common.get_config()).keys()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "config.curriculum.injecton_ratio = 0.5",
            ["experiment.py", "line 10", "injecton_ratio", "injection_ratio"],
        ),
        ("config.rollout.n = 'eight'", ["experiment.py", "line 10", "config.rollout.n = 'eight'"]),
        ("config.rollout.n = True", ["rollout.n", "True"]),
        ("config.learner.buckets = (64, 'x')", ["learner.buckets", "'x'"]),
        ("config.name = None", ["name is required"]),
        ("1 / 0", ["experiment.py", "line 10", "ZeroDivisionError"]),
    ],
)
def test_wrong_experiment_is_located(experiment, line, parts):
    text = message(experiment(line))
    assert all(part in text for part in parts), text


def test_wrong_files_and_arguments():
    assert "--config=PATH" in message_of([])
    text = message_of(["--config=configs/carrychain.py"])
    assert "does not exist" in text and "configs/" in text
    assert "get_config() takes 0 positional arguments" in message_of(["--config=configs/common.py:sft"])
    assert "model.path is required" in message_of(["--config=configs/common.py"])


def message_of(arguments) -> str:
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.from_command_line(["train.py", *arguments])
    return str(error.value)


@pytest.mark.parametrize("program", ["train", "warm_start", "serve"])
def test_help_is_the_programs_own_and_lists_every_key_with_its_default(program, capsys):
    with pytest.raises(SystemExit) as error:
        config_lib.from_command_line([f"/elsewhere/{program}.py", "--help"])
    text = capsys.readouterr().out
    assert error.value.code == 0
    assert text.count(f"python -m deepgrpo.{program} --config=") > 1  # the usage, and an example of the docstring
    keys = config_lib.flatten(common.get_config())
    listed = dict(re.findall(r"^  --config\.([\w.]+)=(.*)$", text, re.M))
    assert listed.keys() == keys.keys()
    required = {key for key, value in keys.items() if value is None}
    assert {key for key, default in listed.items() if default == "(required)"} == required
    wrong = [key for key in keys.keys() - required if ast.literal_eval(listed[key]) != keys[key]]
    assert not wrong


def test_unknown_argument_is_compared_with_the_programs_own_flags():
    own = ("--checkpoint", "--best", "compare")
    for typed, meant in {"--chekpoint=x": "--checkpoint", "compre": "compare", "--confg=x": "--config"}.items():
        with pytest.raises(config_lib.ConfigError, match=rf"{typed.partition('=')[0]}: did you mean {meant}\?"):
            config_lib.from_command_line(["evaluate", typed], own)
    with pytest.raises(config_lib.ConfigError, match=r"did you mean --config=configs/carry_chain.py:luffy\?"):
        config_lib.from_command_line(["train.py", "configs/carry_chain.py:luffy"])
    with pytest.raises(config_lib.ConfigError, match=r"expected --config=PATH, --config.KEY=VALUE, --checkpoint"):
        config_lib.from_command_line(["evaluate", "something"], own)


def test_before_jax():
    """Importing the configuration and every key that is wrong end before JAX is imported."""
    code = (
        "import sys; from deepgrpo import config\n"
        "try: config.from_command_line(['x', '--config=configs/carry_chain.py', '--config.sede=1'])\n"
        "finally: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "False\n", done.stderr
    assert "did you mean seed" in done.stderr and "Traceback" not in done.stderr
