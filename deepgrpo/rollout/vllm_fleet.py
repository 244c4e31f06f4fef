"""The vLLM servers of a run: which weights they have, which of them is up, and how one that fails comes back.

A server that this run started is restarted on the present snapshot. One that was attached to is somebody else's process: it is
waited for, and given the weights again. Either way it serves only after the proof of vllm_http.py.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from deepgrpo.rollout.vllm_http import Control, Proof, VllmError, Weights, prove
from deepgrpo.rollout.vllm_server import START_SECONDS, VllmServer, VllmServerError
from deepgrpo.telemetry import waits
from deepgrpo.types import Ids, as_ids

log = logging.getLogger(__name__)


RESTARTS = 3  # in a row, before a server is given up


class PublishError(RuntimeError):
    """The engine could not be given the new weights, or did not prove that it has them; the run must not go on."""


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds. control: for a short call (version, cache, probe). load: for one that loads weights. start: until ready."""

    control: float = 60.0
    load: float = 120.0
    start: float = START_SECONDS


DEADLINES = Deadlines()


class Replica:
    """One server.

    generating: samples that it is at. shown: requests for one token that it answered to show that it works. seconds: of its last
      load, by part.
    """

    def __init__(self, index: int, server: VllmServer):
        self.index, self.server, self.control = index, server, Control(server)
        self.proof: Proof | None = None
        self.generating, self.shown = 0, 0
        self.seconds: dict[str, float] = {}
        self.lock = threading.Lock()  # held while its weights or its process change

    @property
    def ours(self) -> bool:
        return self.server.pid is not None

    @property
    def name(self) -> str:
        return f"vLLM server {self.index} ({self.server.url})"


