"""A run's folder: which of its steps is meant, who works in it, and whether a start can go on with what an earlier one left.

Only a folder that holds nothing of a run begins a new one. What is there and cannot be used is a finding, never "nothing there":
a disk that is not mounted, a copy that was cut short and files of another program all look alike from inside.
"""

import contextlib
import difflib
import errno
import fcntl
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepgrpo.config import CommandLine, run_folder, write_resolved
from deepgrpo.config.errors import Finding, remedy_of
from deepgrpo.config.folders import read_json, vocabulary_of_model
from deepgrpo.learner import distributed
from deepgrpo.model.config import ModelConfig
from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.telemetry.log import close_log, open_log
from deepgrpo.weights import files
from deepgrpo.weights.checkpoint import HOST, LABEL, MANIFEST, CheckpointError, Checkpoints, defect

MEMORY_FOLDER = pathlib.Path("/dev/shm")
KEPT_SNAPSHOTS = 1  # the newest that every server has acknowledged
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def room_problems(config: Any, on_cpu: bool) -> list[Finding]:
    """Folders and memory that are too small for the run. on_cpu: the learner's arrays are in the host's memory."""
    try:
        model = ModelConfig.from_hf(config.model.path)
    except (OSError, ValueError):
        return []  # the check of the model says what is wrong with it
    return disk_problems(config, model) + memory_problems(config, model, on_cpu)


#### Room on disks for checkpoints and snapshots, from the model's shapes


def checkpoint_bytes(config: Any, model: ModelConfig) -> int:
    """One checkpoint: float32 weights and moments, and the reference where there is one."""
    moments = 4 if config.objective.teacher_update == "post_ppo" else 2
    reference = BYTES[config.model.dtype] if config.objective.kl_coef and config.objective.kl_type != "off" else 0
    return model.num_parameters * (4 + 4 * moments + reference)


def snapshot_bytes(config: Any, model: ModelConfig) -> int:
    """All snapshots that exist at once: those kept, the newest, and its way through Orbax."""
    size = model.num_parameters * BYTES[config.model.dtype]
    return size * (KEPT_SNAPSHOTS + 1 + (config.weights.route == "orbax"))


def weights_root(config: Any) -> pathlib.Path:
    """The folder below which this run's servers may load snapshots from: weights.folder, else in memory, else in the run folder.

    It is a function of the configuration and of the machine, not of what is free at the moment: the trainer and the servers that
    it attaches to ask one after the other. Docker's memory folder has 64 MB unless told otherwise.
    """
    if config.weights.folder:
        return pathlib.Path(config.weights.folder).absolute()
    run_folder = pathlib.Path(config.run_dir, config.name, "weights").absolute()
    if not MEMORY_FOLDER.is_dir():
        return run_folder
    fits = shutil.disk_usage(MEMORY_FOLDER).total >= snapshot_bytes(config, ModelConfig.from_hf(config.model.path))
    return MEMORY_FOLDER / f"deepgrpo-{os.getuid()}-{config.name}" if fits else run_folder


