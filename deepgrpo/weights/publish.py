"""Gives the engine the learner's weights, and lets nobody sample before it has proven that it has them.

    learner    |copy in the engine's dtype, log-probs of the probe| next step ...
    background                          |Orbax, Hugging Face folder|pause, load, reset, version, resume|proof|
    engine                                                                                 generate waits here ^

What fails is tried again from a fresh snapshot, then by a restart of the server on the new weights, then the run stops: rollouts
of other weights than those that are trained would look like learning for a long time.
"""

import functools
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deepgrpo.learner.learner import Learner
from deepgrpo.rollout.vllm_control import SnapshotRefused
from deepgrpo.rollout.vllm_fleet import Fleet, PublishError, Replica, told
from deepgrpo.rollout.vllm_proof import Weights
from deepgrpo.types import Ids
from deepgrpo.weights.snapshot import Snapshots

# Mean |log-prob difference| of two programs with the same weights. Measured, vLLM against this learner on a CPU: float32 1e-6,
# bfloat16 0.01 to 0.03; an accelerator may multiply float32 in lower precision.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a load is tried again; what failed, a cache reset or a busy server, needs time

log = logging.getLogger(__name__)


class Publisher:
    """One fleet, fed from one learner.

    Args:
      probe: int32[P], a text longer than a block of the engine's prefix cache.
      attempts: loads of one version into one server before it is restarted.
      keep: snapshots kept, the newest that every server has acknowledged among them; >= 1.
      tolerance: see `Weights`; 0 for that of the dtypes.
    """

    def __init__(
        self, fleet: Fleet | None, snapshots: Snapshots, learner: Learner, probe: Ids, attempts: int, keep: int, tolerance: float
    ):
        self.fleet, self.snapshots, self.learner, self.probe = fleet, snapshots, learner, probe
        self.attempts, self.keep = attempts, keep
        dtypes = {snapshots.dtype.name, np.dtype(learner.model.dtype).name}
        self.tolerance = tolerance or max(TOLERANCE[dtype] for dtype in dtypes)
        self.comparable = len(dtypes) == 1
        self._acknowledged: list[Weights] = []

    def start(self, version: int) -> Weights:
        """Writes the learner's present policy, for servers to start on."""
        policy = self.snapshots.take(self.learner.policy, self.learner.announce)
        logps = self._probe_logps()
        return self._weights(version, self._write(policy, version, 0, {}), logps())

    def confirm(self, fleet: Fleet, weights: Weights) -> None:
        """Has every server of a new fleet prove the weights: those that this run started have them, the others load them.

        Raises:
          PublishError: one does not.
        """
        self.fleet = fleet

        def give(replica: Replica) -> None:
            (fleet.confirm if replica.ours else fleet.load)(replica, weights)

        if errors := fleet.on_all(give, fleet.replicas):
            raise PublishError(f"the weights of step {weights.version} do not reach the engine:\n{told(errors)}")
        self._adopt(weights)

    def publish(self, params: Any, version: int) -> None:
        """Makes the learner's policy, which `params` are, the engine's; the learner may update as soon as this returns.

        The engine proves it in the background; whoever uses the engine next waits for that, and gets the error if it fails.

        Raises:
          PublishError: the version before was not proven.
        """
        self.fleet.settle()
        start = time.perf_counter()
        policy, logps = self.snapshots.take(params, self.learner.announce), self._probe_logps()
        blocked = time.perf_counter() - start
        self.fleet.update(lambda: self._deliver(version, policy, logps, blocked))

    def close(self) -> None:
        self.snapshots.close()

    def _probe_logps(self) -> Callable[[], list[np.ndarray]]:
        return self.learner.start_score([(self.probe[:1], self.probe[1:])], at_temperature_1=True)

    def _weights(self, version: int, folder: pathlib.Path, logps: list[np.ndarray]) -> Weights:
        return Weights(folder, version, self.probe, logps[0], self.tolerance, self.comparable)

    def _write(self, policy: Any, version: int, attempt: int, seconds: dict[str, float]) -> pathlib.Path:
        return self.snapshots.write(policy, f"{version}.{attempt}" if attempt else str(version), seconds)

    def _deliver(self, version: int, policy: Any, logps: Callable[[], list[np.ndarray]], blocked: float) -> None:
        """In the background: writes, loads, proves; see the module's text. `blocked`: seconds that the learner waited."""
        fleet, start, seconds = self.fleet, time.perf_counter(), {"blocked": blocked}
        waiting, errors = fleet.replicas, {}
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(PAUSE * 2.0 ** (attempt - 1), LONGEST_PAUSE))
            weights = self._weights(version, self._write(policy, version, attempt, seconds), logps())
            errors = fleet.on_all(functools.partial(self._load, weights), waiting)
            waiting = list(errors)
            if not errors or any(isinstance(error, SnapshotRefused) and error.names for error in errors.values()):
                break  # other tensors than the model's: no repetition changes that
            log.warning("step %d, attempt %d of %d to load:\n%s", version, attempt + 1, self.attempts, told(errors))
        else:
            log.warning("step %d: restarting %s", version, ", ".join(replica.name for replica in waiting))
            restartable = [replica for replica in waiting if replica.ours]
            failed = fleet.on_all(functools.partial(self._restart, weights), restartable)
            errors = {replica: failed.get(replica, errors[replica]) for replica in waiting if not has(replica, weights)}
        if errors:
            before = "none" if fleet.weights is None else f"version {fleet.weights.version}"
            raise PublishError(
                f"the weights of step {version} were not proven to be in the engine (proven before: {before}); "
                f"no rollout may be sampled, the run stops. Its newest checkpoint resumes it:\n{told(errors)}"
            )
        self._adopt(weights)
        slowest = {part: max(replica.seconds[part] for replica in fleet.replicas) for part in ("load", "proof")}
        fleet.seconds = seconds | slowest | {"total": blocked + time.perf_counter() - start}

    def _load(self, weights: Weights, replica: Replica) -> None:
        self.fleet.load(replica, weights)

    def _restart(self, weights: Weights, replica: Replica) -> None:
        self.fleet.restart(replica, weights)

    def _adopt(self, weights: Weights) -> None:
        """Every server has acknowledged: only now may older snapshots go."""
        self.fleet.adopt(weights)
        self._acknowledged = [*self._acknowledged, weights][-self.keep :]
        self.snapshots.keep(kept.folder for kept in self._acknowledged)


def has(replica: Replica, weights: Weights) -> bool:
    return replica.proof is not None and replica.proof.weights is weights
