"""Programs that attack the sandbox, and how each may end. As a script: tries all as this user, at the level that is named."""

import json
import os
import pathlib
import socket
import sys
import tempfile

MARK = "74123.25"  # seconds that a survivor would sleep: found in the process table by it
SMALL = {"seconds": 60.0, "cpu_seconds": 30, "memory_bytes": 400 * 2**20, "file_bytes": 20 * 2**20, "disk_bytes": 50 * 2**20}
SMALL |= {"processes": 20, "output_limit": 1000}

DAEMON = f"""
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep({MARK})'])
    os._exit(0)
print('done')
"""
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({MARK})']); print('done')"
THREADS = "import threading, time\nfor i in range(100): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
MEMFD = """
import os, ctypes, time
HIDE
kept = []
for _ in range(200):
    kept.append(os.memfd_create('x'))
    for _ in range(19): os.write(kept[-1], bytes(2**20))
print('filled'); time.sleep(50)
"""
SHARED = """
import mmap, os, time
maps = []
for _ in range(10):
    maps.append(mmap.mmap(-1, 150 * 2**20)) if not maps else None
    if os.fork() == 0:
        own = mmap.mmap(-1, 150 * 2**20)
        for at in range(0, len(own), 4096): own[at] = 1
        time.sleep(50); os._exit(0)
time.sleep(50); print('filled')
"""
SYSTEM_V = """
import ctypes, time
c = ctypes.CDLL(None, use_errno=True); c.shmat.restype = ctypes.c_void_p
for _ in range(100):
    n = c.shmget(0, ctypes.c_size_t(20 * 2**20), 0o1666)
    at = c.shmat(n, None, 0)
    ctypes.memset(at, 1, 20 * 2**20); c.shmdt(ctypes.c_void_p(at))
print('filled'); time.sleep(50)
"""
INODES = "import itertools\nfor i in itertools.count(): open(f'PLACE/{i}', 'w').close()"
FILES = "for i in range(100):\n  with open(f'PLACE/{i}', 'wb') as f: f.write(bytes(10**7))"

ENDINGS = {  # what is run, and how it may end
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", {"timeout", "cpu", "memory"}),
    "memory bomb": ("b = []\nwhile True: b.append(b'x' * 10**8)", {"error", "memory", "killed"}),
    "memory of many processes": ("import os, time\nfor _ in range(4): os.fork()\nb = b'x' * 10**8; time.sleep(50)", {"memory"}),
    "memory in memfds": (MEMFD, {"memory"}),
    "memory in memfds of a process that hides": (MEMFD.replace("HIDE", "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"), {"memory"}),
    "shared memory of many processes": (SHARED, {"memory"}),
    "System V memory": (SYSTEM_V, {"memory"}),
    "files in /dev/shm": (FILES.replace("PLACE", "/dev/shm"), {"error", "memory"}),
    "files in /tmp": (FILES.replace("PLACE", "/tmp"), {"error", "memory"}),
    "files in the workspace": (FILES.replace("PLACE", "."), {"error", "memory"}),
    "inodes in /dev/shm": (INODES.replace("PLACE", "/dev/shm"), {"error", "memory"}),
    "inodes in /tmp": (INODES.replace("PLACE", "/tmp"), {"error", "memory"}),
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

TIMED = {"fork bomb", "endless loop", "sleep", "closed descriptors"}  # that only the clock ends

REACHES = {  # each prints REACHED if it succeeds
    "write": "open(CANARY, 'w')",
    "chmod": "os.chmod(CANARY, 0o777)",
    "truncate": "os.truncate(CANARY, 0)",
    "delete": "os.unlink(CANARY)",
    "read": "open(CANARY).read()",
    "list": "os.listdir(os.path.dirname(CANARY))",
    "home": "1 / len([n for n in os.listdir(os.path.expanduser('~root')) if n not in ('.pyenv', '.local', '.cache')])",
    "environment": "os.environ['SECRET_API_KEY']",
    "environment of the trainer": "open(f'/proc/{TRAINER}/environ').read()",
    "environment of the supervisor": "1 / len(open('/proc/1/environ').read())",
    "memory of the supervisor": "open('/proc/1/mem', 'r+b')",
    "descriptors of the supervisor": "os.listdir('/proc/1/fd')",
    "connection": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0sandbox-test-PORT')",
    "signal": "os.kill(TRAINER, 0)",
    "signal to the supervisor": "os.kill(1, 9) or 1 / 0",
    "user namespace": "1 / (C.unshare(0x10000000) == 0)",
    "mount namespace": "1 / (C.unshare(0x20000) == 0)",
    "mount": "1 / (C.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0)",
    "trace": "1 / (C.ptrace(16, 1, 0, 0) == 0)",
    "root": "os.setuid(0)",
    "device": "os.mknod('/tmp/d', 0o60600, 0x801)",
    "kernel settings": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "system files": "open('/usr/x', 'w')",
    "files of the interpreter": "open(os.path.join(sys.prefix, 'x'), 'w')",
    "root folder": "os.mkdir('/x')",
    "devices' folder": "os.mkdir('/dev/x')",
    "input": "input()",
    "control group": "open('/sys/fs/cgroup/cgroup.procs')",
}


def survivors() -> list[str]:
    lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.decode(errors="replace") for line in lines if MARK.encode() in line]


def segments() -> set[str]:
    return {line.split()[1] for line in pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


def ending(sandbox, level: str, name: str) -> str:
    """What is wrong with how an attack ended, or ""."""
    code, outcomes = ENDINGS[name]
    folder, before = tempfile.gettempdir(), segments()
    clock = {"seconds": 1.5, "cpu_seconds": 1} if name in TIMED else {}
    result = sandbox.run(code.replace("HIDE", ""), level=level, **SMALL | clock)
    left = [name for name in os.listdir(folder) if name.startswith(f"sandbox-{os.getpid()}-")]
    wrong = [] if result.outcome in outcomes else [f"{result}"]
    return f"{name}: {wrong} {survivors()} {left}" if wrong or survivors() or left or segments() - before else ""


def reached(sandbox, level: str) -> str:
    """Which of the attempts succeeded, or ""."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)
        canary, port = pathlib.Path(folder, "canary"), server.getsockname()[1]
        canary.write_text("alive")
        canary.chmod(0o666)
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(f"\0sandbox-test-{port}")
            abstract.listen()
            code = ["import os, socket, ctypes, sys\nC = ctypes.CDLL(None)"]
            for name, attempt in REACHES.items():
                code.append(f"try:\n  {attempt}\n  print({name!r})\nexcept (Exception, SystemExit): pass")
            text = "\n".join(code)
            for name, value in {"CANARY": repr(str(canary)), "PORT": str(port), "TRAINER": str(os.getpid())}.items():
                text = text.replace(name, value)
            result = sandbox.run(text, level=level)
        same = canary.read_text() == "alive" and canary.stat().st_mode & 0o777 == 0o666
    return "" if result.outcome == "ok" and not result.output and same else f"{result} {same}"


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import sandbox

    os.environ["SECRET_API_KEY"] = "s3cret"
    sandbox._prove(sys.argv[2])
    print(json.dumps([reached(sandbox, sys.argv[2]), *(ending(sandbox, sys.argv[2], name) for name in ENDINGS)]))