def disk_problems(config: Any, model: ModelConfig) -> list[Finding]:
    run, keep = pathlib.Path(config.run_dir, config.name).absolute(), config.checkpoint
    one, count = checkpoint_bytes(config, model), keep.keep + 1 + bool(config.validation.every)
    there = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    text = f"{count} checkpoints of {spoken(one)} (one is written before another goes)"
    needs = [(run / "checkpoints", max(one, count * one - there), text)]
    found = []
    if config.rollout.engine == "vllm":
        snapshots, root = snapshot_bytes(config, model), weights_root(config)
        needs.append((root, snapshots, f"snapshots of the weights for vLLM, {spoken(snapshots)}"))
        if not config.weights.folder and MEMORY_FOLDER.is_dir() and not root.is_relative_to(MEMORY_FOLDER):
            size = spoken(shutil.disk_usage(MEMORY_FOLDER).total)
            what = f"weights: snapshots need {spoken(snapshots)} and {MEMORY_FOLDER} has {size} in all, so they go to {root}"
            remedy = f"for faster ones: docker run --shm-size={snapshots // 10**9 + 1}g, or --config.weights.folder=A FAST FOLDER"
            found.append(Finding(what, remedy, fatal=False))
    disks: dict[int, list[tuple[pathlib.Path, int, str]]] = {}
    for need in needs:
        disks.setdefault(device_of(need[0]), []).append(need)
    for parts in disks.values():
        need, free = sum(size for _, size, _ in parts), shutil.disk_usage(existing(parts[0][0])).free
        if free < need:
            listed = "; ".join(f"{text} in {path}" for path, _, text in parts)
            what = f"run folder: {spoken(need)} more are needed on a disk that has {spoken(free)} free: {listed}"
            remedy = "make room there, set --config.run_dir or --config.weights.folder to another disk, or keep less:"
            found.append(Finding(what, f"{remedy} --config.checkpoint.keep=1"))
    return found


def existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def device_of(path: pathlib.Path) -> int:
    """Number of the disk that a path is or will be on."""
    return existing(path).stat().st_dev


#### Room in memory


def memory_problems(config: Any, model: ModelConfig, on_cpu: bool) -> list[Finding]:
    """On a CPU weights, moments and gradients are in the host's memory all the time; elsewhere a checkpoint passes through it."""
    total, free = host_memory()
    if on_cpu:
        need, what = checkpoint_bytes(config, model) + 4 * model.num_parameters, "weights, moments and gradients"
    else:
        need, what = checkpoint_bytes(config, model) // config.learner.process[1], "a checkpoint on its way to the disk"
    if need <= free:
        return []
    text = f"memory: {what} of {model.num_parameters / 1e6:,.0f} million parameters need {spoken(need)} of the host's memory"
    remedy = "end other programs, use a machine with more memory, or a smaller model"
    return [Finding(f"{text}, and {spoken(free)} of {spoken(total)} are free", remedy, fatal=on_cpu and need > total)]


def host_memory(root: pathlib.Path = pathlib.Path("/")) -> tuple[int, int]:
    """(all, free) bytes that this process may have: the machine's, or its container's limit."""
    lines = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in lines}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, used = root / "sys/fs/cgroup" / limit, root / "sys/fs/cgroup" / used
        if limit.is_file() and (text := limit.read_text().strip()) != "max" and int(text) < total:
            total = int(text)
            free = min(free, total - int(used.read_text()))
    return total, free


