"""A real grading worker whose GSM8K grader does to itself what the response says."""

import contextlib
import os
import socket
import sys
import tempfile
import time

from deepgrpo.rewards import grade, worker
from deepgrpo.types import Grade


def scripted(answer):
    if answer.response == "spin in Python":
        while True:
            pass
    if answer.response == "spin in C":
        return sum(range(10**13))  # no Python code runs in there, so no signal handler does
    if answer.response == "sleep":
        time.sleep(60)
    if answer.response == "die":
        os._exit(1)
    if answer.response == "raise":
        raise RuntimeError("a fault of the grader")
    if answer.response == "eat":
        return "x" * 10**12
    if answer.response.startswith("reach "):
        _, port, path = answer.response.split()
        for reach in (lambda: socket.create_connection(("127.0.0.1", int(port)), 5), lambda: open(path, "w").close()):
            with contextlib.suppress(OSError):
                reach()
                return Grade(1.0, True, "reached")
        tempfile.TemporaryFile().close()  # its own is writable
        return Grade(0.0, True, "walled")
    return Grade(1.0, True, "right", str(os.getpid()))


def patient(answer):
    time.sleep(1.5 if answer.response == "ask a judge" else 60)
    return 0.5


patient.seconds, patient.waits = 40.0, True

if __name__ == "__main__":
    grade.GRADERS["GSM8K"] = grade.Grader("scripted_worker:scripted", "####")
    worker.main(int(sys.argv[1]), sys.argv[2])
