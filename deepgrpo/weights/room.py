"""Room for what a run writes and holds, from the model's shapes, before anything is loaded: checkpoints, snapshots, memory."""

import os
import pathlib
import shutil
from typing import Any

from deepgrpo.config.errors import Finding
from deepgrpo.model.config import ModelConfig

MEMORY_FOLDER = pathlib.Path("/dev/shm")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def room_problems(config: Any, on_cpu: bool) -> list[Finding]:
    """Folders and memory that are too small for the run. on_cpu: the learner's arrays are in the host's memory."""
    try:
        model = ModelConfig.from_hf(config.model.path)
    except (OSError, ValueError):
        return []  # the check of the model says what is wrong with it
    return disk_problems(config, model) + memory_problems(config, model, on_cpu)


#### Disks


def checkpoint_bytes(config: Any, model: ModelConfig) -> int:
    """One checkpoint: float32 weights and moments, and the reference where there is one."""
    moments = 4 if config.objective.teacher_update == "post_ppo" else 2
    reference = BYTES[config.model.dtype] if config.objective.kl_coef and config.objective.kl_type != "off" else 0
    return model.num_parameters * (4 + 4 * moments + reference)


def snapshot_bytes(config: Any, model: ModelConfig) -> int:
    """All snapshots that exist at once: those kept, the newest, and its way through Orbax."""
    size = model.num_parameters * BYTES[config.vllm.dtype or config.model.dtype]
    return size * (config.weights.keep + 1 + (config.weights.route == "orbax"))


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
    one, count = checkpoint_bytes(config, model), keep.keep + 1 + bool(keep.save_best and config.validation.every)
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
            found.append(Finding(what, f"{remedy} --config.checkpoint.keep=1 --config.checkpoint.save_best=false"))
    return found


def existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def device_of(path: pathlib.Path) -> int:
    """Number of the disk that a path is or will be on."""
    return existing(path).stat().st_dev


#### Memory


def memory_problems(config: Any, model: ModelConfig, on_cpu: bool) -> list[Finding]:
    """On a CPU weights, moments and gradients are in the host's memory all the time; elsewhere a checkpoint passes through it."""
    total, free = host_memory()
    if on_cpu:
        need, what = checkpoint_bytes(config, model) + 4 * model.num_parameters, "weights, moments and gradients"
    else:
        need, what = checkpoint_bytes(config, model) // config.learner.num_processes, "a checkpoint on its way to the disk"
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
