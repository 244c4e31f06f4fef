"""A grading worker: a process of its own that answers one message at a time. Started by `service`, never by hand.

It is a plain subprocess, not a multiprocessing child: it imports neither the trainer's main module nor JAX. Messages are JSON in
frames. The worker limits its memory and its CPU seconds an answer (a Python-level runaway becomes the verdict "timeout" here,
without a kill), and dies with its parent.
"""

import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import math
from deepgrpo.types import Grade

MEMORY = 3 * 2**30  # bytes of address space

_PR_SET_PDEATHSIG = 1


class OutOfTime(BaseException):
    """The answer used up its CPU seconds. Not an Exception, so that no grader swallows it."""


def main(descriptor: int, parent: int, cpu_seconds: float, warm: bool) -> None:
    _die_with_parent(parent)
    if sys.platform == "linux":  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGVTALRM, _out_of_time)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if warm:
        math.math_verify()
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        reply = _graded(graders.Answer(**json.loads(message)), cpu_seconds)
        connection.send_bytes(json.dumps(reply).encode())


def _graded(answer: graders.Answer, cpu_seconds: float) -> dict:
    """The grade as a dict, or {"error": traceback} for a fault of the grader itself."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        try:
            grade = graders.grade(answer)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except OutOfTime:
        grade = Grade(0.0, False, "timeout")
    except (MemoryError, RecursionError):
        grade = Grade(0.0, False, "too_complex")
    except Exception:
        return {"error": traceback.format_exc()}
    return dataclasses.asdict(grade)


def _out_of_time(*_) -> None:
    raise OutOfTime


def _die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the parent's thread that started it ends, even by SIGKILL (Linux).

    Elsewhere the closed connection ends the worker after its current answer.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "warm")
