"""Checkpoints: everything that a run resumes from, in one folder a step, that appears in one rename.

    <run>/checkpoints/<step>/  arrays/        parameters and optimizer, by Orbax, under flat names such as params.norm.scale
                               host.json      counters, data cursor and the like
                               <name>/        what each writer put there (curriculum, ...)
                               manifest.json  written last: format, names of arrays, size and sha256 of every other file
    <run>/latest               newest committed step; for people and scripts, never trusted
    <run>/best_checkpoint.json the best validation so far: step, score, metric

Order of a save: temporary folder, content, fsync, manifest, fsync, rename, `latest`, `best_checkpoint.json`, retention. So
whatever kills the process, a complete folder is on disk, and completeness is a matter of the folder's own content: a copy made by
hand is as good as the original, and a half-made copy is recognised. Nothing is pickled.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from deepgrpo.config.errors import remedy_of
from deepgrpo.weights import files

log = logging.getLogger(__name__)


#### The best checkpoint

# The best of many checkpoints looks better on the set that it was chosen on than it is. So a run may name sets that do nothing
# but choose (`data.selection`, metrics below `selection/`); without them the validation sets choose, and the choice is
# labelled.

CORE = "val-core/"
SELECTION = "selection/"  # before the metrics of sets that are not reported
LABEL = "selected on a reported set"


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far. label: what a reader of the score has to know."""

    step: int
    score: float
    metric: str
    label: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "label" or value}


def deciding_metric(metrics: Mapping[str, float], configured: str) -> str:
    """The key of the metric that decides.

    Without a configured key: among the averages over sources (`val-core/avg/...`) if there are any, else among all of
    `val-core/...`, the only one, or the only one whose last component is a mean over answers (`mean@N`). Where there are
    metrics of sets that do nothing but choose (`selection/val-core/...`), these alone are looked at, in the same way.

    Raises:
      LookupError: the configured key is absent, or none or several qualify; says which.
    """
    core = [key for key in metrics if key.startswith(SELECTION + CORE)] or [key for key in metrics if key.startswith(CORE)]
    core = sorted(core)
    if configured:
        if configured not in metrics:
            raise LookupError(f"checkpoint.best_metric {configured!r} is not among {', '.join(core) or 'the metrics'}")
        return configured
    candidates = [key for key in core if key.removeprefix(SELECTION).startswith(f"{CORE}avg/")] or core
    means = [key for key in candidates if key.rpartition("/")[2].startswith("mean@")]
    for chosen in (candidates, means):
        if len(chosen) == 1:
            return chosen[0]
    found = ", ".join(means or candidates) or "no val-core metric"
    raise LookupError(f"found {found}, expected one metric that decides: set checkpoint.best_metric")


def better(metrics: Mapping[str, float], step: int, best: Best | None, configured: str, label: str = "") -> Best | None:
    """The new best, or None if this validation does not beat `best` (strictly). label: see `Best`.

    Raises:
      LookupError: as `deciding_metric`, or its value is not a number.
    """
    metric = deciding_metric(metrics, configured)
    score = float(metrics[metric])
    if math.isnan(score):
        raise LookupError(f"{metric} is NaN, expected a number")
    return Best(step, score, metric, label) if best is None or score > best.score else None


