"""Builds the walls around one untrusted command, starts it and watches it. Run by `sandbox`, as a script, in a bare interpreter.

Standard library only, Linux only. Three processes, from the outside in:

    launcher   makes the namespaces and the file system, waits; outside the PID namespace, so the command cannot see it
    init       process 1 of the namespace: watches the memory, reaps, reports; when it ends, the kernel ends all that is left
    command    another user where possible, limited, without privileges

At the level "bubblewrap" that program has done the launcher's work. At "seccomp", without namespaces, launcher and init are one
process; a filter of system calls keeps the command in its process group, away from other processes and off the network, and
Landlock keeps it out of other people's files.
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

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
OWN_SPACE = ("namespaces", "bubblewrap")  # levels at which the command and its descendants are all that this can see
WATCH_SECONDS = 0.1  # between two looks at the memory
DEVICES = ("null", "zero", "full", "random", "urandom")


def main(spec: dict) -> int:
    status = spec["status"]
    os.set_inheritable(status, False)
    if spec["level"] != "bubblewrap":  # which has an option for it, and hides the parent
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spec["parent"]:  # it ended before the call
            return 1
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this is process 1, see below
    # The kernel's limit counts a user's tasks: all on the machine, or (since 5.14) those in the command's own user namespace.
    own_count = spec["level"] in OWN_SPACE and _kernel() >= (5, 14)
    spec["others"] = 0 if os.geteuid() == 0 or own_count else _tasks_of(os.geteuid())
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # rather this than the trainer
        if spec["level"] == "namespaces":
            return _in_namespaces(spec)
        shutil.copytree(spec["files"], spec["workspace"], dirs_exist_ok=True)
        if os.geteuid() == 0 and spec["level"] == "seccomp":
            own_tree(spec["workspace"], spec["uid"])
        return _supervise(spec)
    except Exception as error:
        _report(status, {"error": f"{type(error).__name__}: {error}"})
        return 1


def _kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))


def _tasks_of(user: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


#### Namespaces


def _in_namespaces(spec: dict) -> int:
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags if uid == 0 else flags | CLONE_NEWUSER)
    if uid != 0:
        for path, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(line)
    init = os.fork()
    if init:
        return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal with a handler, so the only one that could reach process 1
    code = 1
    try:
        _file_system(spec)
        code = _supervise(spec)
    except Exception as error:
        _report(spec["status"], {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _file_system(spec: dict) -> None:
    """A new root: the system and the interpreter read-only, a small /tmp, and the workspace at its own path."""
    root, size = spec["root"], spec["limits"]["disk"]
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in ("/tmp", "/dev/shm"):
        os.makedirs(root + path)
        _mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=1777")
    for path in (*spec["system"], *spec["readonly"]):
        if os.path.islink(path) and path in spec["system"]:
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _bind(path, root + path)
            _read_only(root + path, AT_RECURSIVE)
    for device in DEVICES:
        _bind(f"/dev/{device}", f"{root}/dev/{device}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    _workspace(spec, root + spec["workspace"], size)
    os.makedirs(f"{root}/proc")
    with contextlib.suppress(OSError):  # containers that mask theirs forbid a fresh one; nearly everything works without
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{root}/.old")
    os.chdir(root)
    numbers = {"x86_64": 155, "aarch64": 41}
    _syscall(numbers[platform.machine()], root.encode(), f"{root}/.old".encode())  # pivot_root
    os.chdir("/")
    _call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")
    _read_only("/", 0)


def _workspace(spec: dict, place: str, size: int) -> None:
    os.makedirs(place, exist_ok=True)
    if spec["private"]:
        _mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=700")
        os.chown(place, *_owner(spec))
    else:
        _mount(spec["workspace"], place, None, MS_BIND)
    for folder, _, names in os.walk(spec["files"]):
        inside = os.path.join(place, os.path.relpath(folder, spec["files"]))
        os.makedirs(inside, exist_ok=True)
        for name in names:
            shutil.copyfile(os.path.join(folder, name), os.path.join(inside, name))
    if os.geteuid() == 0:
        own_tree(place, spec["uid"])


def own_tree(folder: str, uid: int) -> None:
    """Gives a folder to a user, links themselves, never what they point at."""
    for path in (folder, *(os.path.join(at, name) for at, folders, names in os.walk(folder) for name in (*folders, *names))):
        if os.lstat(path).st_uid != uid:
            os.chown(path, uid, uid, follow_symlinks=False)


def _owner(spec: dict) -> tuple[int, int]:
    return (spec["uid"], spec["uid"]) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL))
    _mount(source, target, None, MS_BIND | MS_REC)


def _read_only(path: str, flags: int) -> None:
    """mount_setattr, of Linux 5.12: the older remount would leave mounts below `path` writable."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    _syscall(442, AT_FDCWD, path.encode(), flags, attributes, len(attributes))


