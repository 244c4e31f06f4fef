"""What a training or a tool does when its terminal, its reader or its disk is gone; and the launcher's signals."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys

import pytest

from deepgrpo.config import streams
from tests.conftest import ROOT
from tests.faults.conftest import DEADLINE


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_a_steady_stream(tmp_path, caplog):
    broken = streams.Steady(Broken(), "standard output")
    for _ in range(3):
        print("step", file=broken, flush=True)
    assert [record.getMessage() for record in caplog.records if record.name == "deepgrpo.terminal"] == [
        "standard output cannot be written ([Errno 5] Input/output error): the run goes on and says no more there"
    ]
    closed = open(tmp_path / "closed", "w")
    steady = streams.Steady(closed, "standard error")
    closed.close()
    assert not steady.isatty() and steady.write("x") == 1
    with open(tmp_path / "latin", "w", encoding="ascii") as ascii_only:
        streams.Steady(ascii_only, "standard output").write("√2 \ud83d")
    assert (tmp_path / "latin").read_text() == "\\u221a2 \\ud83d"


TOOL = "from deepgrpo.config.streams import tool\nwith tool():\n    for i in range(99999): print(i)"


@pytest.mark.parametrize(("line", "status", "said"), [("| head -1", 0, "0\n"), ("> /dev/full", 1, "No space left on device")])
def test_a_tools_output_is_its_result(line, status, said):
    """A reader that has seen enough ends it quietly; a result that is lost is an error."""
    command = f"set -o pipefail; {sys.executable} -c '{TOOL}' {line}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == status and said in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_launcher_forwards_one_signal_and_waits_for_the_save(tmp_path):
    """The script with a trainer that needs a while to save; Ctrl-C reaches the whole group."""
    (tmp_path / "launch").mkdir()
    for name in ("env.sh", "vllm_env.sh"):
        (tmp_path / "launch" / name).write_text("#!/bin/sh\n")
    shutil.copy(ROOT / "launch" / "train_gpu.sh", tmp_path / "launch")
    traps = "trap 'echo told; sleep 1; echo saved; exit 7' TERM\ntrap '' INT HUP USR1\n"
    trainer = f"#!/bin/bash\n{traps}echo ready\nwhile :; do sleep 0.1; done\n"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(trainer)
    for path in (*tmp_path.glob("launch/*.sh"), tmp_path / "bin" / "python"):
        path.chmod(0o755)
    environment = os.environ | {"DEEPGRPO_VENV": str(tmp_path), "LEARNER_GPUS": "0", "ROLLOUT_GPUS": "1"}
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        command = [tmp_path / "launch" / "train_gpu.sh", "x.py"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as script:
            while script.stdout.readline() != "ready\n":
                assert script.poll() is None
            os.kill(script.pid, number) if number == signal.SIGTERM else os.killpg(script.pid, number)
            rest = script.communicate(timeout=DEADLINE)[0]
        assert (rest.split(), script.returncode) == (["told", "saved"], 7), signal.Signals(number).name
