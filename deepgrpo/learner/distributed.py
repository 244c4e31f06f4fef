"""Several processes, one learner: how they find each other, and how the first tells the others what to compute next.

Process 0 runs the training loop: rollouts, grading, curriculum, teacher, files. The others hold their shards of the state and
repeat, in the same order, every device program that process 0 starts; `Learner.follow` is their whole life. What they need is
sent from host to host, so that nobody waits inside a collective operation, whose patience is short, while rollouts are made.

    process 0   rollouts, rows ──send("update", rows)──► start_update ──send("save", step)──► checkpoint ...
    process 1   receive ───────────────────────────────► start_update ──receive─────────────► checkpoint ...
"""

import contextlib
import dataclasses
import glob
import io
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from deepgrpo.config.errors import ConfigError
from deepgrpo.learner.rows import Row
from deepgrpo.telemetry import waits

# Variables of schedulers whose processes JAX recognises by itself, each with a value above 1 when there are several.
CLUSTERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
GREETING_BYTES = 1024
BEAT, BEAT_SECONDS = b"beat", 30.0
SILENCE = 600.0  # seconds without a beat after which process 0 hangs; also for the start, where nothing is computed
HANGS = 3600.0  # for what devices and other processes compute, compile or load before they go on

log = logging.getLogger(__name__)


def initialise(section: Mapping[str, Any]) -> None:
    """Joins the processes of this run; before anything else asks JAX for devices.

    With learner.coordinator set, that and learner.process decide. Otherwise a scheduler that started several processes does
    (SLURM, Open MPI), or TPU_WORKER_HOSTNAMES with several hosts; without any, the process is alone.
    """
    visible, tasks = visible_gpus(os.environ), tasks_of_node(os.environ)
    if section["coordinator"]:
        index, count = section["process"]
        jax.distributed.initialize(section["coordinator"], count, index, cluster_detection_method="deactivate")
    elif in_cluster(os.environ):
        jax.distributed.initialize(local_device_ids=devices_of_task(os.environ, visible, tasks) or None)
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()
    if jax.process_count() > 1 and jax.default_backend() == "gpu" and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        require_devices(jax.local_device_count(), visible, tasks)
    if jax.process_count() > 1:
        log.info("process %d of %d, with %d devices", jax.process_index(), jax.process_count(), jax.local_device_count())


def in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a scheduler started several processes. SLURM_NTASKS alone is also set in a batch script that starts one itself."""
    many = any(int(environment.get(name) or 1) > 1 for name in CLUSTERS)
    return many and ("OMPI_COMM_WORLD_SIZE" in environment or "SLURM_STEP_NODELIST" in environment)


def visible_gpus(environment: Mapping[str, str]) -> int:
    """How many GPUs of NVIDIA this process may use; 0 if there are none."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1", "none", "void")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def tasks_of_node(environment: Mapping[str, str]) -> int:
    """Processes that the scheduler started on this host."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")  # of each node: "8", "8(x2),4"
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed) for _ in range(int(times or 1))]
    return counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)]


def devices_of_task(environment: Mapping[str, str], visible: int, tasks: int) -> list[int]:
    """The GPUs of this process, by their place among the visible ones; JAX would take one, whatever is there.

    Tasks that see the same GPUs share them evenly. Where a task sees fewer than its node has, those are its own.
    """
    rank = int(environment.get("SLURM_LOCALID") or environment.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)
    own = 0 < visible < int(environment.get("SLURM_GPUS_ON_NODE") or visible) or visible < tasks
    share = visible if own else visible // tasks
    return list(range(visible)) if own else list(range(rank * share, (rank + 1) * share))


def require_devices(used: int, visible: int, tasks: int) -> None:
    """Raises ConfigError if the tasks of a host leave GPUs idle that they can see."""
    if used * tasks < visible:
        raise ConfigError(
            f"learner: {tasks} process(es) on this host use {used} GPU(s) each, of {visible} that they see -> start"
            f" {visible} tasks a node (srun --ntasks-per-node={visible}), or one that has all; to leave some to others, name the"
            " learner's in CUDA_VISIBLE_DEVICES"
        )


def require_agreement(value: Any, what: str) -> None:
    """Raises ValueError unless all processes hold the same JSON-able value."""
    if jax.process_count() == 1:
        return
    mine = json.dumps(value).encode()
    theirs = _broadcast(mine)
    if mine != theirs:
        raise ValueError(
            f"{what}: process {jax.process_index()} finds {mine.decode()}, process 0 {theirs.decode()}; expected the same: do all"
            " hosts see one run folder and one configuration?"
        )


def of_first(value: str) -> str:
    """Process 0's text, in every process; all of them call this."""
    return value if jax.process_count() == 1 else _broadcast(value.encode()).decode()


