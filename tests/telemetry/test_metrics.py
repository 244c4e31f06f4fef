"""metrics.jsonl survives kills and equals that of an uninterrupted run after a resume."""

import json

import numpy as np
import pytest

from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.telemetry.metrics import Metrics


def write_steps(folder, steps, resumed_step=-1):
    out = Metrics(folder, tensorboard=False, resumed_step=resumed_step)
    for step in steps:
        out.write(step, {"loss": step / 3, "timing_s/step": 1.0})
    out.close()


def test_values(tmp_path):
    out = Metrics(tmp_path, tensorboard=False)
    out.write(1, {"b": np.float32(0.5), "a": np.int64(3), "nan": float("nan"), "inf": float("-inf"), "zero_d": np.array(2.0)})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # already there, before close
    assert json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")) == {
        "step": 1, "a": 3, "b": 0.5, "inf": "-inf", "nan": "nan", "zero_d": 2.0
    }  # fmt: skip
    (record,) = metrics_lib.read(tmp_path)
    assert np.isnan(record["nan"]) and record["inf"] == -np.inf
    with pytest.raises(ValueError, match="shape"):
        out.write(2, {"vector": np.zeros(2)})
    out.close()
    out.close()


def test_a_step_has_one_line(tmp_path):
    out = Metrics(tmp_path, tensorboard=False)
    out.write(3, {})
    with pytest.raises(ValueError, match="step 3 after step 3"):
        out.write(3, {})
    out.close()


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "lo', b"\x00\x00"])
@pytest.mark.parametrize("resumed", [-1, 0, 3, 5])
def test_resumed_file_equals_uninterrupted(tmp_path, torn, resumed):
    write_steps(tmp_path / "whole", range(8))
    write_steps(tmp_path / "cut", range(6))
    with open(tmp_path / "cut" / "metrics.jsonl", "ab") as file:
        file.write(torn)
    write_steps(tmp_path / "cut", range(resumed + 1, 8), resumed_step=resumed)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_clocks_and_process_counters_are_set_apart(tmp_path):
    write_steps(tmp_path, [0])
    record = metrics_lib.read(tmp_path)[0] | {"teacher/http_requests": 3, "engine/compilations": 2, "teacher/tokens": 9}
    assert metrics_lib.reproducible(record) == {"step": 0, "loss": 0.0, "teacher/tokens": 9}


def test_foreign_line_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nhello\n')
    with pytest.raises(ValueError, match="line 2"):
        Metrics(tmp_path, tensorboard=False, resumed_step=5)


def test_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = Metrics(tmp_path, tensorboard=True)
    for step in (1, 2):
        out.write(step, {"loss": 0.25 * step})
    out.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.25), (2, 0.5)]