def spoken(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 5e6 else f"{size / 1e6:,.2f} MB"


LOCK, LATEST, BEST, RECORD = "lock", "latest", "best_checkpoint.json", "config.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems that have none
log = logging.getLogger(__name__)
UNREAD = "copy the folder again, or mount its disk; a new run: another --config.name"


def begin(
    config: Any,
    line: CommandLine,
    stack: contextlib.ExitStack,
    write: bool,
    devices: Sequence[str],
    check_inputs: Callable[..., list[str]],
) -> tuple[Checkpoints, int | None]:
    """Takes the run's folder for this process until `stack` closes, checks the inputs, and opens record and log.

    Args:
      write: this is process 0; the learner's others only look which step is resumed. devices: names of the accelerators.
      check_inputs: preflight's, which lies above this room.

    Returns:
      (the run's checkpoints, the step to resume from or None for a new run).

    Raises:
      ConfigError: the run cannot start.
    """
    run, keep = run_folder(config), config.checkpoint
    label = "" if config.data.selection else LABEL
    checkpoints = Checkpoints(run / "checkpoints", keep.keep, keep.best_metric, best_label=label)
    resumed, found = taken(config, checkpoints, stack) if write else (checkpoints.latest_step(), [])
    warnings = check_inputs(config, resumed is not None, found)
    distributed.require_agreement(resumed, f"newest checkpoint in {run}")
    if write:
        notes = write_resolved(config, line, resumed is not None, devices)
        stack.callback(close_log, open_log(run))
        warnings += [f"changed since the run began: {note}" for note in notes]
    for text in warnings:
        log.warning("%s", text)
    return checkpoints, resumed


def taken(config: Any, checkpoints: Checkpoints, stack: contextlib.ExitStack) -> tuple[int | None, list[Finding]]:
    """(step to resume from, what is wrong with the folder), once this process holds it."""
    run = checkpoints.folder.parent
    try:
        unlocked = stack.enter_context(held(run))
        files.sweep(run)
        step, found = survey(config, checkpoints)
        return step, found + unlocked
    except InUse as error:
        return None, [Finding(f"run folder: {error}", "wait for it, or stop it; to train beside it: another --config.name")]
    except OSError as error:
        return None, [Finding(f"run folder: {error.filename or run}: {error.strerror}", remedy_of(error) or UNREAD)]


#### One process at a time


class InUse(RuntimeError):
    """Another process works in the folder; the message says which."""


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[list[Finding]]:
    """Makes the folder and holds its lock; the system gives it back when the process ends, however that happens.

    Yields:
      A warning where the file system has no locks.

    Raises:
      InUse: another process holds it.
      OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # whoever may read it may not be allowed to write it
        pass
    found = []
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(f"{folder} is in use by {file.read(500).strip() or 'another process'}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            what = f"run folder: {folder}: its file system has no locks ({error.strerror})"
            found.append(Finding(what, "see to it that no second training writes there", False))
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield found


#### What is there


def survey(config: Any, checkpoints: Checkpoints) -> tuple[int | None, list[Finding]]:
    """(newest step that can be resumed from, what is wrong with the folder)."""
    run = checkpoints.folder.parent
    if found := misplaced(run, checkpoints.folder):
        return None, found
    step, defects = checkpoints.survey()
    listed = "; ".join(f"step {number}: {problem}" for number, problem in defects.items())
    if step is None:
        return None, leftovers(run, checkpoints, listed)
    found = [] if not listed else [Finding(f"run folder: {run}: {listed}", f"nothing: the run goes on after step {step}", False)]
    pointed = newest_of_pointer(run)
    if pointed is not None and pointed > step and pointed not in defects:
        what = f"run folder: {run / LATEST} names step {pointed}, which is not in {checkpoints.folder}"
        found.append(Finding(what, f"if it should be, copy it there first: the run goes on after step {step}", False))
    known = read_json(checkpoints.folder / str(step) / HOST).get("metrics")
    beside = {RECORD: record_defect(run / RECORD), metrics_lib.FILE: metrics_defect(run / metrics_lib.FILE, step, known)}
    accepted = config.checkpoint.accept_changes
    lost = {name: problem for name, problem in beside.items() if problem and name not in accepted}
    for name, problem in lost.items():
        go_on = f"move it away and add --config.checkpoint.accept_changes={','.join([*accepted, *lost])}"
        what = f"run folder: {run / name} {problem}, and checkpoint {step} is of a run that had it whole"
        found.append(Finding(what, f"copy it back; to go on without it (nothing is then compared with it), {go_on}"))
    return step, found


def misplaced(run: pathlib.Path, checkpoints: pathlib.Path) -> list[Finding]:
    """Names of a run's files that something else bears: a folder, a link to nowhere, a file of another user."""
    found = []
    for path in [*(run / name for name in (RECORD, LATEST, BEST, metrics_lib.FILE, "log.txt")), checkpoints]:
        is_right = path.is_dir if path == checkpoints else path.is_file
        if not os.path.lexists(path):
            continue
        if not path.exists():
            what, remedy = f"{path} is a link to {os.readlink(path)}, which is not there", "mount that disk, or remove the link"
        elif not is_right():
            what, remedy = f"{path} is {'a file' if path.is_file() else 'no regular file'}", "move it away"
        elif not os.access(path, os.W_OK | (os.X_OK if path == checkpoints else 0)):
            what, remedy = f"{path}: Permission denied", remedy_of(PermissionError(errno.EACCES, ""))
        else:
            continue
        found.append(Finding(f"run folder: {what}", remedy))
    return found


def leftovers(run: pathlib.Path, checkpoints: Checkpoints, defects: str) -> list[Finding]:
    """What an earlier start has left in a folder without a checkpoint that can be used.

    A run that ended before its first save begins again: it has neither a checkpoint nor a pointer to one, and its metrics, which
    are set aside, end before the step that it would have saved.
    """
    fresh = f"choose another --config.name; to begin again at step 0 in this folder, empty it: mv {run} {run}.old"
    if defects:
        what = f"run folder: {run} has no checkpoint that can be resumed from: {defects}"
        return [Finding(what, f"copy a good one there, or {fresh}")]
    if pointers := [name for name in (LATEST, BEST) if (run / name).is_file()]:
        place = checkpoints.folder if checkpoints.folder.is_dir() else f"{checkpoints.folder}, which does not exist"
        what = f"run folder: {pointers[0]} in {run} says that checkpoints were saved, and none is in {place}"
        return [Finding(what, f"mount its disk, or copy the checkpoints there; or {fresh}")]
    record, metrics = run / RECORD, run / metrics_lib.FILE
    try:
        last = metrics_lib.last_record(metrics)
        if last is None and not record.exists():
            return []
        if record.exists() and (problem := record_defect(record)):
            raise ValueError(f"{record} {problem}")
        if last is None:
            return []
        if not record.exists():
            raise ValueError(f"{metrics} holds steps up to {last['step']}, and {RECORD} is missing")
    except ValueError as error:
        return [Finding(f"run folder: {run} holds files that no run can go on from: {error}", fresh)]
    keys = read_json(record)["config"]
    every, steps, tokens = (keys.get(key, 0) for key in ("checkpoint.every", "train.steps", "train.student_tokens"))
    ended = steps and last["step"] >= steps or tokens and last.get("training/student_tokens", 0) >= tokens
    tried = checkpoints.folder.is_dir()  # the first save makes it; one that failed leaves it empty
    if (every and last["step"] >= every + tried) or (ended and not tried):
        what = f"run folder: {metrics} holds steps up to {last['step']}, so checkpoints were saved, and there is none"
        return [Finding(what, f"copy {checkpoints.folder} there, or {fresh}")]
    what = f"run folder: an earlier start ended after step {last['step']} without a checkpoint"
    return [Finding(what, "nothing: the run begins again, and those metrics are set aside", False)]


def newest_of_pointer(run: pathlib.Path) -> int | None:
    """The step that `latest` names; None if it names none. It is for people: nothing depends on it."""
    try:
        return int((run / LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def record_defect(path: pathlib.Path) -> str:
    """What is wrong with a run's config.json, to follow its name; "" if nothing is."""
    if not path.exists():
        return "is missing"
    try:
        record = read_json(path)
    except ValueError as error:
        return f"is damaged ({error})"
    shapes = {"config": dict, "versions": dict, "restarts": list}
    absent = [name for name, kind in shapes.items() if not isinstance(record, dict) or not isinstance(record.get(name), kind)]
    return f"is no record of a run: it lacks {', '.join(absent)}" if absent else ""


def metrics_defect(path: pathlib.Path, step: int, known: Any) -> str:
    """What is wrong with the metrics of a run that is resumed after `step`, to follow their name; "" if nothing is.

    known: what `Metrics.sync` said when the step was saved; None for a checkpoint of an older version.
    """
    if not path.exists():
        return "is missing"
    try:
        kept, last = metrics_lib.kept_until(path, step)
    except ValueError as error:
        return f"is damaged ({error})"
    if last != step:
        return f"ends at step {last}" if last >= 0 else "holds no step"
    with open(path, "rb") as file:
        if known and hashlib.sha256(file.read(kept)).hexdigest() != known["sha256"]:
            return "is another run's, or was edited"
    return ""


#### A run from outside: which step, which model it started from, how it was selected

EXPECTED = f"expected a run's folder (with checkpoints/<step>/{MANIFEST}) or one of its steps (with {MANIFEST})"


def step_folder(checkpoint: pathlib.Path, best: bool) -> pathlib.Path:
    """The folder of one complete step that `checkpoint`, a run or a step, stands for."""
    if not checkpoint.is_dir():
        near = difflib.get_close_matches(checkpoint.name, names(checkpoint.parent), n=1)
        hint = f"did you mean {checkpoint.parent / near[0]}? " if near else ""
        raise CheckpointError(f"{checkpoint}: no such folder; {hint}{EXPECTED[0].upper()}{EXPECTED[1:]}")
    if (checkpoint / MANIFEST).is_file():
        if best:
            raise CheckpointError(f"{checkpoint} is one step already; --best needs the run's folder")
        folder = checkpoint.absolute()
    else:
        steps = checkpoint.absolute() / "checkpoints"
        step = best_step(checkpoint) if best else Checkpoints(steps, keep=1).latest_step()
        if step is None:
            raise CheckpointError(f"{checkpoint}: no complete checkpoint; {EXPECTED}, found {contents(checkpoint)}")
        folder = steps / str(step)
    if problem := defect(folder, hashes=True):
        raise CheckpointError(f"{folder}: cannot be used: {problem}")
    return folder


def names(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def contents(folder: pathlib.Path) -> str:
    """What is in it, for messages."""
    found = names(folder)
    return ", ".join(found[:12]) + (", ..." if len(found) > 12 else "") or "nothing"


def best_step(run: pathlib.Path) -> int:
    path = run / "best_checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not found, no validation has competed in this run. Leave out --best for the newest checkpoint"
        )
    step = read_json(path)
    if not isinstance(step, dict) or not isinstance(step.get("step"), int):
        raise CheckpointError(f"{path} names no step: it is damaged. Leave out --best, or name the step's folder")
    return step["step"]


def record_of(folder: pathlib.Path) -> dict[str, Any]:
    """What the run of this step folder wrote down: `config` by dotted key, the time when it `started`, ..."""
    record = folder.parent.parent / "config.json"
    if not record.is_file():
        raise FileNotFoundError(
            f"{record}: not found, so the model the run started from is unknown: name its folder with --model"
        )
    found = read_json(record)
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise CheckpointError(f"{record} is no record of a run: name the model's folder with --model")
    return found


def starting_model(folder: pathlib.Path) -> pathlib.Path:
    """The Hugging Face folder that the run of this step folder started from, by the run's own record."""
    model = pathlib.Path(record_of(folder)["config"]["model.path"])
    if not model.is_dir():
        raise FileNotFoundError(
            f"{model}, where {folder.parent.parent} says the run started from, is not there: name its folder with --model"
        )
    return model


def require_vocabulary(folder: pathlib.Path, model: pathlib.Path) -> None:
    """Raises CheckpointError if `model` is known to number tokens otherwise than the model that this step's run started from."""
    try:
        before = starting_model(folder)
    except FileNotFoundError:
        return  # nothing to compare with: the shapes of the arrays have to tell
    theirs, given = vocabulary_of_model(before), vocabulary_of_model(model)
    if theirs and given and theirs.sha256 != given.sha256:
        raise CheckpointError(
            f"--model={model}: its tokenizer has another vocabulary than {before}, which the run of {folder} started from. "
            "Leave out --model, or name a copy of that model"
        )


def selected_on(folder: pathlib.Path) -> list[str]:
    """Data sets that this step was chosen on as the run's best; none if it is not the best.

    A step that is the best and the newest counts as chosen: whoever looks at it may have looked because of its score.
    """
    path = folder.parent.parent / "best_checkpoint.json"
    if not path.is_file() or best_step(path.parent) != int(folder.name):
        return []
    try:
        config = record_of(folder)["config"]
    except FileNotFoundError:
        return ["unknown: the run's record is gone"]
    return list(config.get("data.selection") or config["data.validation"])