class Channel:
    """From process 0 to all others: messages of a name, a JSON-able mapping and arrays, in order.

    A process that is gone is an error at the next message, on either side. The others say when they take a message and when they
    are done with it, so that process 0 can name who is behind (`behind`). In return it sends a beat from time to time (`beat`),
    since they may wait for hours while rollouts are made: where none comes for SILENCE seconds, process 0 hangs.
    """

    def __init__(self, connections: Sequence[connection.Connection], leads: bool = True):
        self._connections, self.leads = connections, leads  # leads: this is process 0
        self._told: set[int] = set()  # the others that were told to stop
        self._sent = self._taken = 0  # messages
        self._name = "nothing yet"  # of the newest message
        self._heard = dict.fromkeys(
            range(1, len(connections) + 1), (0, "done")
        )  # of each other process: message, where it stands
        self._sending, self._hearing = threading.Lock(), threading.Lock()

    def send(self, name: str, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Raises ConnectionError: a process is gone."""
        buffer = io.BytesIO()
        header = np.frombuffer(json.dumps([name, fields]).encode(), np.uint8)
        np.savez(buffer, header=header, **{f"array:{key}": x for key, x in arrays.items()})
        self._sent, self._name = self._sent + 1, name
        self._hear()
        self._send(buffer.getbuffer())

    def _send(self, content: Any) -> None:
        for index, one in enumerate(self._connections, 1):
            with (
                self._sending,
                waits.on(f"process {index} of the learner, to take a message", HANGS),
                _gone(f"process {index}"),
            ):
                one.send_bytes(content)

    def _hear(self) -> None:
        """Reads what the others have said so far. One that is gone is the next message's error."""
        with self._hearing, contextlib.suppress(EOFError, OSError):
            for index, one in enumerate(self._connections, 1):
                while one.poll():
                    self._note(index, one.recv_bytes())

    def _note(self, index: int, content: bytes) -> None:
        number, stage = json.loads(content)
        if stage == "told":
            self._told.add(index)
        else:
            self._heard[index] = number, stage

    def behind(self) -> str:
        """Which processes have not done what the newest message asks of them, for a line of the watchdog."""
        self._hear()
        found = []
        for index, (number, stage) in self._heard.items():
            if number < self._sent:
                found.append(f"process {index} has not taken {self._name!r} yet")
            elif stage != "done":
                found.append(f"process {index} is at {self._name!r}")
        return "; ".join(found) or f"all processes have begun {self._name!r}"

    def end(self) -> None:
        """Tells the others to stop, and waits until they have heard it: closing a connection with something unread breaks it."""
        self.send("stop", {}, {})
        for index, one in enumerate(self._connections, 1):
            with waits.on(f"process {index} of the learner, to stop", HANGS), contextlib.suppress(EOFError, OSError):
                while self._heard[index][0] < self._sent:
                    self._note(index, one.recv_bytes())

    def report(self) -> None:
        """Says to process 0 that this one was told to stop; for a signal's handler."""
        self._connections[0].send_bytes(json.dumps((self._taken, "told")).encode())

    def told(self) -> list[int]:
        """The others that have reported."""
        self._hear()
        return sorted(self._told)

    def beat(self) -> None:
        """Tells the others that process 0 lives, whatever its main thread does."""
        self._send(BEAT)

    def receive(self) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
        """Waits for the next message, and is done with the one before. Raises ConnectionError: process 0 is gone, or hangs."""
        one, content = self._connections[0], BEAT
        with _gone("process 0"):
            if self._taken:
                one.send_bytes(json.dumps((self._taken, "done")).encode())
            while content == BEAT:
                if not one.poll(SILENCE):
                    raise ConnectionError(f"process 0 of the learner has said nothing for {SILENCE:.0f} s: it hangs")
                content = one.recv_bytes()
            self._taken += 1
            one.send_bytes(json.dumps((self._taken, "taken")).encode())
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            name, fields = json.loads(bytes(file["header"]))
            arrays = {key.removeprefix("array:"): file[key] for key in file.files if key != "header"}
        return name, fields, arrays


@contextlib.contextmanager
def _gone(who: str) -> Iterator[None]:
    """An error of the connection names the process at its other end."""
    try:
        yield
    except ConnectionError as error:
        if type(error) is ConnectionError:  # ours
            raise
        raise ConnectionError(f"{who} of the learner is gone ({error}); see its own output") from error
    except (EOFError, OSError) as error:
        raise ConnectionError(f"{who} of the learner is gone ({error}); see its own output") from error


def _beat(channel: Channel, ended: threading.Event) -> None:
    with contextlib.suppress(ConnectionError):  # whoever is gone is the next message's error
        while not ended.wait(BEAT_SECONDS):
            channel.beat()


@contextlib.contextmanager
def open_channel(coordinator: str = "") -> Iterator[Channel | None]:
    """The channel of this run's processes, None where there is one; process 0 ends the others when it leaves.

    coordinator: learner.coordinator, whose host is process 0's.
    """
    if jax.process_count() == 1:
        yield None
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ends_all())
        if jax.process_index():
            ours = stack.enter_context(_reach(json.loads(_broadcast(b""))))
            yield Channel([ours], leads=False)
            return
        key = secrets.token_hex(16)
        listener = stack.enter_context(_listen(coordinator, key.encode()))
        _broadcast(json.dumps({"address": listener.address, "key": key}).encode())
        accepted: list[connection.Connection] = []
        count = jax.process_count() - 1
        with waits.on(lambda: f"{count - len(accepted)} of {count} processes of the learner, to connect", SILENCE):
            while len(accepted) < count:
                accepted.append(stack.enter_context(listener.accept()))
        channel, ended = Channel(accepted), threading.Event()
        stack.callback(ended.set)
        threading.Thread(target=_beat, args=(channel, ended), name="beat", daemon=True).start()
        yield channel
        channel.end()  # only after a life without an error: the others' last message must not lie


