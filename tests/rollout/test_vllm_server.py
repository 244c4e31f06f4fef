"""Supervision of a vLLM server, with a fake one that has the command line and the first paths of the real one."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from deepgrpo.rollout import vllm_server
from deepgrpo.rollout.vllm_server import VllmServer, VllmServerError
from tests.rollout import fake_vllm_process

STARTER = """
import sys, time
from deepgrpo.rollout.vllm_server import VllmServer
from tests.rollout.fake_vllm_process import config
folder, python = sys.argv[1:]
server = VllmServer.start(config(python, "r"), folder, folder, folder + "/log", deadline=60)
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """start(behaviour, ...) -> VllmServer; what is still running at the end is stopped."""
    servers = []
    (tmp_path / "config.json").write_text("{}")

    def started(behaviour: str = "ok", deadline: float = 60.0) -> VllmServer:
        config = fake_vllm_process.config(fake_vllm_process.python(tmp_path, behaviour), "run-1")
        server = VllmServer.start(config, tmp_path, tmp_path, tmp_path / f"log-{len(servers)}", deadline=deadline)
        servers.append(server)
        return server

    yield started
    for server in servers:
        server.stop()


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    rows = [line.split() for line in subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()]
    family = {pid}
    while more := {int(child) for child, parent in rows if int(parent) in family} - family:
        family |= more
    return sorted(family)


def wait_gone(pids) -> None:
    limit = time.monotonic() + 120
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < limit, f"still running: {running}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_starts_late_answers_with_a_token_stops(start):
    server, other = start("late"), start()
    assert server.alive() and other.alive() and server.url != other.url and server.token != other.token
    assert httpx.get(server.url + "/deepgrpo/identity").status_code == 401
    assert server.last_log(5) == "fake vLLM starts" and server.token not in " ".join(server._process.args)
    family = descendants(server.pid)
    assert len(family) == 2
    server.stop()
    server.stop()
    assert not server.alive() and not any(map(is_running, family))
    assert other.alive()


def test_restart_has_the_same_token_and_a_growing_pause(start, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(vllm_server, "BACK_OFF_SECONDS", (0.0, 0.1, 0.2))
    server = start()
    token = server.token
    os.kill(server.pid, signal.SIGKILL)
    wait_gone([server.pid])
    assert not server.alive()
    for number, pause in enumerate(("0", "0.1", "0.2", "0.2"), 1):
        server.restart(tmp_path, deadline=60)
        assert server.alive() and server.token == token and server.restarts == number
        assert f"(restart {number}, after {pause} s)" in caplog.text


def test_outlives_the_thread_that_started_it(start):
    servers = []
    thread = threading.Thread(target=lambda: servers.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert servers[0].alive()


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_nothing_survives_a_sigkill(tmp_path, victim):
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", STARTER, str(tmp_path), fake_vllm_process.python(tmp_path, "ok")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}) as trainer:
        supervisor = int(trainer.stdout.readline())
        family = descendants(supervisor)
        assert len(family) == 2
        os.kill(supervisor if victim == "supervisor" else trainer.pid, signal.SIGKILL)
        wait_gone(family)
        trainer.kill()


def test_stubborn_server_is_killed_with_children_in_other_sessions(start, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "GRACE", 0.3)
    server = start("stubborn")
    family = descendants(server.pid)
    assert len(family) == 3 and int((tmp_path / "child").read_text()) in family
    server.stop()
    assert not any(map(is_running, family))


def test_stops_although_the_supervisor_hangs(start):
    server = start()
    family = descendants(server.pid)
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(timeout=0.3)
    wait_gone(family)


def test_snatched_port_is_replaced(start, tmp_path):
    server = start("port_taken")
    assert server.alive() and not server.url.endswith((tmp_path / "tried").read_text())


def test_failed_start_shows_the_cause_and_the_last_lines(start, tmp_path):
    with pytest.raises(VllmServerError, match="(?s)ended with status 1.*error in its log: ValueError: no room.*printed later"):
        start("dies")
    with pytest.raises(VllmServerError, match="does not generate"):
        start("mute")
    with pytest.raises(FileNotFoundError, match="launch/vllm_env.sh"):
        VllmServer.start(fake_vllm_process.config("nowhere", "run-1"), tmp_path, tmp_path, tmp_path / "log")


def test_deadline_names_stage_url_and_time(start):
    with pytest.raises(
        VllmServerError, match=r"(?s)http://127.0.0.1:\d+ was not ready after \d+ s \(deadline 5 s\); stage: first tok"
    ):
        start("hangs", deadline=5)
    with pytest.raises(
        VllmServerError, match=r"http://127.0.0.1:9 was not ready after 1 s.*stage: health.*ConnectError.*reachable"
    ):
        VllmServer.attach("http://127.0.0.1:9", "token", "run-1", deadline=1)


def test_attaches_to_its_own_run_only(start):
    server = start()
    attached = VllmServer.attach(server.url + "/", server.token, "run-1", deadline=30)
    assert attached.alive() and attached.url == server.url and attached.pid is None and attached.last_log(9) == ""
    with pytest.raises(VllmServerError, match="belongs to run run-1, expected run run-2"):
        VllmServer.attach(server.url, server.token, "run-2", deadline=30)
    with pytest.raises(VllmServerError, match="refuses the token of run run-1"):
        VllmServer.attach(server.url, "wrong", "run-1", deadline=30)
    with pytest.raises(VllmServerError, match="no token"):
        VllmServer.attach(server.url, "", "run-1", deadline=30)
    with pytest.raises(VllmServerError, match="somebody-else"):
        start("foreign")
    attached.stop()
    assert server.alive()
    with pytest.raises(VllmServerError, match="by hand"):
        attached.restart("/", deadline=1)
    server.stop()
    assert not attached.alive()
