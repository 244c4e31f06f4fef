"""Gives the engine the learner's weights, and lets nobody sample before it has proven that it has them.

    learner    |copy in the engine's dtype, log-probs of the probe| next step ...
    background                          |Orbax, Hugging Face folder|pause, load, reset, version, resume|proof|
    engine                                                                                 generate waits here ^

What fails is tried again from a fresh snapshot, then by a restart of the server on the new weights, then the run stops: rollouts
of other weights than those that are trained would look like learning for a long time.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from deepgrpo.learner.learner import Learner
from deepgrpo.model.config import ModelConfig
from deepgrpo.rollout.vllm_fleet import Fleet, PublishError, Replica, format_errors
from deepgrpo.rollout.vllm_http import SnapshotRefused, Weights
from deepgrpo.telemetry import waits
from deepgrpo.types import Ids
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import named_leaves
from deepgrpo.weights.run_folder import KEPT_SNAPSHOTS

log = logging.getLogger(__name__)


#### Snapshots: a copy of the policy in the engine's precision, by Orbax or directly, in a Hugging Face folder

# Route `orbax`: every process of the learner writes its shards with Orbax, then the arrays are read back one by one and
# converted; no host ever holds the whole policy in its memory. Route `direct`, for a learner on one host: the conversion reads
# the learner's devices. Both end in `hf.save`, so the files are the same. Phantom ids (vocabulary rows without a token) are
# left out: an engine cannot sample a row that it does not have.

WRITE_SECONDS = 3600.0  # for all processes to write a snapshot; past it one of them, or the folder, hangs
GROUP_BYTES = 2 * 2**30  # of arrays that are read from Orbax at once

# Orbax warns, at each save by a single process, that there is nothing to merge from several.
logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())


class Snapshots:
    """Writes the snapshots of one run below `folder`, one folder a version.

    Args:
      config: of the learner's model. num_real_ids: vocabulary rows that have a token.
      dtype: of the engine. tokenizer_from: Hugging Face folder whose tokenizer and special ids go along.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        route: str,
        config: ModelConfig,
        num_real_ids: int,
        dtype: Any,
        tokenizer_from: str | os.PathLike,
    ):
        self.folder, self.route, self.dtype = pathlib.Path(folder).absolute(), route, jnp.dtype(dtype)
        self.config = dataclasses.replace(config, vocab_size=num_real_ids)
        self.tokenizer_from = pathlib.Path(tokenizer_from)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweeper = concurrent.futures.ThreadPoolExecutor(1, "sweep")
        self._stored = 0

    def take(self, params: Any, announce: Callable[..., None] | None = None) -> Any:
        """A copy of the policy, sharded likewise, that outlives the next update. Only enqueues it: the caller need not wait.

        A learner of several processes writes the copy at once, all of them together: `announce("store", folder=...)` has the
        others call `store`, too. It is read back by `write`.
        """
        if jax.process_count() == 1:
            return _copy(params, self.config, self.dtype)
        folder, self._stored = self.folder / f".{self._stored}.shards", self._stored + 1
        announce("store", folder=str(folder))
        with waits.on(f"all processes of the learner, to write {folder} (weights.folder)", WRITE_SECONDS):
            return store(params, folder, self.config, self.dtype)

    def write(self, policy: Any, name: str, seconds: dict[str, float]) -> pathlib.Path:
        """Writes what `take` returned and returns the folder, which appears at once and complete.

        Args:
          seconds: gets the time of the parts `snapshot` (until the copy is there), `orbax` and `convert`.
        """
        target, store = self.folder / name, self.folder / f".{name}.orbax"
        if isinstance(policy, _Stored):
            with _lap(seconds, "convert"):
                hf.save(self._stored_parts(policy), self.config, target, self.dtype, self.tokenizer_from)
            return target  # the store goes with `keep`: another attempt may want it
        with _lap(seconds, "snapshot"):
            jax.block_until_ready(policy)
        with _lap(seconds, "orbax"):
            if self.route == "orbax":
                shutil.rmtree(store, ignore_errors=True)
                with _checkpointer() as writer:
                    writer.save(store, args=ocp.args.PyTreeSave(named_leaves(policy)))
        with _lap(seconds, "convert"):
            hf.save(self._parts(policy, store), self.config, target, self.dtype, self.tokenizer_from)
        self._remove(store)
        return target

    def _parts(self, policy: Any, store: pathlib.Path) -> dict:
        """The tree that `hf.save` converts, read from the Orbax store or from the learner's devices."""
        leaves = named_leaves(policy)
        if self.route == "orbax":
            return self._stored_parts(_Stored(store, {name: leaf.nbytes for name, leaf in leaves.items()}))
        return self._tree(lambda name: np.asarray(leaves[name]))

    def _stored_parts(self, stored: "_Stored") -> dict:
        names = [".".join(row.path) for row in hf.table(self.config)]  # in the file's order
        return self._tree(_Store(stored.folder, {name: stored.nbytes[name] for name in names}).read)

    def _tree(self, fetch: Callable[[str], np.ndarray]) -> dict:
        parts: dict = {}
        for row in hf.table(self.config):
            read = functools.partial(fetch, ".".join(row.path))
            node = functools.reduce(lambda node, key: node.setdefault(key, {}), row.path[:-1], parts)
            node[row.path[-1]] = _Part(read, row.shape, row.transposed)
        return parts

    def keep(self, folders: Iterable[pathlib.Path]) -> None:
        """Removes every snapshot but these."""
        kept = {folder.name for folder in folders}
        for path in self.folder.iterdir():
            if path.name not in kept:
                self._remove(path)

    def close(self) -> None:
        self._sweeper.shutdown(wait=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()  # unless others have something there

    def _remove(self, path: pathlib.Path) -> None:
        """Behind the caller's back, since giving back gigabytes takes a while. What cannot be removed now will be next time."""
        self._sweeper.submit(shutil.rmtree, path, ignore_errors=True)


def store(params: Any, folder: str | os.PathLike, config: ModelConfig, dtype: np.dtype) -> "_Stored":
    """Writes this process's shards of a copy of the policy; every process of the learner calls it.

    config: of the learner's model, with the vocabulary that the engine gets.
    """
    named = named_leaves(_copy(params, config, dtype))
    with _checkpointer() as writer:
        writer.save(pathlib.Path(folder), args=ocp.args.PyTreeSave(named), force=True)
    return _Stored(pathlib.Path(folder), {name: leaf.nbytes for name, leaf in named.items()})


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copy(params: Any, config: ModelConfig, dtype: np.dtype) -> Any:
    """Casts, leaves out phantom rows, turns what Hugging Face turns (fast here, slow on a host), and always copies: the learner
    donates its own arrays to its next update."""
    transposed = {row.path: row.transposed for row in hf.table(config)}

    def one(path: tuple, x: jax.Array) -> jax.Array:
        names = tuple(key.key for key in path)
        if names[0] == "embed_tokens":
            x = x[: config.vocab_size]
        elif names[0] == "lm_head":
            x = x[:, : config.vocab_size]
        return jnp.copy((x.swapaxes(-1, -2) if transposed[names] else x).astype(dtype))

    return jax.tree_util.tree_map_with_path(one, params)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A copy of the policy in an Orbax folder. nbytes: of each array, by its flat name."""

    folder: pathlib.Path
    nbytes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A parameter as `hf.save` wants it: an array in the learner's orientation, here a view of one that was turned already."""

    read: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    transposed: bool

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = self.read().swapaxes(-1, -2) if self.transposed else self.read()
        return array if dtype is None else array.astype(dtype, copy=False)


class _Store:
    """The arrays of an Orbax checkpoint, read in groups of neighbours of which one at a time is kept: all at once would take a
    whole policy's memory, one by one takes twice the time."""

    def __init__(self, folder: pathlib.Path, nbytes: dict[str, int]):
        self.folder, self.groups, self.loaded = folder, [], {}
        room = 0
        for name, size in nbytes.items():
            if size > room:
                self.groups.append([])
                room = GROUP_BYTES
            self.groups[-1].append(name)
            room -= size

    def read(self, name: str) -> np.ndarray:
        if name not in self.loaded:
            self.loaded = {}
            (group,) = (group for group in self.groups if name in group)
            restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in group}
            args = ocp.args.PyTreeRestore(item=dict.fromkeys(group, 0), restore_args=restore, partial_restore=True)
            with _checkpointer(alone=True) as reader:
                self.loaded = reader.restore(self.folder, args=args)
        return self.loaded[name]


