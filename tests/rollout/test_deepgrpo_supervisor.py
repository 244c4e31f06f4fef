"""The parent of a vLLM server by itself; that nothing outlives it is in test_vllm_server.py."""

import os
import signal
import subprocess
import sys

import pytest

from deepgrpo.rollout.vllm_server import PLUGIN


def supervise(command: str, log, limit: int = 2**20) -> subprocess.Popen:
    """Runs a Python command under the supervisor, with a log limit in bytes."""
    code = (
        f"import os, sys, deepgrpo_supervisor as s\ns.LOG_LIMIT = {limit}\n"
        f"sys.exit(s.main(os.getppid(), 5.0, [sys.executable, '-uc', {command!r}]))"
    )
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": str(PLUGIN), "PYTHONUNBUFFERED": "1"},
        )


@pytest.mark.parametrize("command, status", [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)])
def test_status_is_the_commands(tmp_path, command, status):
    with supervise(command, tmp_path / "log") as process:
        assert process.wait(60) == status
    assert "the server ended with status" in (tmp_path / "log").read_text()


def test_sigterm_is_passed_on(tmp_path):
    command = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up'); time.sleep(60)"
    with supervise(command, tmp_path / "log") as process:
        while "up" not in (tmp_path / "log").read_text():
            assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 7


def test_older_half_of_a_long_log_goes(tmp_path):
    command = "import time\nfor i in range(200):\n    print('line', i)\n    time.sleep(0.004 if i < 190 else 0.05)"
    with supervise(command, tmp_path / "log", limit=1000) as process:
        assert process.wait(60) == 0
    text = (tmp_path / "log").read_text()
    assert "older half of this log was dropped" in text and "line 0\n" not in text and "line 199\n" in text
