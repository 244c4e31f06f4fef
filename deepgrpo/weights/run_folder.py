"""A run's folder before the run: who works in it, what an earlier start has left there, and whether that can be gone on with.

Only a folder that holds nothing of a run begins a new one. What is there and cannot be used is a finding, never "nothing there":
a disk that is not mounted, a copy that was cut short and files of another program all look alike from inside.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepgrpo.config import CommandLine, run_folder, write_resolved
from deepgrpo.config.errors import Finding, remedy_of
from deepgrpo.config.forest_folder import read_json
from deepgrpo.learner import distributed
from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.telemetry.log import close_log, open_log
from deepgrpo.weights import files
from deepgrpo.weights.best import LABEL
from deepgrpo.weights.checkpoint import HOST, Checkpoints

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
    checkpoints = Checkpoints(run / "checkpoints", keep.keep, keep.save_best, keep.best_metric, best_label=label)
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