def _checkpointer(alone: bool = False) -> ocp.Checkpointer:
    """One folder an array, uncompressed: weights hardly shrink, and a single array is found without a database.

    alone: this process works without the learner's others.
    """
    options = ocp.options.MultiprocessingOptions()
    if alone:
        options = ocp.options.MultiprocessingOptions(primary_host=jax.process_index(), active_processes={jax.process_index()})
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=False, multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


@contextlib.contextmanager
def _lap(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start


ATTEMPTS = 2  # loads of one version into one server before it is restarted
# Mean |log-prob difference| of two programs with the same weights. Measured, vLLM against this learner on a CPU: float32 1e-6,
# bfloat16 0.01 to 0.03; an accelerator may multiply float32 in lower precision.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a load is tried again; what failed, a cache reset or a busy server, needs time


class Publisher:
    """One fleet, fed from one learner. probe: int32[P], a text longer than a block of the engine's prefix cache."""

    def __init__(self, snapshots: Snapshots, learner: Learner, probe: Ids):
        self.snapshots, self.learner, self.probe = snapshots, learner, probe
        self.fleet: Fleet | None = None  # that of `confirm`
        self.tolerance = TOLERANCE[snapshots.dtype.name]
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
            raise PublishError(f"the weights of step {weights.version} do not reach the engine:\n{format_errors(errors)}")
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
        return Weights(folder, version, self.probe, logps[0], self.tolerance)

    def _write(self, policy: Any, version: int, attempt: int, seconds: dict[str, float]) -> pathlib.Path:
        return self.snapshots.write(policy, f"{version}.{attempt}" if attempt else str(version), seconds)

    def _deliver(self, version: int, policy: Any, logps: Callable[[], list[np.ndarray]], blocked: float) -> None:
        """In the background: writes, loads, proves; see the module's text. `blocked`: seconds that the learner waited."""
        fleet, start, seconds = self.fleet, time.perf_counter(), {"blocked": blocked}
        waiting, errors = fleet.replicas, {}
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(PAUSE * 2.0 ** (attempt - 1), LONGEST_PAUSE))
            weights = self._weights(version, self._write(policy, version, attempt, seconds), logps())
            errors = fleet.on_all(functools.partial(self._load, weights), waiting)
            waiting = list(errors)
            if not errors or any(isinstance(error, SnapshotRefused) and error.names for error in errors.values()):
                break  # other tensors than the model's: no repetition changes that
            log.warning("step %d, attempt %d of %d to load:\n%s", version, attempt + 1, ATTEMPTS, format_errors(errors))
        else:
            log.warning("step %d: restarting %s", version, ", ".join(replica.name for replica in waiting))
            restartable = [replica for replica in waiting if replica.ours]
            failed = fleet.on_all(functools.partial(self._restart, weights), restartable)
            errors = {replica: failed.get(replica, errors[replica]) for replica in waiting if not has(replica, weights)}
        if errors:
            before = "none" if fleet.weights is None else f"version {fleet.weights.version}"
            raise PublishError(
                f"the weights of step {version} were not proven to be in the engine (proven before: {before}); "
                f"no rollout may be sampled, the run stops. Its newest checkpoint resumes it:\n{format_errors(errors)}"
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
        self._acknowledged = [*self._acknowledged, weights][-KEPT_SNAPSHOTS:]
        self.snapshots.keep(kept.folder for kept in self._acknowledged)


def has(replica: Replica, weights: Weights) -> bool:
    return replica.proof is not None and replica.proof.weights is weights
