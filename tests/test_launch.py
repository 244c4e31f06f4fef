"""What the scripts in launch/ promise, with stand-ins for the programs that they start."""

import os
import shutil
import signal
import subprocess

import pytest

from tests.conftest import ROOT

DEADLINE = 300


def checkout(folder, name: str, python: str) -> dict[str, str]:
    """Makes a folder with one script and a stand-in for Python; returns the environment to start it in."""
    (folder / "launch").mkdir()
    (folder / "bin").mkdir()
    for stub in ("env.sh", "vllm_env.sh"):
        (folder / "launch" / stub).write_text("#!/bin/sh\n")
    shutil.copy(ROOT / "launch" / name, folder / "launch")
    (folder / "bin" / "python").write_text(python)
    for path in (*folder.glob("launch/*.sh"), folder / "bin" / "python"):
        path.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "DEEPGRPO_SYSTEM"}
    return inherited | {"DEEPGRPO_VENV": str(folder), "LEARNER_GPUS": "0", "ROLLOUT_GPUS": "1"}


@pytest.mark.parametrize(("fails", "status"), [("nothing", 0), ("not system", 3), ("-m system", 4), ("system", 3), ("format", 5)])
def test_every_part_of_the_tests_runs_and_the_status_is_of_all(tmp_path, fails, status):
    """fails: what the calls that fail have in their line; the first failure's status is the script's."""
    codes = 'code=0; case "$*" in *"-m not system"*) code=3 ;; *"-m system"*) code=4 ;; *format*) code=5 ;; esac'
    python = f'#!/bin/bash\necho "$*" >>{tmp_path}/calls\n{codes}\ncase "$*" in *"{fails}"*) exit $code ;; esac\n'
    environment = checkout(tmp_path, "test.sh", python)
    done = subprocess.run([tmp_path / "launch" / "test.sh", "-q"], env=environment, timeout=DEADLINE)
    assert done.returncode == status
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4 and "-m not system -q" in calls[2] and calls[3].endswith("-m system -q")


def heed_hangups() -> None:
    """Tests that run under nohup would hand down that SIGHUP is ignored, which a shell cannot undo."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_train_gpu_forwards_one_signal_and_waits_for_the_save(tmp_path):
    """Ctrl-C reaches the whole group: the trainer ignores it here, so that only what the script forwards counts."""
    traps = "trap 'echo told; sleep 1; echo saved; exit 7' TERM\ntrap '' INT HUP USR1\n"
    environment = checkout(tmp_path, "train_gpu.sh", f"#!/bin/bash\n{traps}echo ready\nwhile :; do sleep 0.1; done\n")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        command = [tmp_path / "launch" / "train_gpu.sh", "x.py"]
        keys = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": heed_hangups}
        with subprocess.Popen(command, env=environment, **keys) as script:
            while script.stdout.readline() != "ready\n":
                assert script.poll() is None
            os.kill(script.pid, number) if number == signal.SIGTERM else os.killpg(script.pid, number)
            rest = script.communicate(timeout=DEADLINE)[0]
        assert (rest.split(), script.returncode) == (["told", "saved"], 7), signal.Signals(number).name