#### The command


def _supervise(spec: dict) -> int:
    """Runs the command and reports how it ended: {"exit": code or -signal, "memory": the watchdog ended it, "cpu": seconds}."""
    _prctl(PR_SET_DUMPABLE, 0)  # the command may be the same user's: it must not look into or write to this process
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
    over = False
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == command:
            break
        if ended == 0:
            time.sleep(WATCH_SECONDS if over else 0.01 if _cpu() < 1 else WATCH_SECONDS)
            if not over and spec["level"] in OWN_SPACE and _memory() > spec["limits"]["memory"]:
                over = True
                os.kill(-1, signal.SIGKILL)  # everything in this PID namespace
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(status)
    _report(spec["status"], {"exit": code, "memory": over, "cpu": used.ru_utime + used.ru_stime})
    return 0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 100  # looks often at first, less often once that has cost 10 ms


def _memory() -> int:
    """Bytes of memory that the namespace's processes hold, file pages not counted. 0 without /proc."""
    total = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                with contextlib.suppress(OSError), open(f"/proc/{name}/statm") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
                    total += resident - shared
    return total * os.sysconf("SC_PAGE_SIZE")


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
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an ignored signal is inherited
    if os.geteuid() == 0 and spec["level"] != "none":
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])  # drops every capability
    processes = limits["processes"] + spec["others"]
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    if spec["level"] != "none":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten when the user changed
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        if spec["level"] == "seccomp":
            _landlock(spec)
        _filter_calls(spec["level"])
    os.execvpe(spec["argv"][0], spec["argv"], os.environ)


#### Filters


# System calls by number on (x86_64, aarch64); -1: absent there.
ALL_LEVELS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # it would do other calls' work past this filter
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
}
WITHOUT_NAMESPACES = {
    "socket": (41, 198),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
}
PRLIMIT = (302, 261)  # of one's own only: process 0
CLONE3 = 435
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
RETURN_ALLOW, RETURN_KILL, RETURN_EPERM, RETURN_ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026


def _filter_calls(level: str) -> None:
    """Installs a seccomp filter: the calls above fail with "not permitted", in the command and all its descendants."""
    column, audit = ARCHITECTURES[platform.machine()]
    calls = ALL_LEVELS if level in OWN_SPACE else ALL_LEVELS | WITHOUT_NAMESPACES
    load, equal, at_least, ret = 0x20, 0x15, 0x35, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, audit), (ret, 0, 0, RETURN_KILL), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (ret, 0, 0, RETURN_EPERM)]  # x86's second numbering of the same calls
    for number in sorted(numbers[column] for numbers in calls.values()):
        program += [(equal, 0, 1, number), (ret, 0, 0, RETURN_EPERM)]
    program += [(equal, 0, 1, CLONE3), (ret, 0, 0, RETURN_ENOSYS)]  # its flags are out of a filter's sight; libc then takes clone
    program += [(equal, 0, 3, PRLIMIT[column]), (load, 0, 0, 16), (equal, 1, 0, 0), (ret, 0, 0, RETURN_EPERM)]
    program += [(load, 0, 0, 0), (equal, 0, 3, (56, 220)[column]), (load, 0, 0, 16)]  # clone: with a new user namespace?
    program += [(0x45, 0, 1, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID), (ret, 0, 0, RETURN_EPERM)]
    program += [(ret, 0, 0, RETURN_ALLOW)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header))


LANDLOCK_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # file-system rights that a version of Landlock knows
LANDLOCK_READ = 0b1101  # execute, read file, read folder
LANDLOCK_FILE = 0b0110  # write and read file


def _landlock(spec: dict) -> None:
    """Allows reading the system and the interpreter, and everything in the workspace; nothing else exists for the command."""
    version = _syscall(444, None, 0, 1)
    everything = (1 << LANDLOCK_BITS[min(version, 5)]) - 1
    attribute = struct.pack("Q", everything)
    ruleset = _syscall(444, attribute, len(attribute), 0)
    devices = [(f"/dev/{device}", LANDLOCK_FILE) for device in DEVICES]
    for path, rights in [
        *((p, LANDLOCK_READ) for p in (*spec["system"], *spec["readonly"])),
        *devices,
        (spec["workspace"], everything),
    ]:
        if not os.path.exists(path):
            continue
        if os.path.isfile(path):
            rights &= 0b0111
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights, descriptor)
        _syscall(445, ruleset, 1, rule, 0)
        os.close(descriptor)
    _syscall(446, ruleset, 0)
    os.close(ruleset)


#### The system


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, options.encode())


def _prctl(*arguments) -> None:
    _call("prctl", arguments[0], *arguments[1:], *[0] * (5 - len(arguments)))


def _syscall(*arguments) -> int:
    return _call("syscall", *arguments)


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