FORMAT = 1
ARRAYS, HOST, MANIFEST = "arrays", "host.json", "manifest.json"
CRASH_POINTS = ("after_open", "mid_write", "before_rename", "after_rename", "after_pointer")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the path and what to do."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: str | os.PathLike, keep: int, best_metric: str = "", best_label: str = ""):
        """Touches nothing on disk.

        Args:
          folder: of the step folders; `latest` and `best_checkpoint.json` lie beside it.
          keep: newest complete checkpoints that are kept, besides the best; >= 1.
          best_metric: key of the metric that decides; "" for the average over sources (`deciding_metric`). best_label: written to
            `best_checkpoint.json` with each best, for its readers.
        """
        self.folder = pathlib.Path(folder).absolute()
        self.keep, self.best_metric, self.best_label = keep, best_metric, best_label
        self.best: Best | None = None
        self._ours: set[int] = set()  # steps that this object has saved or restored, so what is on disk is this run's
        self._verified: set[int] = set()  # steps whose bytes this object has compared with their manifest

    def note_validation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Returns True if this is the best validation so far; the caller must then `save` this step.

        Validations before the first step do not compete. Without a metric that decides there is a warning and no change.
        """
        if step == 0 or not any(key.startswith(("val-", SELECTION)) for key in metrics):
            return False
        try:
            best = better(metrics, step, self.best, self.best_metric, self.best_label)
        except LookupError as error:
            log.warning("step %d does not compete for the best checkpoint: %s", step, error)
            return False
        self.best = best or self.best
        return best is not None

    #### writing

    def save(
        self,
        step: int,
        arrays: Any,
        host: Mapping[str, Any],
        writers: Mapping[str, Callable[[pathlib.Path], None]] | None = None,
    ) -> float:
        """Writes a checkpoint and returns once it is durable; in a multi-process run every process calls this.

        Args:
          arrays: a tree of arrays, sharded or not; numbers are kept to the bit.
          host: JSON-able state.
          writers: each is called with an empty folder of its name, which it fills.

        Returns:
          Seconds that the caller was blocked; 0 if this object has saved (or was resumed from) this step already.

        Raises:
          CheckpointError: nothing was committed; the older checkpoints are as they were.
        """
        if step in self._ours:
            return 0.0
        start = time.monotonic()
        named = named_leaves(arrays)
        temporary, target = self.folder / f".tmp-{step}", self.folder / str(step)
        primary = jax.process_index() == 0
        try:
            if primary:
                self._sweep()
                temporary.mkdir(parents=True)
                _crash_point("after_open", step)
            _barrier(f"checkpoint {step} opened")
            _write_arrays(temporary / ARRAYS, named)
            if primary:
                _crash_point("mid_write", step)
                _write_host(temporary, host, writers or {})
                _seal(temporary, step, named, self.best)
                _crash_point("before_rename", step)
                self._commit(temporary, target)
        except BaseException as error:
            if primary:
                shutil.rmtree(temporary, ignore_errors=True)  # the error that is on its way out matters more
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            raise self._failed(step, named, error) from error
        self._ours.add(step)
        self._verified.add(step)
        if primary:
            _crash_point("after_rename", step)
            try:
                self._point(step)
                _crash_point("after_pointer", step)
                self._retain(step)
            except OSError as error:
                raise CheckpointError(
                    f"{target} is complete, but the files around it could not be brought up to date: {error}"
                ) from error
        _barrier(f"checkpoint {step} committed")
        return time.monotonic() - start

    def _commit(self, temporary: pathlib.Path, target: pathlib.Path) -> None:
        if target.exists():  # torn, or left by a branch of the run that was given up: the run was not resumed from it
            log.warning("%s is replaced: it is not part of this run", target)
            os.rename(target, self.folder / f".old-{target.name}")
        os.rename(temporary, target)
        files.sync(self.folder)

    def _point(self, step: int) -> None:
        files.replace_text(self.folder.parent / "latest", f"{step}\n")
        best = self.folder.parent / "best_checkpoint.json"
        if self.best is None:
            best.unlink(missing_ok=True)
        else:
            files.replace_text(best, json.dumps(self.best.as_json()) + "\n")

    def _retain(self, step: int) -> None:
        """Of the complete checkpoints up to `step`, keeps the newest `keep` and the best."""
        complete = [s for s in self.steps() if s <= step and defect(self.folder / str(s), hashes=False) is None]
        kept = set(complete[-self.keep :]) | ({self.best.step} if self.best else set())
        for old in set(complete) - kept:
            os.rename(self.folder / str(old), self.folder / f".old-{old}")  # a half-removed folder must not bear a step's name
            self._ours.discard(old)
        self._sweep()

    def _sweep(self) -> None:
        """Removes what a killed save or a retention has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in [*self.folder.glob(".tmp-*"), *self.folder.glob(".old-*")]:
            shutil.rmtree(path)

    def _failed(self, step: int, named: Mapping[str, Any], error: Exception) -> CheckpointError:
        needed = sum(leaf.nbytes for leaf in named.values())
        free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.exists())).free
        advice = remedy_of(error) or "make room (or lower checkpoint.keep, or move config.run_dir to a larger disk)"
        return CheckpointError(
            f"{self.folder / str(step)}: the checkpoint could not be written ({type(error).__name__}: {error}). Its arrays take "
            f"{needed:,} bytes, {free:,} are free there. The older checkpoints are untouched: {advice} and start the same"
            " command again"
        )

    #### reading

    def steps(self) -> list[int]:
        """Steps that have a folder, complete or not, in order."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def latest_step(self) -> int | None:
        """The newest step whose folder is complete and undamaged; folders that are not are named in a warning and passed over."""
        step, defects = self.survey()
        for passed, problem in defects.items():
            log.warning("%s is passed over: %s", self.folder / str(passed), problem)
        return step

    def survey(self) -> tuple[int | None, dict[int, str]]:
        """(newest step whose folder is complete and undamaged, what is wrong with each newer one).

        Raises:
          OSError: a folder cannot be read, so that nobody knows.
        """
        defects = {}
        for step in reversed(self.steps()):
            problem = defect(self.folder / str(step), hashes=True)
            if problem is None:
                self._verified.add(step)
                return step, defects
            defects[step] = problem
        return None, defects

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any], pathlib.Path]:
        """Reads a checkpoint, laid out for the mesh at hand, whatever mesh wrote it.

        Args:
          abstract: a tree of `jax.ShapeDtypeStruct` (or arrays) like the one saved; their shardings decide where data goes,
            without one it goes to the default device.

        Returns:
          (arrays like `abstract`, host state, the checkpoint's folder, whose sub-folders the writers made).

        Raises:
          CheckpointError: damaged, of another format, or its arrays do not fit `abstract`; every such array is listed.
        """
        folder = self.folder / str(step)
        if problem := defect(folder, hashes=step not in self._verified):
            raise CheckpointError(f"{folder}: cannot be resumed from: {problem}")
        arrays = read_arrays(folder, abstract)
        best = _manifest(folder)["best"]
        self.best = Best(**best) if best is not None else None
        self._ours = {step}
        if jax.process_index() == 0:
            self._point(step)
        return arrays, json.loads((folder / HOST).read_text(encoding="utf-8")), folder


def read_arrays(folder: pathlib.Path, abstract: Any, prefix: str = "") -> Any:
    """The arrays of one checkpoint folder, as `Checkpoints.restore` returns them; of those below `prefix` ("params.") only."""
    wanted = {prefix + name: leaf for name, leaf in named_leaves(abstract).items()}
    saved = {name: spec for name, spec in _manifest(folder)["arrays"].items() if name.startswith(prefix)}
    problems = [f"{name}: not in the checkpoint, expected {_spec(leaf)}" for name, leaf in wanted.items() if name not in saved]
    problems += [f"{name}: found {saved[name]}, expected no such array" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        if saved[name] != _spec(wanted[name]):
            problems.append(f"{name}: found {saved[name]}, expected {_spec(wanted[name])}")
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise CheckpointError(f"{folder}: its arrays are not those of this model and optimizer:\n  {listed}")
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default)
        for name, leaf in wanted.items()
    }
    restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
    with _checkpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(item=targets, restore_args=restore_args, partial_restore=True)
        arrays = checkpointer.restore(folder / ARRAYS, args=args)
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by a flat name, such as `params.layers.mlp.up_proj.kernel`, in the tree's order."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name} is a {dtype or type(leaf).__name__}, expected a numeric array (jax.random.key_data for a key)"
            )
        named[name] = leaf
    return named


def defect(folder: pathlib.Path, hashes: bool) -> str | None:
    """Why the folder is not a complete checkpoint; None if it is. With `hashes`, every byte is read and compared."""
    try:
        manifest = _manifest(folder)
    except CheckpointError as error:
        return str(error)
    if folder.name != str(manifest["step"]):
        return f"it holds step {manifest['step']}, expected a folder of that name"
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has {path.stat().st_size:,} bytes, expected {entry['size']:,}"
    if hashes:
        found = _hashes(folder, manifest["files"])
        for name, entry in manifest["files"].items():
            if found[name] != entry["sha256"]:
                return f"{name} is damaged: sha256 {found[name]}, expected {entry['sha256']}"
    return None


def _manifest(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the folder was never completed, or is not a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{path} is no manifest of a checkpoint")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is of format {manifest['format']}, expected {FORMAT}: use the version of deepgrpo that wrote it"
        )
    try:
        best, names = manifest["best"], [*manifest["files"], *manifest["arrays"]]
        whole = int(manifest["step"]) >= 0 and HOST in names and any(name.startswith(f"{ARRAYS}/") for name in names)
        whole &= all(entry["size"] + 0 >= 0 and entry["sha256"] + "" for entry in manifest["files"].values())
        whole &= best is None or bool(Best(**best))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} lacks parts, or has others than were written ({type(error).__name__}: {error})") from error
    if not whole:
        raise CheckpointError(f"{path} lacks parts: {HOST} and {ARRAYS} are in every checkpoint")
    return manifest


def _spec(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name}


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_compression=False)
    )  # float32 weights shrink by 8 %, not worth the time


def _write_arrays(folder: pathlib.Path, named: Mapping[str, Any]) -> None:
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(named)))


def _write_host(folder: pathlib.Path, host: Mapping[str, Any], writers: Mapping[str, Callable[[pathlib.Path], None]]) -> None:
    _require_json(host, "host")
    (folder / HOST).write_text(json.dumps(host), encoding="utf-8")
    for name, write in writers.items():
        (folder / name).mkdir()
        write(folder / name)


def _require_json(value: Any, where: str) -> None:
    """Raises TypeError, naming the place, for what JSON would refuse or would silently give back as something else."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, expected text")
            _require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _require_json(item, f"{where}[{i}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise TypeError(f"{where} is a {type(value).__name__}, expected JSON: text, number, list, mapping or null")


def _seal(folder: pathlib.Path, step: int, named: Mapping[str, Any], best: Best | None) -> None:
    """Makes the content durable, then writes the manifest that declares it complete."""
    files.sync_tree(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    hashes = _hashes(folder, names)
    manifest = {
        "format": FORMAT,
        "step": step,
        "best": None if best is None else best.as_json(),
        "arrays": {name: _spec(leaf) for name, leaf in named.items()},
        "files": {name: {"size": path.stat().st_size, "sha256": hashes[name]} for name, path in zip(names, paths, strict=True)},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    files.sync(folder / MANIFEST)
    files.sync(folder)


def _hashes(folder: pathlib.Path, names: Any) -> dict[str, str]:
    def one(name: str) -> str:
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter lock
        return dict(zip(names, pool.map(one, names), strict=True))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _crash_point(name: str, step: int) -> None:
    """For tests only: kills the process here if DEEPGRPO_CRASH_AT is this point's name, or `<name>@<step>` of this step."""
    if os.environ.get("DEEPGRPO_CRASH_AT") in (name, f"{name}@{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
