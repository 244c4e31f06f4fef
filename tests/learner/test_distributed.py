"""Processes of one learner: what goes over the wire, and that two are as good as one."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

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
