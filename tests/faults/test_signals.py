"""Signals and streams: none of them loses a step, and what only shows the run never ends it.

Two lives of one run, each with several of them; what came of each is in the run's folder.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.weights.checkpoint import Checkpoints
from tests.conftest import QUICK, ROOT
from tests.faults.conftest import DEADLINE, arguments
from tests.faults.scripted_endpoint import MODEL, Endpoint, right

LONG = {"train__steps": 500, "checkpoint__every": 0, "telemetry__rollouts_every": 0}


def start(folder: pathlib.Path, stdout, stderr=None, before=None, environment=(), **overrides) -> subprocess.Popen:
    line = [sys.executable, "-m", "deepgrpo.train", *arguments(folder, **LONG | overrides)]
    environment = os.environ | {"XLA_FLAGS": QUICK} | dict(environment)
    stderr = subprocess.STDOUT if stdout == subprocess.PIPE else stderr

    def prepare():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup would hand down its being ignored
        if before:
            before()

    return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr, preexec_fn=prepare, bufsize=0)


def steps(run: pathlib.Path) -> int:
    return len(metrics_lib.read(run)) if (run / "metrics.jsonl").exists() else 0


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: subprocess.Popen, run: pathlib.Path, status: int = 0) -> str:
    """Waits for the end; the newest step is saved and logged. Returns what the log says of this life."""
    assert process.wait(DEADLINE) == status
    saved = Checkpoints(run / "checkpoints", 1).latest_step()
    assert saved == metrics_lib.read(run)[-1]["step"] == int((run / "latest").read_text())
    said = (run / "log.txt").read_text()
    (run / "log.txt").unlink()
    assert "stopped by a signal" in said and "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def lives(student, tmp_path_factory):
    """The run's lives, one after the other: {name: what its log says}."""
    folder = tmp_path_factory.mktemp("lives")
    run, said = folder / "run", {}

    # A full disk under both streams and under what is only for people; then the terminal is closed.
    run.mkdir()
    (run / "rollouts").symlink_to("/dev/full")
    (run / "tensorboard").symlink_to("/dev/full")
    keys = {"telemetry__rollouts_every": 1, "telemetry__tensorboard": True}
    with open("/dev/full", "w") as full, start(folder, full, full, **keys) as process:
        wait_for(lambda: steps(run) > 1, process)
        process.send_signal(signal.SIGHUP)
        said["full disk, SIGHUP"] = ended(process, run)
    # A reader that has seen enough and a closed stream of errors, in a language without UTF-8; then a scheduler's warning,
    # Ctrl-C and a launcher's order to end.
    before = steps(run)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    with start(folder, subprocess.PIPE, None, lambda: os.close(2), ascii_only) as process:
        assert process.stdout.readline()
        process.stdout.close()
        wait_for(lambda: steps(run) > before + 1, process)
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        said["reader gone, three signals"] = ended(process, run)
    return run, said


@pytest.mark.system
def test_every_life_saves_its_last_step(lives):
    run, said = lives
    assert len(said) == 2
    records = metrics_lib.read(run)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(json.loads((run / "config.json").read_text())["restarts"]) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    ("life", "line"),
    [
        ("reader gone, three signals", "standard output cannot be written .*Broken pipe"),
        ("full disk, SIGHUP", "standard output cannot be written .*No space left on device"),
        ("full disk, SIGHUP", "TensorBoard could not be written"),
        ("full disk, SIGHUP", "rollouts could not be written"),
    ],
)
def test_what_was_lost_is_said_once(lives, life, line):
    assert len(re.findall(line, lives[1][life])) == 1, lives[1][life]


@pytest.mark.system
def test_while_the_teacher_waits(student, tmp_path):
    """One order is not lost; a second one after two seconds ends the run at once."""
    asked, environment = threading.Event(), {"OPENAI_API_KEY": "EMPTY"}

    def hanging(exchange):
        if exchange.asked.get("max_tokens") == 1:  # the check at the start
            return right(exchange)
        asked.set()
        exchange.server.endpoint.closing.wait(DEADLINE)

    with Endpoint(hanging) as endpoint:
        keys = {"teacher__base_url": endpoint.base_url, "teacher__model": MODEL, "teacher__timeout": 600}
        process = start(tmp_path, subprocess.PIPE, environment=environment, **keys)
        try:
            wait_for(asked.is_set, process)
            process.send_signal(signal.SIGTERM)
            time.sleep(2.5)  # at least two seconds, however long they take
            assert process.poll() is None  # the step ends when the teacher has answered
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=DEADLINE)[0].decode()
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM and "stopping after this step" in output and "Traceback" not in output
