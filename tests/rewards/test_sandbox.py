"""Hostile code ends within its limits, reaches nothing outside and leaves no process; at every level that this machine offers."""

import functools
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from deepgrpo.rewards import sandbox

SMALL = {"seconds": 2.0, "cpu_seconds": 1, "memory_bytes": 2**30, "file_bytes": 20 * 2**20, "disk_bytes": 50 * 2**20}
SMALL |= {"processes": 20, "output_limit": 1000}
MARK = "74123.25"  # seconds that a survivor would sleep: found in the process table by it


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


def survivors() -> list[str]:
    lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.decode(errors="replace") for line in lines if MARK.encode() in line]


DAEMON = f"""
import os, subprocess, sys
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass
    if os.fork() == 0: os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep({MARK})'])
    os._exit(0)
print('done')
"""
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({MARK})']); print('done')"
THREADS = "import threading, time\nfor i in range(100): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"

ENDINGS = {  # what is run, and how it may end
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", {"timeout", "cpu", "memory"}),
    "memory bomb": ("b = []\nwhile True: b.append(b'x' * 10**8)", {"error", "memory", "killed", "cpu", "timeout"}),
    "endless output": ("while True: print('x' * 10000)", {"output", "timeout", "cpu"}),
    "child that outlives": (CHILD, {"ok"}),
    "daemon": (DAEMON, {"ok"}),
    "endless loop": ("while True: pass", {"cpu", "timeout"}),
    "sleep": ("import time; time.sleep(1000)", {"timeout"}),
    "too many threads": (THREADS, {"error"}),
    "huge file": ("f = open('h', 'wb')\nwhile True: f.write(b'x' * 10**7)", {"error"}),
    "closed descriptors": ("import os, time; os.closerange(0, 1000); time.sleep(1000)", {"timeout"}),
    "early exit": ("import os; os._exit(0)", {"ok"}),
    "signal to all": ("import os; os.kill(-1, 9)", {"error", "killed"}),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_hostile_code_ends_and_leaves_nothing(level, name):
    code, outcomes = ENDINGS[name]
    before = set(os.listdir("/tmp"))
    result = sandbox.run(code, level=level, **SMALL)
    assert result.outcome in outcomes, result
    assert len(result.output) < 1100
    assert survivors() == []
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("sandbox-")]


def test_nothing_outside_is_reached(level, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "s3cret")
    outside = tmp_path / "outside"
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempts = {
            "write": f"open({str(outside)!r}, 'w')",
            "read": f"open({str(pathlib.Path(__file__))!r}).read()",
            "environment": "os.environ['SECRET_API_KEY']",
            "environment of the trainer": f"open('/proc/{os.getpid()}/environ').read()",
            "memory of the supervisor": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
            "connection": f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)",
            "signal": f"os.kill({os.getpid()}, 0)",
            "mount": "1 / (ctypes.CDLL(None).unshare(0x10000000) == 0)",
            "input": "input()",
        }
        code = ["import os, socket, ctypes"]
        for name, attempt in attempts.items():
            code.append(f"try:\n  {attempt}\n  print('REACHED {name}')\nexcept Exception: pass")
        result = sandbox.run("\n".join(code), level=level)
    assert result.outcome == "ok" and result.output == ""
    assert not outside.exists()


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
    result = sandbox.run(DAEMON.replace("os.setsid()", "pass"), allow_network=True, **SMALL)
    assert result.output == "done\n" and survivors() == []


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


UNPRIVILEGED = shutil.which("setpriv") and os.path.exists("/usr/bin/python3") and hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.mark.skipif(not UNPRIVILEGED, reason="needs root, setpriv and a system interpreter to become an ordinary user")
def test_both_levels_hold_for_an_ordinary_user(tmp_path):
    """Root here may only be able to build the first: an ordinary user with the system's interpreter tries both."""
    package = tmp_path / "readable"
    for name in ("sandbox.py", "jail.py"):
        package.mkdir(exist_ok=True)
        shutil.copy(pathlib.Path(sandbox.__file__).with_name(name), package / name)
    for folder in (package, *package.parents):
        if folder.is_relative_to("/tmp/pytest-of-" + os.environ.get("USER", "root")):
            folder.chmod(0o755)
    code = f"import sys; sys.path.insert(0, {str(package)!r}); import sandbox\n"
    code += "for level in ('namespaces', 'seccomp'): sandbox._prove(level)"
    command = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "/usr/bin/python3", "-B", "-c", code]
    tried = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    if "PermissionError" in tried.stderr and str(package) in tried.stderr:
        pytest.skip("the temporary folder cannot be made readable to another user")
    assert tried.returncode == 0, tried.stderr
    assert sys.platform == "linux"
