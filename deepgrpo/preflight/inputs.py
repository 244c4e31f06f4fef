"""What a configuration needs from outside: weights, data, the teacher's endpoint and key, an accelerator.

Everything that is missing is collected into one message that says how to get it, so that a newcomer mends a machine once, not
once per attempt.
"""

import asyncio
import glob
import importlib.util
import math
import os
import pathlib
import resource
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import config_dict

from deepgrpo.config import folders
from deepgrpo.config.errors import ConfigError, Finding, describe, redact
from deepgrpo.curriculum import replaces_prompts
from deepgrpo.data import tables
from deepgrpo.data.cells import TEXT, DataError
from deepgrpo.data.dataset import listed, usable_rows
from deepgrpo.endpoint.client import open_client
from deepgrpo.endpoint.errors import EndpointError, Unavailable, remedy
from deepgrpo.preflight.rules import ORACLE, settings_problems
from deepgrpo.rewards.grade import remedy_for, unknown_sources
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.setup import reward_problems
from deepgrpo.rollout.vllm_server import TOKEN
from deepgrpo.telemetry.statistics import choosing_metrics
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
    return ask_endpoints(config, names) if names else []


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


#### Data: every file is read through the readers, without a tokenizer

DATA_KEYS = ("train", "validation", "selection")


def data_problems(config: Any) -> list[Finding]:
    """Every file that a run cannot use, and what its sets do not allow: one finding each."""
    data, rubric = config.data, Rubric.from_config(config.rewards)
    findings, absent = [], []
    sources: dict[str, list[str]] = {key: [] for key in DATA_KEYS}  # of each usable row
    for key in DATA_KEYS:
        for spec in data[key]:
            try:
                rows = usable_rows(spec, data.template, config.loop == "agent")
            except FileNotFoundError as error:
                absent.append(f"{str(error).removeprefix('data: ').partition(' does not exist')[0]} (data.{key})")
                continue
            except ValueError as error:
                findings.append(_data_finding(error))
                continue
            found = [row.data_source for row in rows if row.ground_truth is not None]
            sources[key] += found
            if unknown := unknown_sources(found, rubric):
                numbers = [n for n, row in enumerate(rows) if row.data_source in unknown]
                names, file = ", ".join(map(repr, unknown)), spec.partition(":")[2]
                what = f"data: {file}, {listed(numbers)}: no grader for data_source {names}"
                findings.append(Finding(what, remedy_for(unknown, rubric)))
    solutions = config.teacher.oracle.partition(":")[2]
    if solutions:
        try:
            tables.read(solutions, {"question": TEXT, "answer": TEXT})
        except FileNotFoundError:
            absent.append(f"{solutions} (teacher.oracle)")
        except DataError as error:
            findings.append(_data_finding(error))
    if absent:
        get = data.origin or "put the files there, or point --config.data.train and --config.data.validation at yours"
        findings.insert(0, Finding(f"data: {', '.join(absent)} not found", get))
    return findings or _set_findings(config, sources)


def _data_finding(error: ValueError) -> Finding:
    return Finding(error.what, error.remedy) if isinstance(error, DataError) else Finding(f"data: {error}", "name another set")


