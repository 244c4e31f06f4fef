"""Starts one untrusted command behind the walls that `sandbox` chose, limits it and watches it. A script for a bare interpreter.

At the level "bubblewrap", bwrap has built the walls and this is process 1 inside. At "namespaces" (root, or no bwrap) they are
built here, in the same way. Process 1 limits and starts the command, watches its memory, reaps, and reports how it ended; when it
ends, the kernel ends all that is left. Where this is root the command is another user; it has no privilege in either case.
Standard library only, Linux only.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import time

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
RDONLY, NOSUID, NODEV = 1, 2, 4  # of mount_setattr
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 38, 47
CALLS = {"x86_64": {"pivot_root": 155, "keyctl": 250}, "aarch64": {"pivot_root": 41, "keyctl": 219}}
DEVICES = ("null", "zero", "full", "random", "urandom")
INODES = 2**15  # files of each private file system
WATCH_SECONDS = 0.05  # between two looks at the memory
LIBC = ctypes.CDLL(None, use_errno=True)


def main(spec: dict) -> int:
    os.set_inheritable(spec["status"], False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal with a handler, so the only one that could reach process 1
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # rather this than the trainer
        if spec["level"] == "namespaces":
            return _in_namespaces(spec)
        if spec["level"] == "none":  # bwrap has an option for it, and hides the parent
            die_with_parent(spec["parent"])
        _put_files(spec, spec["workspace"])
        return _supervise(spec)
    except Exception as error:
        _report(spec["status"], {"error": f"{type(error).__name__}: {error}"})
        return 1


#### Namespaces


def unshare(flags: int) -> None:
    """Gives this process namespaces of its own; an ordinary user keeps its number in a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags if uid == 0 else flags | CLONE_NEWUSER)
    if uid != 0:
        for path, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(line)


