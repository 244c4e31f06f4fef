"""Runs one command and answers for it: no process that it starts outlives it, nor the process that started it.

    python deepgrpo_supervisor.py PARENT GRACE COMMAND...

Standard input is the lifeline: a pipe whose other end only the parent (process id PARENT) holds. When the parent ends, even by
SIGKILL, the kernel closes it, and everything here is killed. (The kernel's parent-death signal would come as soon as the *thread*
that forked ends.) As the subreaper this process inherits every descendant that loses its own parent, so it can name them all; and
should this process be killed, the command gets SIGKILL from the kernel.

SIGTERM (SIGINT, SIGHUP) is passed on and becomes SIGKILL after GRACE seconds. Exit status: the command's, 128 + n for signal n.
"""

import ctypes
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.25
LEFTOVER_SECONDS = 2.0  # for helpers of a command that ended by itself to follow
KILL_SECONDS = 30.0  # for the kernel to end killed processes, which may have to give GPU memory back first
LOG_LIMIT = 64 * 2**20  # bytes of output; then the older half goes
STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, grace: float, command: list[str]) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP | {signal.SIGCHLD})
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_in_child)
    try:
        return _watch(child, parent, grace)
    finally:
        _kill_descendants()


def _watch(child: subprocess.Popen, parent: int, grace: float) -> int:
    """Returns the exit status once the command has ended, or at once when the parent has."""
    kill_at = float("inf")
    while child.poll() is None:
        caught = signal.sigtimedwait(STOP | {signal.SIGCHLD}, POLL_SECONDS)
        if select.select([0], [], [], 0)[0] or os.getppid() != parent:
            print(f"supervisor: process {parent}, which started this server, has ended; the server goes, too", flush=True)
            return 128 + signal.SIGKILL
        if caught and caught.si_signo in STOP and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            kill_at = min(kill_at, time.monotonic() + grace)
        if time.monotonic() > kill_at:
            print(f"supervisor: still running {grace:g} s after SIGTERM; killed", flush=True)
            return 128 + signal.SIGKILL
        _trim_log()
    print(f"supervisor: the server ended with status {child.returncode}", flush=True)
    give_up = time.monotonic() + LEFTOVER_SECONDS
    while _reaped_descendants() and time.monotonic() < give_up:
        time.sleep(0.05)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _in_child() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_descendants() -> None:
    give_up = time.monotonic() + KILL_SECONDS
    while (pids := _reaped_descendants()) and time.monotonic() < give_up:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # gone by itself meanwhile
        time.sleep(0.02)
    if pids:
        print(f"supervisor: processes {pids} are still there {KILL_SECONDS:g} s after SIGKILL", flush=True)


def _reaped_descendants() -> list[int]:
    """Process ids of all descendants, after taking the exit status of those that ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return []  # not one child, so nobody's grandchild either
    parents = {}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended while we looked
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    family, grew = {os.getpid()}, True
    while grew:
        found = {pid for pid, parent in parents.items() if parent in family} - family
        family |= found
        grew = bool(found)
    return sorted(family - {os.getpid()})


def _trim_log() -> None:
    """Keeps the newer half of a log that has grown too long; a line written at this very moment may get lost."""
    if os.fstat(1).st_size <= LOG_LIMIT:
        return
    with open("/proc/self/fd/1", "rb") as log:
        log.seek(-LOG_LIMIT // 2, os.SEEK_END)
        newer = log.read()
    os.ftruncate(1, 0)
    os.write(1, b"supervisor: the older half of this log was dropped\n" + newer)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
