"""The record of a run: `<run>/config.json` with the configuration, versions, source state and machine; compared on resume."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from deepgrpo.config.errors import ConfigError
from deepgrpo.config.flags import ROOT, CommandLine, flatten
from deepgrpo.config.forest_folder import read_json, vocabulary_of_model

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "safetensors", "transformers", "tokenizers"),
    *("ml-collections", "openai", "httpx", "math-verify", "pyarrow"),
)

# Keys (or sections, by their dot) that may differ between a run and its resumption: they do not reach the parameters.
HARMLESS = (
    *("run_dir", "compilation_cache", "requires_accelerator", "model.origin"),
    *("data.origin", "data.validation", "data.validation_limit", "data.selection"),
    *("train.epochs", "train.steps", "train.student_tokens", "rewards.workers", "rewards.deadline"),
    *("curriculum.start_from"),
    *(
        "teacher.base_url",
        "teacher.api_key_env",
        "teacher.timeout",
    ),
    *("teacher.max_concurrent", "teacher.replay", "teacher.token_budget", "teacher.money_budget"),
    *(
        "teacher.prompt_price",
        "teacher.completion_price",
    ),
    *(
        "judge.base_url",
        "judge.api_key_env",
        "judge.timeout",
        "judge.max_concurrent",
    ),
    *("judge.replay", "judge.token_budget", "judge.money_budget", "judge.prompt_price", "judge.completion_price"),
    "sandbox.allow_network",
    *("vllm.python", "vllm.servers", "vllm.attach", "vllm.token_env", "vllm.tensor_parallel", "vllm.gpu_ids", "vllm.block_size"),
    *("vllm.gpu_memory_utilization", "vllm.max_num_seqs", "vllm.max_concurrent", "vllm.request_deadline", "vllm.self_test"),
    *("vllm.control_deadline", "vllm.load_deadline", "vllm.start_deadline", "rollout.mismatch_alert", "weights."),
    *(
        "learner.coordinator",
        "learner.num_processes",
        "learner.process_id",
    ),
    *("validation.", "evaluation.", "checkpoint.", "telemetry.", "diagnostics."),
)
LENGTH = ("train.epochs", "train.steps")  # not harmless when the learning rate depends on the run's length
RESTARTS_KEPT = 100


def run_folder(config: config_dict.ConfigDict) -> pathlib.Path:
    return pathlib.Path(config.run_dir) / config.name


def write_resolved(config: config_dict.ConfigDict, line: CommandLine, resuming: bool, devices: Sequence[str]) -> list[str]:
    """Writes `<run>/config.json`; returns what differs from the run that is resumed, a line each, for the log.

    resuming: the run folder has a checkpoint that will be loaded. devices: names of the accelerators, one each.

    Raises:
      ConfigError: the folder is in use and checkpoint.resume is "never", or the resumed run has another value of a key that
        would make it a different run.
    """
    path, accepted = run_folder(config) / "config.json", config.checkpoint.accept_changes
    record = {
        "config": json.loads(json.dumps(flatten(config))),  # tuples become lists, as they will when read back
        "command_line": list(line.argv),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "git": git_state(),
        "vocabulary": vocabulary.sha256 if (vocabulary := vocabulary_of_model(config.model.path)) else None,
        "host": {"name": platform.node(), "system": platform.platform(), "cpus": os.cpu_count(), "devices": list(devices)},
    }
    if path.exists() and config.checkpoint.resume == "never":
        raise ConfigError(f"{path.parent} holds a run already and checkpoint.resume is never: choose another --config.name")
    notes = []
    record["restarts"] = []
    if path.exists() and resuming:
        before = read_json(path)
        if (was := before.get("vocabulary")) != record["vocabulary"] and was and "vocabulary" not in accepted:
            raise ConfigError(
                f"run folder: the tokenizer in {config.model.path} numbers its tokens otherwise than when {path.parent} began,"
                " whose states and rollouts are of those numbers -> copy that tokenizer back, or choose another --config.name"
            )
        notes = differences(before, record, config)
        this = {key: record[key] for key in ("command_line", "started", "versions", "git", "host")} | {"changed": notes}
        record = before | {"config": record["config"], "restarts": [*before["restarts"], this][-RESTARTS_KEPT:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return notes


def began(config: config_dict.ConfigDict) -> str:
    """ISO time of the run's first start, from its record: what its prompts' chat template is told the date is, however often it
    is resumed."""
    return json.loads((run_folder(config) / "config.json").read_text(encoding="utf-8"))["started"]


def differences(before: dict[str, Any], now: dict[str, Any], config: config_dict.ConfigDict) -> list[str]:
    """Lists changed keys and package versions; refuses keys that would make the resumed run a different one."""
    old, new = before["config"], now["config"]
    changed = [key for key in (new | old) if key not in old or key not in new or old[key] != new[key]]
    lines = {key: f"{key}: {old.get(key, '(absent)')!r} -> {new.get(key, '(absent)')!r}" for key in changed}
    # A key that only one of them has came or went with a version of the program: said, not refused.
    refused = [key for key in changed if key in old and key in new and not harmless(key, config)]
    if refused:
        head = f"{run_folder(config)} was started with other values; resuming it would make a different run:"
        accept = ",".join([*config.checkpoint.accept_changes, *refused])
        raise ConfigError(
            "\n  ".join([head, *(lines[key] for key in refused)])
            + "\n   -> restore them, choose another --config.name, or go on with the new values by "
            + f"--config.checkpoint.accept_changes={accept}"
        )
    was = before["restarts"][-1]["versions"] if before["restarts"] else before["versions"]
    upgraded = [f"{name}: {was.get(name)} -> {version}" for name, version in now["versions"].items() if was.get(name) != version]
    return list(lines.values()) + upgraded


def harmless(key: str, config: config_dict.ConfigDict) -> bool:
    if key in config.checkpoint.accept_changes:
        return True
    if key in LENGTH and config.optim.schedule != "constant":
        return False
    return any(key == known or (known.endswith(".") and key.startswith(known)) for known in HARMLESS)


def versions() -> dict[str, str | None]:
    """Versions of Python, this project and the packages that can change a number; None for one that is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict[str, Any]:
    """Commit of the source tree and the tracked files that differ from it; None where git or its history is missing."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        modified = git("status", "--porcelain", "--untracked-files=no").splitlines()
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(modified), "modified": [entry[3:] for entry in modified[:50]]}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None, "modified": []}