def _in_namespaces(spec: dict) -> int:
    unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    die_with_parent(spec["parent"])
    init = os.fork()
    if init:
        return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
    code = 1
    try:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _file_system(spec)
        code = _supervise(spec)
    except Exception as error:
        _report(spec["status"], {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, even by SIGKILL. Forgotten when the user changes."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(1)


def _file_system(spec: dict) -> None:
    """A new root: the system and the interpreter read-only, a small /tmp and /dev/shm, and the workspace at its own path."""
    root, private = spec["root"], f"size={spec['limits']['disk']},nr_inodes={INODES},mode=1777"
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in ("/tmp", "/dev/shm", *([spec["workspace"]] if spec["private"] else ())):
        os.makedirs(root + path)
        _mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, private)
    for path in (*spec["system"], *spec["readonly"]):
        if os.path.islink(path) and path in spec["system"]:
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _bind(path, root + path)
            make_read_only(root + path, AT_RECURSIVE)
    for device in DEVICES:
        _bind(f"/dev/{device}", f"{root}/dev/{device}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    if not spec["private"]:
        _bind(spec["workspace"], root + spec["workspace"])
    _put_files(spec, root + spec["workspace"])
    os.makedirs(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{root}/.old")
    os.chdir(root)
    _call("syscall", CALLS[platform.machine()]["pivot_root"], root.encode(), f"{root}/.old".encode())
    os.chdir("/")
    _call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")
    make_read_only("/", 0)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL))
    _mount(source, target, None, MS_BIND | MS_REC)


def make_read_only(path: str, flags: int, attributes: int = RDONLY | NOSUID | NODEV) -> None:
    """mount_setattr, of Linux 5.12: the older remount would leave mounts below `path` writable."""
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    _call("syscall", 442, AT_FDCWD, path.encode(), flags, wanted, len(wanted))


def _put_files(spec: dict, place: str) -> None:
    for folder, _, names in os.walk(spec["files"]):
        inside = os.path.join(place, os.path.relpath(folder, spec["files"]))
        os.makedirs(inside, exist_ok=True)
        for name in names:
            shutil.copyfile(os.path.join(folder, name), os.path.join(inside, name))
    if spec["uid"]:  # links themselves, never what they point at
        for folder, folders, names in os.walk(place):
            for path in (folder, *(os.path.join(folder, name) for name in (*folders, *names))):
                if os.lstat(path).st_uid != spec["uid"]:
                    os.chown(path, spec["uid"], spec["uid"], follow_symlinks=False)


#### The command


def _supervise(spec: dict) -> int:
    """Runs the command and reports how it ended: {"exit": code or -signal, "memory": it was ended for that, "cpu": seconds}."""
    _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # the command may be the same user's: it must not look in here
    read, write = os.pipe()
    command = os.fork()
    if command == 0:
        os.close(read)
        try:
            _become_command(spec)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    os.close(write)
    with open(read) as pipe:
        if failed := pipe.read():  # closed by a successful exec
            raise RuntimeError(f"the command did not start: {failed}")
    _report(spec["status"], {"started": True})
    over, looked = False, 0.0
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == command:
            break
        if ended == 0:
            time.sleep(0.005)
            if not over and spec["level"] != "none" and time.monotonic() > looked + WATCH_SECONDS:
                over = _memory(spec) > spec["limits"]["memory"]
                looked = time.monotonic()
                if over:
                    os.kill(-1, signal.SIGKILL)  # everything in this PID namespace
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(status)
    _report(spec["status"], {"exit": code, "memory": over, "cpu": used.ru_utime + used.ru_stime})
    return 0


def _memory(spec: dict) -> float:
    """Bytes that the command's processes hold: their own and shared pages, memfds, private file systems, System V segments.

    Mapped files of memory count twice, which only errs on the safe side. Too many files of memory count as too much, as does a
    process that hides its descriptors from two looks in a row.
    """
    total, seen, hidden = 0.0, set(), set()
    for place in {"/tmp", "/dev/shm", *([spec["workspace"]] if spec["private"] else ())}:
        system = os.statvfs(place)
        total += (system.f_blocks - system.f_bfree) * system.f_frsize
        total += float("inf") if system.f_files - system.f_ffree > 2 * INODES else 0
    with contextlib.suppress(OSError), open("/proc/sysvipc/shm") as file:
        total += sum(int(line.split()[14]) for line in file.readlines()[1:])
    processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    page = os.sysconf("SC_PAGE_SIZE")
    for name in processes:
        with contextlib.suppress(OSError), open(f"/proc/{name}/statm") as file:
            total += int(file.read().split()[1]) * page  # resident; shared pages in each process that holds them
    if total > spec["limits"]["memory"]:  # look closely: each page once, and those of files on disk not at all
        for name in processes:
            with contextlib.suppress(OSError), open(f"/proc/{name}/statm") as file, open(f"/proc/{name}/smaps_rollup") as parts:
                resident = int(file.read().split()[1]) * page
                sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in parts.readlines()[1:]}
                total -= resident - sizes["Pss_Anon:"] - sizes["Pss_Shmem:"]
    for name in processes:
        try:
            places = [f"/proc/{name}/fd/{descriptor}" for descriptor in os.listdir(f"/proc/{name}/fd")]
        except PermissionError:
            places = []
            with contextlib.suppress(OSError), open(f"/proc/{name}/statm") as file:
                hidden |= {name} if int(file.read().split()[1]) else set()  # one that has ended holds nothing
        except OSError:
            continue
        for place in places:
            with contextlib.suppress(OSError):
                if os.readlink(place).startswith("/memfd:"):
                    found = os.stat(place)
                    total += 0 if found.st_ino in seen else found.st_blocks * 512
                    seen.add(found.st_ino)
    again = hidden & spec.get("hidden", set())
    spec["hidden"] = hidden
    return float("inf") if again else total


def _become_command(spec: dict) -> None:
    limits = spec["limits"]
    os.chdir(spec["workspace"])
    for which, value in (
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an ignored signal is inherited
    if spec["uid"]:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])  # drops every capability
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if spec["level"] != "none":
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _call("syscall", CALLS[platform.machine()]["keyctl"], 1, 0, 0, 0, 0)  # a session keyring of its own
        _forbid_namespaces(spec)
        _call("prctl", PR_CAP_AMBIENT, 4, 0, 0, 0)  # what bwrap left to the supervisor is not for the command
    os.execvpe(spec["argv"][0], spec["argv"], os.environ)


def _forbid_namespaces(spec: dict) -> None:
    """The command can make no namespace of its own, in which it could mount file systems without these limits."""
    if spec["level"] == "namespaces":
        _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own files in /proc are not its own
        unshare(CLONE_NEWUSER)
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # bwrap has an option for that, for ordinary users


#### Without a command


def wall_off() -> bool:
    """Takes the network and every writable file but those of its own /dev/shm from this process; whether that worked.

    The process must have one thread.
    """
    try:
        unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET)
        _mount("none", "/", None, MS_REC | MS_PRIVATE)
        make_read_only("/", AT_RECURSIVE, RDONLY | NOSUID)
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size=64m,nr_inodes={INODES},mode=1777")
        os.environ["TMPDIR"] = "/dev/shm"
    except OSError:
        return False
    return True


#### The system


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, options.encode())


def _call(name: str, *arguments) -> int:
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = getattr(LIBC, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _report(descriptor: int, what: dict) -> None:
    os.write(descriptor, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        specification = json.load(file)
    sys.exit(main(specification))