def _warm_up_findings(config: Any, count: int) -> list[Finding]:
    """Whether the warm-up ends before the run does, as far as that can be known."""
    train, batch, rollout, warm_up = config.train, config.data.batch_size, config.rollout, config.optim.warmup_steps
    taken = max(1, math.floor(batch * (1 - config.curriculum.injection_ratio))) if replaces_prompts(config) else batch
    most = train.steps or train.epochs * (count // taken)
    short = f"set --config.optim.warmup_steps below {most}, or lengthen the run"
    if warm_up >= most:
        what = f"schedule: optim.warmup_steps={warm_up}, but the run has at most {most} steps: it never gets to optim.lr"
        return [Finding(what, short)]
    tokens = warm_up * batch * rollout.n * rollout.max_model_len / 4  # as `plan` assumes of responses
    if 0 < train.student_tokens < tokens:
        what = f"schedule: optim.warmup_steps={warm_up} may take all of train.student_tokens={train.student_tokens}"
        return [Finding(what, "lower it; python -m deepgrpo.plan estimates the run's steps", fatal=False)]
    return []


def _set_findings(config: Any, sources: dict[str, list[str]]) -> list[Finding]:
    """What the sets, each of them readable, do not allow."""
    data, optim, findings = config.data, config.optim, []
    count = len(sources["train"])
    if data.train and data.batch_size > count:
        what = f"data: a batch of data.batch_size={data.batch_size} can't be drawn from {count} training problems"
        findings.append(Finding(what, f"set --config.data.batch_size (and optim.mini_batch_prompts) to at most {count}"))
    if data.train and optim.warmup_steps:
        findings += _warm_up_findings(config, count)
    metric, chosen_by = config.checkpoint.best_metric, "selection" if data.selection else "validation"
    known = choosing_metrics(sources[chosen_by], config.validation.n, "selection/" if data.selection else "")
    if metric and config.validation.every and known and metric not in known:
        what = f"checkpoint.best_metric={metric} is no score of data.{chosen_by} of which the highest is the best"
        findings.append(Finding(f"checkpoint: {what}", f"set it to one of {', '.join(known)}"))
    return findings


#### Endpoints: one token is asked for through the run's own client; the list of models is only a hint

ENDPOINT_SECONDS = 3.5  # for all of it, of which the endpoints get less by LAST_WORD
LAST_WORD = 0.5
WITHOUT = {"teacher": ", or train without a teacher: --config.teacher.enabled=false", "judge": ""}

_Answer = tuple[EndpointError | None, list[str] | None]  # why there is no token; the models that are listed


def ask_endpoints(config: config_dict.ConfigDict, names: Sequence[str]) -> list[Finding]:
    """Asks the endpoints of the sections `names`, all at once; returns after ENDPOINT_SECONDS whatever they do."""
    from deepgrpo.endpoint import transport  # noqa: F401  the SDK's import is none of the endpoint's time

    answers: dict[str, _Answer] = {}

    async def ask(name: str) -> None:
        client, seconds = open_client(config, name), ENDPOINT_SECONDS - LAST_WORD
        served = asyncio.create_task(client.served(seconds))
        try:
            error = await client.check(seconds)
            answers[name] = error, await served if error else None
        finally:
            served.cancel()
            await client.aclose()

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, names))

    # A thread of its own, as no time limit ends a look-up of a name in the operating system.
    thread = threading.Thread(target=lambda: asyncio.run(ask_all()), name="endpoint-check", daemon=True)
    thread.start()
    thread.join(ENDPOINT_SECONDS)
    silent = Unavailable("timeout", f"no word from the endpoint within {ENDPOINT_SECONDS:g} s"), None
    return [finding for name in names for finding in _endpoint_findings(config[name], name, *answers.get(name, silent))]


def _endpoint_findings(
    section: config_dict.ConfigDict, name: str, error: EndpointError | None, served: list[str] | None
) -> list[Finding]:
    key, found = section.api_key_env, []
    if not os.environ.get(key):
        helps = f"export {key}=YOUR_KEY   (EMPTY for a server of your own that wants none)"
        found.append(Finding(f"{name}: environment variable {key} is not set", helps))
    if error is None or (found and error.kind == "access"):  # the missing key explains it
        return found
    if served and section.model not in served and error.kind in ("access", "refused"):
        shown = ", ".join(served[:8]) + (", ..." if len(served) > 8 else "")
        helps = f"set --config.{name}.model to a served one, or serve it with --served-model-name {section.model}"
        return [*found, Finding(f"{name}: {redact(section.base_url)} serves {shown}, not {section.model} ({error})", helps)]
    helps = remedy(error, name, section.model, key) + WITHOUT[name]
    alive = error.kind in ("rate_limit", "filtered") or (error.kind == "timeout" and served is not None)
    what = str(error) if section.base_url in str(error) else f"{redact(section.base_url)}: {error}"
    return [*found, Finding(f"{name}: {what}", helps, fatal=not alive)]


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
