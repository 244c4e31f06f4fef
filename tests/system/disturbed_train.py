"""train.main whose vLLM server is harmed in the middle of given calls of generate: python disturbed_train.py JSON ARGUMENTS...

JSON: {call, from 1: harm}. kill: SIGKILL to all of the server. kill_engine: SIGKILL to its engine process. hang: SIGSTOP to its
HTTP process, so that connections stay open and nothing is answered.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

from deepgrpo import train
from deepgrpo.preflight import rules
from deepgrpo.rollout import vllm, vllm_fleet

ANSWERS = 3  # of the call come first, so that the rest is under way


def family(pid: int) -> dict[int, str]:
    """Process id -> command line, of the process and all below it."""
    rows = [line.split() for line in subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()]
    found = {pid}
    while more := {int(child) for child, parent in rows if int(parent) in found} - found:
        found |= more
    return {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in found}


def harm(kind: str, supervisor: int) -> None:
    members = family(supervisor)
    engines = [pid for pid, line in members.items() if "EngineCore" in line]
    if kind == "kill":
        targets, number = [supervisor], signal.SIGKILL
    elif kind == "kill_engine":
        targets, number = engines, signal.SIGKILL
    else:
        http = [pid for pid, line in members.items() if "deepgrpo_launcher" in line and pid not in (supervisor, *engines)]
        targets, number = http, signal.SIGSTOP
    assert targets, f"{kind}: nobody to harm among {members}"
    for pid in targets:
        os.kill(pid, number)
    print(f"harmed: {kind} {targets}", flush=True)


def main() -> None:
    planned = {int(call): kind for call, kind in json.loads(sys.argv[1]).items()}
    calls, finish = [], vllm._Call.finish

    def harmful(self, i, found):
        if self not in calls:
            calls.append(self)
        finish(self, i, found)
        if sum(map(bool, self.results)) >= ANSWERS and (kind := planned.pop(len(calls), None)):
            harm(kind, self.fleet.replicas[0].server.pid)

    vllm._Call.finish = harmful
    vllm_fleet.DEADLINES = vllm_fleet.Deadlines(control=20.0, load=20.0, start=240.0)
    train.main(*rules.from_command_line(sys.argv[1:]))
    assert not planned, f"never happened: {planned}"


if __name__ == "__main__":
    main()
