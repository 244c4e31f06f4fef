"""Metrics of a run: `<run>/metrics.jsonl`, one line a step, and TensorBoard beside it.

Opening the file again after a crash drops a torn last line and every line past the resumed step, so that in the end it holds what
an uninterrupted run would have written, but for clocks and the counters of a process (`reproducible` leaves them out).
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from deepgrpo.config.errors import remedy_of
from deepgrpo.telemetry.log import no_end

FILE = "metrics.jsonl"
OF_THE_PROCESS = re.compile(
    r"^(timing_s|perf|engine|grading)/|/(http|latency)_"
)  # clocks, and counters that start anew with each process


class RecordError(RuntimeError):
    """The metrics could not be written."""


class Metrics:
    """Appends one record a step. Used by one thread.

    run_folder: `<run_dir>/<name>`, made if absent. tensorboard: also write scalars to `<run_folder>/tensorboard`.
    resumed_step: last step that the loaded checkpoint contains; -1 for a fresh run, which sets aside what an earlier start wrote.
    """

    def __init__(self, run_folder: str | pathlib.Path, tensorboard: bool, resumed_step: int = -1):
        folder = pathlib.Path(run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        if resumed_step < 0:
            set_aside(self.path)
        self._last = truncate_after(self.path, resumed_step)
        self._file = open(self.path, "ab", buffering=0)  # nothing is left to be written when it closes
        self._events = None
        if tensorboard:
            with no_end("TensorBoard"):
                self._events = Events(folder / "tensorboard", resumed_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a step's metrics, flushed to the operating system.

        Raises:
          ValueError: `step` is not larger than the last one written: two lines of one step would make every plot lie.
        """
        if step <= self._last:
            raise ValueError(f"{self.path}: step {step} after step {self._last}; a step has one line, steps rise")
        self._last = step
        values = {key: as_number(key, value) for key, value in metrics.items()}
        line = memoryview(encode({"step": step} | dict(sorted(values.items()))))
        with self._named():
            while line:
                line = line[self._file.write(line) :]
        self._show("write", step, values)

    def sync(self) -> dict[str, str]:
        """Forces everything to disk; call it before a checkpoint is committed, which must not know more than the file.

        Returns:
          What the checkpoint keeps of the file, to recognise it by.
        """
        with self._named():
            os.fsync(self._file.fileno())
        self._show("flush")
        with open(self.path, "rb") as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()
        self._show("close")
        self._events = None

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """This file is the run's record: where it cannot be written, the run ends, and says so."""
        try:
            yield
        except OSError as error:
            what = f"{self.path}: {error.strerror}; its newest checkpoint resumes the run"
            raise RecordError(f"{what} -> {remedy_of(error)}") from error

    def _show(self, action: str, *arguments: Any) -> None:
        """TensorBoard is for people: where it fails, it ends, and the run goes on."""
        events, self._events = self._events, None
        if events:
            with no_end("TensorBoard"):
                getattr(events, action)(*arguments)
                self._events = events


class Events:
    """TensorBoard's file, written in this thread: the usual writer's own thread dies of a full disk, and whoever feeds it hangs.

    first_step: what an earlier start wrote from here on is no longer shown.
    """

    def __init__(self, folder: pathlib.Path, first_step: int):
        from tensorboardX.event_file_writer import EventsWriter  # optional: only who asks for it pays its import
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self.flush()

    def _add(self, **fields: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), **fields))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(step=step, summary=self._summary(value=entries))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def as_number(key: str, value: Any) -> int | float:
    """Turns Python, NumPy and JAX scalars into Python numbers."""
    if isinstance(value, bool | int):
        return int(value)
    if getattr(value, "shape", ()) != ():
        raise ValueError(f"metric {key} has shape {value.shape}, expected a scalar")
    return value.item() if hasattr(value, "item") else float(value)


def encode(record: Mapping[str, Any]) -> bytes:
    """One JSON line. JSON has no NaN or infinity: they become the strings "nan", "inf", "-inf", which `float` reads back."""
    legal = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(legal, allow_nan=False).encode() + b"\n"


def read(path: str | pathlib.Path) -> list[dict[str, float]]:
    """Reads a metrics file (or the one in a run folder) while a run may be writing it: a torn last line is left out."""
    path = pathlib.Path(path)
    path = path / FILE if path.is_dir() else path
    lines = path.read_bytes().split(b"\n")[:-1]
    return [{k: float(v) if isinstance(v, str) else v for k, v in json.loads(line).items()} for line in lines]


def last_record(path: pathlib.Path) -> dict[str, float] | None:
    """The last complete record; None without one. Raises: see `truncate_after`."""
    return read(path)[-1] if path.exists() and kept_until(path)[1] >= 0 else None


def reproducible(record: Mapping[str, float]) -> dict[str, float]:
    """The part of a record that a repeated or resumed run gives again, bit for bit."""
    return {key: value for key, value in record.items() if not OF_THE_PROCESS.search(key)}


def truncate_after(path: pathlib.Path, step: int) -> int:
    """Cuts a file behind its last complete line that is not past `step`; returns that line's step, or -1.

    Raises:
      ValueError: a complete line is not a record; the file was edited or another program writes it.
    """
    if not path.exists():
        return -1
    kept, last = kept_until(path, step)
    os.truncate(path, kept)
    return last


def kept_until(path: pathlib.Path, step: float = math.inf) -> tuple[int, int]:
    """(bytes of a file's complete lines that are not past `step`, step of the last of them or -1); raises as `truncate_after`."""
    kept, last = 0, -1
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)["step"] + 0
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is no metrics record: {line[:80]!r}; move the file away") from error
            if found > step:
                break
            kept, last = kept + len(line), found
    return kept, last


def set_aside(path: pathlib.Path) -> None:
    """Gives a file with content another name: what a run wrote is never emptied."""
    if path.exists() and path.stat().st_size:
        number = next(n for n in itertools.count(1) if not path.with_suffix(f".{n}.jsonl").exists())
        path.rename(path.with_suffix(f".{number}.jsonl"))
