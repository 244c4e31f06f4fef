"""How a run is told to stop, by each signal and in each process; and which GPUs are a process's own under a scheduler."""

import signal
from multiprocessing import connection

import pytest

from deepgrpo.config.errors import ConfigError
from deepgrpo.learner import distributed


class Ended(Exception):
    pass


@pytest.fixture
def stopping(monkeypatch):
    """A Stop whose clock is a list, and the signals' handlers as they were before."""
    before = {number: signal.getsignal(number) for number in distributed.WARNINGS + distributed.ORDERS}

    def leave(status):
        raise Ended(status)

    monkeypatch.setattr(distributed.os, "_exit", leave)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests that run under nohup find ignored
    now = [100.0]
    yield distributed.Stop(clock=lambda: now[0]), now
    for number, handler in before.items():
        signal.signal(number, handler)


TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
STOPPED = [  # (signal, seconds since the first)
    *([(number, 0.0)] for number in distributed.WARNINGS + distributed.ORDERS),
    [(INT, 0.0), (INT, 0.0)],  # one Ctrl-C, by terminal and launcher
    [(INT, 0.0), (TERM, 1.9)],
    [(USR1, 0.0), (TERM, 60.0)],  # SLURM: a warning, then the end of the time
    [(HUP, 0.0), (HUP, 9.0), (USR1, 20.0)],
]
ENDED = [[(INT, 0.0), (INT, 2.0)], [(TERM, 0.0), (TERM, 0.1), (INT, 2.5)], [(USR1, 0.0), (TERM, 5.0), (TERM, 7.0)]]


@pytest.mark.parametrize("signals", STOPPED, ids=str)
def test_the_step_ends(stopping, signals):
    told, now = stopping
    assert not told.is_set()
    for number, at in signals:
        now[0] = 100.0 + at
        signal.raise_signal(number)
    assert told.is_set()


@pytest.mark.parametrize("signals", ENDED, ids=str)
def test_a_later_order_ends_at_once(stopping, signals):
    told, now = stopping
    with pytest.raises(Ended) as ended:
        for number, at in signals:
            now[0] = 100.0 + at
            signal.raise_signal(number)
    assert ended.value.args == (128 + signals[-1][0],)


def test_nohup_is_kept(stopping):
    signal.signal(HUP, signal.SIG_IGN)
    distributed.Stop()
    assert signal.getsignal(HUP) == signal.SIG_IGN


@pytest.mark.parametrize("early", [True, False])
def test_a_follower_reports(stopping, early, capfd):
    """Process 2 of 3 is told; early: before it has reached process 0."""
    follower, _ = stopping
    pairs = [connection.Pipe() for _ in range(2)]
    channel = distributed.Channel([ours for ours, _ in pairs])
    first = distributed.Stop.__new__(distributed.Stop)
    first._set, first._channel = False, channel
    assert not first.is_set()
    theirs = distributed.Channel([pairs[1][1]], leads=False)
    if early:
        signal.raise_signal(TERM)
    follower.attach(theirs)
    if not early:
        signal.raise_signal(TERM)
    assert first.is_set() and "process 2 of the learner was told to" in capfd.readouterr().err
    channel.send("save", {"step": 1}, {})
    assert theirs.receive()[0] == "save" and "process 1 has not taken 'save' yet" in channel.behind()  # the channel still works


SLURM = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "16"}


@pytest.mark.parametrize(
    ("environment", "visible", "devices"),
    [
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, 8, [*range(8)]),  # JAX would take [0]
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}, 8, [3]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}, 8, [4, 5, 6, 7]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}, 1, [0]),  # --gpus-per-task: its own
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}, 4, [0, 1, 2, 3]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,4", "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}, 8, [4, 5]),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 8, [*range(8)]),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "7"}, 8, [7]),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0, []),  # no GPUs: JAX's own choice
    ],
)
def test_the_gpus_of_a_task(environment, visible, devices):
    assert distributed.in_cluster(environment)
    tasks = distributed.tasks_of_node(environment)
    assert distributed.devices_of_task(environment, visible, tasks) == devices


def test_gpus_that_nobody_uses_are_refused_with_both_numbers():
    for used, visible, tasks in ((8, 8, 1), (1, 8, 8), (4, 4, 2), (1, 0, 1)):
        distributed.require_devices(used, visible, tasks)
    with pytest.raises(ConfigError, match=r"1 process\(es\) on this host use 1 GPU\(s\) each, of 8 .* --ntasks-per-node=8"):
        distributed.require_devices(1, 8, 1)


def test_a_batch_script_is_no_cluster():
    assert not distributed.in_cluster({"SLURM_NTASKS": "8"}) and not distributed.in_cluster({})
    assert (
        distributed.visible_gpus({"CUDA_VISIBLE_DEVICES": "2,5"}) == 2
        and distributed.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    )


def test_the_channel_listens_on_one_address():
    with distributed._listen("127.0.0.1:1234", b"key") as listener:
        assert listener.address[0] == "127.0.0.1"
    with distributed._listen("no-such-host.invalid:1", b"key") as listener:
        assert listener.address[0] not in ("0.0.0.0", "")
