"""A grading worker: a process of its own that answers one message at a time. Started by `service`, never by hand.

It is a plain subprocess, not a multiprocessing child: it imports neither the trainer's main module nor JAX. Messages are JSON in
frames. The worker limits its memory and its CPU seconds an answer (a Python-level runaway ends here, without a kill), and dies
with its parent. Graders run in its main thread, so libraries' own alarms work. What they print is dropped.
"""

import ctypes
import dataclasses
import gc
import json
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards.agents import jail
from deepgrpo.rewards.reward import GraderFault
from deepgrpo.types import Grade

MEMORY = 3 * 2**30  # bytes of address space; a soft limit, so that a sandbox that a grader starts may set its own

READY_BARE = b"ready, without walls"

_PR_SET_PDEATHSIG = 1


class OutOfTime(BaseException):
    """The answer used up its CPU seconds. Not an Exception, so that no grader swallows it."""


def main(descriptor: int, settings: str) -> None:
    """Serves the connection until it closes. settings: JSON of parent (process id), sources, rubric, walls (true or false)."""
    setting = json.loads(settings)
    walled = setting["walls"] and sys.platform == "linux" and jail.wall_off()
    _die_with_parent(setting["parent"])  # forgotten when walls are built
    if sys.platform == "linux":  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGVTALRM, _out_of_time)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rubric = rubric_from(setting["rubric"])
    graders.prepare(setting["sources"], rubric)
    gc.freeze()  # what is loaded stays
    connection = Connection(descriptor)
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # until now the service read them, to say why a worker did not start
        os.dup2(nowhere, stream)
    os.close(nowhere)
    connection.send_bytes(b"ready" if walled else READY_BARE)
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        task = message["task"] and Grade(**message["task"])
        reply = _graded(graders.Answer(**message["answer"]), rubric, task, message["cpu_seconds"])
        connection.send_bytes(json.dumps(reply).encode())


def rubric_from(fields: dict) -> graders.Rubric:
    return graders.Rubric(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def _graded(answer: graders.Answer, rubric: graders.Rubric, task: Grade | None, cpu_seconds: float) -> dict:
    """The grade as a dict, or {"function": name, "detail": text} for a fault of a grader or a reward function."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        try:
            grade = graders.grade(answer, rubric, task)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except OutOfTime:
        grade = Grade(None if graders.user_functions(answer.data_source, rubric) else 0.0, False, "timeout")
    except (MemoryError, RecursionError):
        grade = Grade(0.0, False, "too_complex")
    except GraderFault as fault:
        return {"function": fault.function, "detail": fault.detail[-4000:]}
    except Exception:
        return {"function": graders.grader_name(answer.data_source, rubric), "detail": traceback.format_exc()[-4000:]}
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
    main(int(sys.argv[1]), sys.argv[2])
