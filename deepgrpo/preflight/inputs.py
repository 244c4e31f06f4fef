"""What a configuration needs from outside: weights, data, the teacher's endpoint and key, an accelerator.

Everything that is missing is collected into one message that says how to get it, so that a newcomer mends a machine once, not
once per attempt.
"""

import glob
import importlib.util
import os
import pathlib
import resource
import traceback
from collections.abc import Callable, Sequence

from ml_collections import config_dict

from deepgrpo.config import folders
from deepgrpo.config.errors import ConfigError, Finding, describe
from deepgrpo.data.check import data_problems
from deepgrpo.endpoint import check as endpoint_check
from deepgrpo.preflight.rules import ORACLE, settings_problems
from deepgrpo.rewards.setup import reward_problems
from deepgrpo.rollout.vllm_server import TOKEN
from deepgrpo.weights import model_folder, run_folder

# What the drivers of NVIDIA (also in WSL), AMD and TPU leave behind; asking JAX would start its backends.
DEVICE_NODES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
OPEN_FILES = 512  # enough for connections to endpoints, grading workers, programs and the run's own files


def check_inputs(config: config_dict.ConfigDict, resuming: bool = False, found: Sequence[Finding] = ()) -> list[str]:
    """Runs every check that needs no weights; returns the warnings. found: what the caller has found already.

    resuming: the run has a checkpoint. An endpoint that is down then only gives a warning: training goes on without it.

    Raises:
      ConfigError: the run cannot start; the message lists everything that stands in the way, each with its remedy.
    """
    checks = CHECKS | {"endpoints": endpoint_problems} | ({} if resuming else {"forest": forest_problems})
    findings = list(found)
    for part, check in checks.items():
        fatal = not (resuming and part == "endpoints")
        findings += [finding._replace(fatal=fatal and finding.fatal) for finding in asked(part, check, config)]
    if fatal := [finding for finding in findings if finding.fatal]:
        count = "1 problem" if len(fatal) == 1 else f"{len(fatal)} problems"
        listed = [f"\n{i}. {what}\n   -> {remedy}" for i, (what, remedy, _) in enumerate(fatal, 1)]
        raise ConfigError(f"run {config.name} cannot start: {count}" + "".join(listed))
    return [f"{what} -> {remedy}" for what, remedy, _ in findings]


def asked(part: str, check: Callable[[config_dict.ConfigDict], list[Finding]], config: config_dict.ConfigDict) -> list[Finding]:
    """What a check finds. An error that it did not foresee is a finding about its part: what it was given breaks its rules."""
    try:
        return check(config)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in frames if f"{os.sep}deepgrpo{os.sep}" in frame.filename][-1]
        what = f"{part}: its check failed at {pathlib.Path(place.filename).name}:{place.lineno}: {describe(error)}"
        return [Finding(what, f"look at what the configuration says about {part}, and at the files that it names")]


def accelerator_problems(config: config_dict.ConfigDict) -> list[Finding]:
    if not config.requires_accelerator:
        return []
    anyway = "to run on this machine's CPU all the same (very slowly), add --config.requires_accelerator=false"
    plugins = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
    if os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        what, remedy = "JAX_PLATFORMS=cpu is set, this experiment needs a GPU or TPU", f"unset JAX_PLATFORMS; {anyway}"
    elif not any(glob.glob(pattern) for pattern in DEVICE_NODES):
        what = "this experiment needs a GPU or TPU, and this machine shows none"
        remedy = f"on a CPU, try configs/carry_chain.py or configs/smollm2.py; {anyway}"
    elif glob.glob("/dev/nvidia[0-9]*") and not plugins:
        what = "there is an NVIDIA GPU, but JAX's plugin for it is not installed"
        remedy = "run DEEPGRPO_JAX=cuda13 launch/env.sh (cuda12 for drivers below 580)"
    else:
        return []
    return [Finding(f"accelerator: {what}", remedy)]


def engine_problems(config: config_dict.ConfigDict) -> list[Finding]:
    vllm = config.vllm
    if config.rollout.engine != "vllm":
        return []
    if not vllm.attach:
        native = "; without vLLM: --config.rollout.engine=native"
        return [finding._replace(remedy=finding.remedy + native) for finding in vllm_python_problems(config)]
    if os.environ.get(TOKEN):
        return []
    remedy = f"export {TOKEN}=TOKEN, the one that the servers of vllm.attach were started with"
    return [Finding(f"vLLM: environment variable {TOKEN} is not set", remedy)]


def vllm_python_problems(config: config_dict.ConfigDict) -> list[Finding]:
    if os.access(config.vllm.python, os.X_OK):
        return []
    remedy = "run launch/vllm_env.sh, or point --config.vllm.python at the Python of an environment with vLLM"
    return [Finding(f"vLLM: {config.vllm.python} is no program", remedy)]


def forest_problems(config: config_dict.ConfigDict) -> list[Finding]:
    """The forest that a new run is to begin with: complete, and of ids that mean the same here."""
    given = config.curriculum.start_from
    if not given:
        return []
    another = "set --config.curriculum.start_from to a run of this model, one of its steps, or a saved forest"
    try:
        place = folders.find(given)
        theirs = folders.vocabulary_of_forest(place)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Finding(f"forest: curriculum.start_from: {error}", another)]
    if theirs is None:
        name = f"python -m deepgrpo.forest merge {given} --model=THE_MODEL_THAT_MADE_IT --out=NEW, and start from NEW"
        return [Finding(f"forest: curriculum.start_from: which tokenizer the ids of {given} are of is not recorded there", name)]
    ours = folders.vocabulary_of_model(config.model.path)
    if ours is not None and ours.sha256 != theirs.sha256:
        what = f"the ids of {given} are of the vocabulary of {theirs.model}, and model.path={config.model.path} has another one"
        return [Finding(f"forest: curriculum.start_from: {what}", another)]
    return []


def endpoint_problems(config: config_dict.ConfigDict) -> list[Finding]:
    """Teacher and judge are each asked for one token, at the same time and as the run will ask them."""
    teacher, judge = config.teacher, config.judge
    used = {
        "teacher": config.curriculum.pool != "none" and teacher.enabled and teacher.base_url != ORACLE and not teacher.replay,
        "judge": judge.base_url and not judge.replay,
    }
    names = [name for name, is_used in used.items() if is_used]
    return endpoint_check.problems(config, names) if names else []


def resource_problems(config: config_dict.ConfigDict) -> list[Finding]:
    """Disks and memory that are too small for a training; an evaluation, which has no training set, saves nothing large."""
    if not config.data.train:
        return []
    on_cpu = os.environ.get("JAX_PLATFORMS", "").lower() == "cpu" or not any(map(glob.glob, DEVICE_NODES))
    return run_folder.room_problems(config, on_cpu)


def open_files_problems(config: config_dict.ConfigDict) -> list[Finding]:
    """Raises the limit of open files where it may. With too few a run stands still: it cannot reach its endpoints."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY == soft or soft >= OPEN_FILES:
        return []
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
        return []
    what = f"machine: a process may open {hard} files here, and a run needs up to {OPEN_FILES}"
    return [Finding(what, "raise the limit before the start: ulimit -n 4096 (as root, or in /etc/security/limits.conf)")]


CHECKS = {  # of any run, in this order
    "open files": open_files_problems,
    "accelerator": accelerator_problems,
    "engine": engine_problems,
    "model": model_folder.problems,
    "data": data_problems,
    "rewards": reward_problems,
    "settings": settings_problems,
    "resources": resource_problems,
}
