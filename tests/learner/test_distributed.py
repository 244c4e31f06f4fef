"""Processes of one learner: what goes over the wire, and that two are as good as one."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from deepgrpo.learner import distributed
from deepgrpo.weights import hf
from tests.learner import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_rows_survive_the_wire():
    rows = tiny.make_rows(3) + tiny.teacher_rows(2, 0.1)  # the latter without log-probs
    fields, arrays = distributed.encode_rows(rows)
    back = distributed.decode_rows(json.loads(json.dumps(fields)), arrays)
    assert len(back) == len(rows)
    for row, other in zip(rows, back, strict=True):
        for field in dataclasses.fields(row):
            a, b = getattr(row, field.name), getattr(other, field.name)
            assert type(a) is type(b) and np.array_equal(a, b), field.name
            assert not isinstance(a, np.ndarray) or a.dtype == b.dtype
    assert distributed.decode_rows(*distributed.encode_rows([])) == []


def test_alone_there_is_no_channel():
    distributed.initialise({"coordinator": ""})
    with distributed.open_channel() as channel:
        assert channel is None
    distributed.require_agreement({"any": 1}, "what one process says")


def run(folder: pathlib.Path, count: int) -> dict[str, np.ndarray]:
    """The work of tests/learner/process.py in `count` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "tests.learner.process"]
    started = [
        subprocess.Popen(
            [*line, str(index), str(count), str(port), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return dict(np.load(folder / f"{count}.npz"))


@pytest.mark.system
def test_two_processes_equal_one(tmp_path):
    """Loading, three updates of two epochs, saving, restoring, scoring and publishing, on one mesh of two devices each."""
    config = tiny.model_config()
    hf.save(tiny.parameters(), config, tmp_path / "model", "float32")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    one, two = run(tmp_path, 1), run(tmp_path, 2)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_a_follower_names_what_it_misses():
    ours, theirs = distributed.connection.Pipe()
    theirs.close()
    with pytest.raises(ConnectionError, match="process 0 of the learner is gone"):
        distributed.Channel([ours]).receive()
    with pytest.raises(ConnectionError, match="process 1 of the learner is gone"):
        distributed.Channel([ours]).send("update", {}, {})


def test_process_0_names_who_is_behind():
    """Three followers: one is done, one is at its work, one sleeps."""
    pairs = [distributed.connection.Pipe() for _ in range(3)]
    channel = distributed.Channel([ours for ours, _ in pairs])
    quick, busy, _ = (distributed.Channel([theirs]) for _, theirs in pairs)
    channel.beat()
    channel.send("update", {"step": 5}, {})
    assert quick.receive()[:2] == busy.receive()[:2] == ("update", {"step": 5})  # the beat is no message
    quick._connections[0].send_bytes(b'[1, "done"]')  # as `receive` does before it waits for the next one
    assert channel.behind() == "process 2 is at 'update'; process 3 has not taken 'update' yet"


def test_a_silent_process_0_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "SILENCE", 0.0)
    _, theirs = distributed.connection.Pipe()
    with pytest.raises(ConnectionError, match="process 0 of the learner has said nothing for 0 s: it hangs"):
        distributed.Channel([theirs]).receive()


def test_the_last_message_is_heard_before_the_connection_closes():
    """What the follower says meanwhile must neither break the connection nor hide the stop."""
    for _ in range(20):
        ours, theirs = distributed.connection.Pipe()
        channel, follower, heard = distributed.Channel([ours]), distributed.Channel([theirs]), []

        def follow(follower=follower, heard=heard):
            while not heard or heard[-1] != "stop":
                heard.append(follower.receive()[0])

        thread = threading.Thread(target=follow)
        thread.start()
        for _ in range(5):
            channel.send("save", {}, {})
        channel.end()
        ours.close()
        thread.join(60)
        assert heard == ["save"] * 5 + ["stop"]
