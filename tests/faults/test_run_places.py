"""Where no run can be: names, links, rights, another trainer's folder."""

import contextlib
import errno
import os
import re
import subprocess
import sys

import pytest

from deepgrpo import config as config_lib
from deepgrpo.weights import run_folder
from tests.faults.conftest import STEPS, begin, contents

PLACES = {  # what stands where the run's folder should: what is said
    "a name of 300 letters": (lambda folder: None, "r" * 300, "File name too long -> choose a shorter name"),
    "a file": (lambda folder: (folder / "run").touch(), "run", "run: File exists -> something of this name is in the way"),
    "a link to nowhere": (lambda folder: (folder / "run").symlink_to("/nowhere/run"), "run", "run: .* -> "),
    "a link to itself": (lambda folder: (folder / "run").symlink_to("run"), "run", "run: .* -> "),
    "a folder that may not be written": (
        lambda folder: (folder / "run").mkdir(mode=0o555),
        "run",
        "Permission denied -> have its",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_no_place_for_a_run(tmp_path, name):
    prepare, run, said = PLACES[name]
    prepare(tmp_path)
    denied = another_user() if "denied" in said else contextlib.nullcontext()
    with denied, pytest.raises(config_lib.ConfigError, match=f"^run {run} cannot start: ") as caught:
        begin(tmp_path, name=run)
    assert re.search(f"run folder: .*{said}", " ".join(str(caught.value).split())), caught.value


@contextlib.contextmanager
def another_user():
    """Without the powers of root, which may write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


HOLDER = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"


def test_two_trainers_in_one_folder(run, tmp_path):
    begin(tmp_path)
    before = contents(run)
    with subprocess.Popen([sys.executable, "-c", HOLDER, run / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(
            config_lib.ConfigError, match=rf"{run} is in use by process {os.getpid()} on .*, since 2.*\n   -> wait for it"
        ):
            begin(tmp_path)
        holder.kill()  # its lock is no obstacle, though its text is still there
    assert contents(run) == before and begin(tmp_path)[0] == STEPS


def test_a_file_system_without_locks_is_said(run, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    resumed, log = begin(tmp_path)
    assert resumed == STEPS and "has no locks" in log.splitlines()[-1]


def test_half_made_files_of_a_killed_writer_are_swept(run, tmp_path):
    left = [run / name for name in (".latest.tmp-123", ".best_checkpoint.json.tmp-9", "config.part", "rollouts/2.part")]
    for path in left:
        path.touch()
    begin(tmp_path)
    assert not any(path.exists() for path in left)