@contextlib.contextmanager
def _ends_all() -> Iterator[None]:
    """An error ends this process at once, and JAX then the others, which may wait for it in a collective operation. By the usual
    way out it would wait for them in turn, for minutes."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        print(error.code) if isinstance(error, SystemExit) else traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _reach(greeting: Mapping[str, Any]) -> connection.Connection:
    host, port = greeting["address"]
    try:
        return connection.Client((host, port), authkey=greeting["key"].encode())
    except OSError as error:
        raise ConnectionError(
            f"process 0 cannot be reached at {host}, port {port}: {error}. Set learner.coordinator to a name or address of its"
            " host in the learner's network"
        ) from error


def _listen(coordinator: str, key: bytes) -> connection.Listener:
    """On one of this host's addresses, not on all: the coordinator's, else that of the default route, else of its own name."""
    hosts = [coordinator.rpartition(":")[0].strip("[]")] if coordinator else []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which interface would
        hosts.append(probe.getsockname()[0])
    for host in [*hosts, socket.gethostname()]:
        with contextlib.suppress(OSError):  # a name that others use for this host need not be an address of its own
            return connection.Listener((socket.gethostbyname(host), 0), backlog=jax.process_count(), authkey=key)
    return connection.Listener(("127.0.0.1", 0), backlog=jax.process_count(), authkey=key)


def _broadcast(text: bytes) -> bytes:
    """Process 0's text, in every process."""
    if len(text) > GREETING_BYTES:
        raise ValueError(f"{len(text)} bytes to agree on, expected at most {GREETING_BYTES}")
    padded = np.frombuffer(text.ljust(GREETING_BYTES), np.uint8)
    with waits.on("all processes of the learner, to agree", SILENCE):
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).rstrip()


