"""What the loop's fault tests share: a short finished run of the demo's student, made once, and the demo's command line."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from deepgrpo import config as config_lib
from deepgrpo.preflight import rules
from deepgrpo.preflight.inputs import check_inputs
from deepgrpo.weights import run_folder
from tests.conftest import QUICK, ROOT

STEPS = 3
SHORT = {
    **{"name": "run", "train.student_tokens": 0, "train.steps": STEPS, "data.validation_limit": 8, "validation.every": 0},
    **{"checkpoint.every": 1, "checkpoint.keep": 2, "telemetry.rollouts_every": 1, "telemetry.tensorboard": "false"},
}
DEADLINE = 300  # seconds for what takes ten on an idle machine


def arguments(folder: pathlib.Path, **overrides: object) -> list[str]:
    """Of the command line of a run of `STEPS` steps below `folder`. Keyword names are keys with __ for the dot."""
    keys = SHORT | {"run_dir": folder} | {name.replace("__", "."): value for name, value in overrides.items()}
    return [f"--config={ROOT / 'configs' / 'carry_chain.py'}", *(f"--config.{key}={value}" for key, value in keys.items())]


def configured(folder: pathlib.Path, **overrides: object):
    """(configuration, its command line) of such a run."""
    return rules.from_command_line(["train", *arguments(folder, **overrides)])


def started(folder: pathlib.Path, environment: dict[str, str] | None = None, **overrides: object) -> subprocess.Popen:
    """Such a run as a process, with one device; its output is piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "deepgrpo.train", *arguments(folder, **overrides)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": QUICK} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begin(folder: pathlib.Path, **overrides: object):
    """The start of `train.main`, up to the log; returns (step that is resumed, what log.txt says)."""
    config, line = configured(folder, **overrides)
    folder = config_lib.run_folder(config)
    with config_lib.Setup(f"run {config.name} cannot start", folder / "log.txt"), contextlib.ExitStack() as stack:
        _, resumed = run_folder.begin(config, line, stack, True, ["cpu"], check_inputs)
        said = (folder / "log.txt").read_text()
    return resumed, "".join(line for line in said.splitlines(True) if "began: run_dir:" not in line)  # the copy lies elsewhere


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.fixture(scope="session")
def finished(student, tmp_path_factory) -> pathlib.Path:
    """The folder above the finished run; to look at."""
    folder = tmp_path_factory.mktemp("finished")
    process = started(folder)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    return folder


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    """A copy of the finished run's folder, to damage."""
    return pathlib.Path(shutil.copytree(finished / "run", tmp_path / "run"))