class Fleet:
    """Threads may share it, but only one may publish."""

    def __init__(self, servers: Sequence[VllmServer], run_id: str, deadlines: Deadlines | None = None):
        self.replicas = [Replica(index, server) for index, server in enumerate(servers)]
        self.run_id, self.deadlines = run_id, deadlines or DEADLINES
        self.weights: Weights | None = None  # what all servers have proven to have
        self.reloads = 0
        self.seconds: dict[str, float] = {}  # of the last update, by part
        self._update: concurrent.futures.Future | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._closed = False

    @property
    def version(self) -> int:
        if self.weights is None:
            raise RuntimeError("the vLLM servers have no proven weights yet: publish first")
        return self.weights.version

    def salt(self, version: int) -> str:
        """Of the prefix cache: a block that one version made is never found by a request of another."""
        return f"{self.run_id[-100:]}.{version}"  # vLLM takes at most 128 characters, and no slash

    #### Updates, one at a time, in the background

    def update(self, job: Callable[[], None]) -> None:
        """Starts `job`, which ends in `adopt`; until it has ended nobody generates (`settle`)."""
        self.settle()
        if self._closed:
            raise RuntimeError("the vLLM engine was closed; no weights can be published")
        self._update = self._pool.submit(job)

    def settle(self) -> None:
        """Returns when no update runs. The job's calls all have deadlines, so this wait ends.

        Raises:
          PublishError: or whatever else the update failed with.
        """
        if self._update is not None:
            with waits.on("the newest weights, to be written, loaded and proven"):
                self._update.result()
            self._update = None

    def adopt(self, weights: Weights) -> None:
        self.weights = weights

    #### Giving weights

    def on_all(self, action: Callable[[Replica], None], replicas: Sequence[Replica]) -> dict[Replica, Exception]:
        """Runs `action` for every replica at once; returns the errors of those where it failed."""
        with concurrent.futures.ThreadPoolExecutor(max(1, len(replicas)), "vllm") as pool:
            futures = {replica: pool.submit(action, replica) for replica in replicas}
        errors = {replica: future.exception() for replica, future in futures.items()}
        for error in errors.values():
            if error is not None and not isinstance(error, VllmError | VllmServerError | OSError):
                raise error
        return {replica: error for replica, error in errors.items() if error is not None}

    def load(self, replica: Replica, weights: Weights) -> None:
        """Loads a snapshot into a running server, and proves it."""
        control, short = replica.control, self.deadlines.control
        with replica.lock:
            start = time.perf_counter()
            with control.paused(self.deadlines.load):
                control.load(str(weights.folder), self.deadlines.load)
                control.reset_prefix_cache(short)
                control.set_weight_version(weights.version, short)
            loaded = time.perf_counter()
            self._prove(replica, weights)
            replica.seconds = {"load": loaded - start, "proof": time.perf_counter() - loaded}

    def restart(self, replica: Replica, weights: Weights) -> None:
        """Starts the server anew on a snapshot, and proves it."""
        if not replica.ours:
            raise VllmServerError(f"{replica.name} was not started by this run, so it cannot be restarted")
        with replica.lock:
            start = time.perf_counter()
            replica.server.restart(weights.folder, self.deadlines.start)
            replica.proof = None  # another process, other kernels perhaps: nothing to compare with
            replica.control.set_weight_version(weights.version, self.deadlines.control)
            replica.seconds = {"load": time.perf_counter() - start, "proof": 0.0}  # a start counts as a load
            self._prove(replica, weights)

    def confirm(self, replica: Replica, weights: Weights) -> None:
        """Names and proves the weights that the server was started on."""
        with replica.lock:
            replica.control.set_weight_version(weights.version, self.deadlines.control)
            self._prove(replica, weights)

    def _prove(self, replica: Replica, weights: Weights) -> None:
        before = replica.proof if replica.proof and replica.proof.weights.version != weights.version else None
        replica.proof = prove(replica.control, weights, self.salt(weights.version), before, self.deadlines.control)

    #### Coming back

    def progress(self, replica: Replica) -> float | None:
        """A number that grows while the server works, however slowly it answers; None when it says nothing.

        Where its /metrics counts no tokens (an option of vLLM's), a request for one token is what it can show.
        """
        try:
            found = replica.control.progress(self.deadlines.control)
            if found is None:
                replica.control.greedy(as_ids([0]), 1, self.version, self.salt(self.version), self.deadlines.control)
                replica.shown += 1
                found = float(replica.shown)
        except (VllmError, ValueError, KeyError, TypeError, ArithmeticError):  # what cannot be read says nothing
            return None
        return found

    def heal(self, replica: Replica, stands: bool) -> None:
        """Called when a request failed: returns once the server can be trusted with the present weights again.

        Args:
          stands: it made no token for so long that it counts as hung.

        Raises:
          VllmError, VllmServerError, OSError: it does not come back.
        """
        trouble = "it hangs: it makes no token any more" if stands else self._trouble(replica)
        if trouble is None:
            return
        log.warning("%s: %s", replica.name, trouble)
        self.reloads += 1
        if replica.ours:
            self._restart_patiently(replica)
        else:
            replica.server.wait_ready(self.deadlines.start)
            self.load(replica, self.weights)
        log.warning("%s serves version %d again", replica.name, self.version)

    def _restart_patiently(self, replica: Replica) -> None:
        """The server waits longer before each further restart (VllmServer.restart)."""
        for attempt in range(1, RESTARTS + 1):
            try:
                return self.restart(replica, self.weights)
            except (VllmError, VllmServerError, OSError) as error:
                if attempt == RESTARTS:
                    raise
                log.warning("%s: restart %d of %d failed: %s", replica.name, attempt, RESTARTS, error)

    def _trouble(self, replica: Replica) -> str | None:
        """What is wrong with a server: its process, its version, or that it does not generate."""
        if not replica.server.alive():
            return "it is gone"
        before = self.progress(replica)
        try:
            found = replica.control.weight_version(self.deadlines.control)
            if found != str(self.version):
                return f"it serves weights of version {found}, expected version {self.version}"
            replica.control.greedy(as_ids([0]), 1, self.version, self.salt(self.version), self.deadlines.control)
        except VllmError as error:
            after = self.progress(replica)  # it may be busy with others, and this request wait in its queue
            return None if after is not None and after != before and replica.server.alive() else str(error)
        return None

    def close(self) -> None:
        """Waits for a running update, then stops the servers that this run started; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown(wait=True)
        if self._update is not None and (error := self._update.exception()) is not None:
            log.error("the last weights were not published: %s", error)
        for replica in self.replicas:
            replica.server.stop()


def format_errors(errors: dict[Replica, Exception]) -> str:
    return "\n".join(f"- {replica.name}: {error}" for replica, error in errors.items())


#### Which server gets a request: the least loaded one, unless another one holds the prompt's beginning in its prefix cache.

REMEMBERED = 200_000  # prefixes; the oldest are forgotten first
SLACK = 1.25  # load of a server with the prefix over that of the least loaded one, up to which it is preferred


class Router:
    """block: tokens of a prefix-cache block; only whole blocks are reused."""

    def __init__(self, block: int):
        self.block = block
        self._served: collections.OrderedDict[int, int] = collections.OrderedDict()  # hash of a prefix -> replica's index

    def choose(self, prompt: Ids, samples: int, replicas: Sequence[Replica]) -> Replica:
        """Of the replicas that may take it; notes that the prompt's blocks will be there."""
        least = min(replicas, key=lambda replica: (replica.generating, replica.index))
        if len(replicas) == 1:
            return least
        prefixes = self._prefixes(prompt)
        by_index = {replica.index: replica for replica in replicas}
        holders = (by_index.get(self._served.get(prefix)) for prefix in reversed(prefixes))
        holder = next((replica for replica in holders if replica is not None), None)
        close = holder is not None and holder.generating <= SLACK * least.generating + samples
        chosen = holder if close else least
        for prefix in prefixes:
            self._served[prefix] = chosen.index
            self._served.move_to_end(prefix)
        while len(self._served) > REMEMBERED:
            self._served.popitem(last=False)
        return chosen

    def forget(self) -> None:
        """New weights: the caches are empty."""
        self._served.clear()

    def _prefixes(self, prompt: Ids) -> list[int]:
        """A hash of each beginning of whole blocks, the shortest first."""
        found, running = [], 0
        for start in range(0, len(prompt) - self.block + 1, self.block):
            running = hash((running, prompt[start : start + self.block].tobytes()))
            found.append(running)
        return found