######################################################################################################################
#  Rows on the wire
######################################################################################################################


def encode_rows(rows: Sequence[Row]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Rows as (JSON-able fields, arrays): each array field of all rows in one array, with the rows' lengths, -1 for None."""
    scalars: dict[str, list] = {}
    arrays: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(Row):
        values = [getattr(row, field.name) for row in rows]
        present = [value for value in values if isinstance(value, np.ndarray)]
        if present:
            arrays[field.name] = np.concatenate(present)
            arrays[f"{field.name}/length"] = np.array([-1 if value is None else len(value) for value in values])
        else:
            scalars[field.name] = [value.item() if isinstance(value, np.generic) else value for value in values]
    return {"rows": scalars}, arrays


def decode_rows(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Row]:
    """The inverse of `encode_rows`, to the bit."""
    columns = dict(fields["rows"])
    for name in [key for key in arrays if not key.endswith("/length")]:
        lengths = arrays[f"{name}/length"]
        ends = np.cumsum(np.maximum(lengths, 0))
        parts = [arrays[name][end - n : end] for n, end in zip(lengths, ends, strict=True) if n >= 0]
        present = iter(parts)
        columns[name] = [None if n < 0 else next(present) for n in lengths]
    return [Row(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


######################################################################################################################
#  How a run is told to stop: by a signal to any of its processes. The step ends, is saved, and the program exits with 0.
######################################################################################################################

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of a lost terminal or a scheduler; more may come
ORDERS = (signal.SIGTERM, signal.SIGINT)  # a second one of these ends the program at once
AGAIN = 2.0  # seconds after which it counts: Ctrl-C on a launcher comes twice, from the terminal and from the launcher


class Stop:
    """Catches the signals from now on, in the main thread; elsewhere nothing is caught."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._set, self._clock, self._ordered, self._channel = False, clock, None, None
        if threading.current_thread() is threading.main_thread():
            for number in WARNINGS + ORDERS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                    signal.signal(number, self._on_signal)

    def attach(self, channel: Channel | None) -> None:
        """From now on a signal to a process but the first is reported to the first, and `is_set` there knows of it."""
        self._channel = channel
        if self._set:
            self._report()

    def is_set(self) -> bool:
        if not self._set and self._channel is not None and self._channel.leads and (told := self._channel.told()):
            self._set = True
            _say(f"stopping after this step: process {told[0]} of the learner was told to")
        return self._set

    def _on_signal(self, number: int, _frame) -> None:
        now = self._clock()
        if number in ORDERS:
            if self._ordered is not None and now - self._ordered >= AGAIN:
                os._exit(128 + number)
            self._ordered = now if self._ordered is None else self._ordered
        if not self._set:
            self._set = True
            again = "SIGTERM or Ctrl-C" + (" again" if number in ORDERS else " twice")
            _say(f"stopping after this step ({again}, {AGAIN:g} s apart: at once)")
            self._report()

    def _report(self) -> None:
        if self._channel is not None and not self._channel.leads:
            with contextlib.suppress(OSError):  # process 0 is gone: `follow` says so
                self._channel.report()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # not by print: the signal may have come while it was writing
        os.write(2, f"{text}\n".encode())
