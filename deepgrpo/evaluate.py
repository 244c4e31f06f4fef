"""Evaluates a policy: avg@n, pass@k and maj@k of every set, with their uncertainty and the protocol that they depend on.

    python -m deepgrpo.evaluate --config=configs/eval_seed.py --checkpoint=runs/my-run [--best] [--out=FOLDER]
    python -m deepgrpo.evaluate --config=configs/eval_drgrpo.py --model=models/Qwen2.5-Math-1.5B --config.seed=1
    python -m deepgrpo.evaluate --regrade=FOLDER [--grader=NAME]      the same answers, by the present graders
    python -m deepgrpo.evaluate compare A0,A1 B0,B1 [--force]         folders; those of an arm are its training seeds

`--checkpoint` is a run's folder (its newest complete checkpoint, with --best the one that it chose) or one step's. `--model` is a
Hugging Face folder: what to evaluate or, with --checkpoint, what the run started from. The sets are data.validation, the rest of
the protocol is in `evaluation`, `data` and `rollout`. Killed, the same command goes on; docs/evaluation.md explains the output.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import logging
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from deepgrpo import config as config_lib
from deepgrpo.config import flags
from deepgrpo.config.streams import steady, tool
from deepgrpo.data import dataset, templates
from deepgrpo.data import dataset as dataset_lib
from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.data.contamination import overlap
from deepgrpo.environments.base import open_environments
from deepgrpo.learner import sharding
from deepgrpo.loops import agent, reasoning
from deepgrpo.loops.base import RolloutContext
from deepgrpo.preflight import rules
from deepgrpo.preflight.inputs import check_inputs
from deepgrpo.preflight.values import CHOICES
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import check_sources, rubric_of
from deepgrpo.rewards.setup import open_grading
from deepgrpo.rollout.engine import Sampling
from deepgrpo.telemetry import compare as compare_lib
from deepgrpo.telemetry import evaluation as evaluation_lib
from deepgrpo.telemetry.evaluation import Marks, grader_version, regrade, result_of
from deepgrpo.telemetry.log import close_log, end_step, open_log
from deepgrpo.types import Problem, Prompt, Rollout
from deepgrpo.weights import checkpoint as checkpoint_lib
from deepgrpo.weights import engines, run_folder

OWN = ("--checkpoint=RUN", "--best", "--model=FOLDER", "--out=FOLDER", "--regrade=FOLDER", "compare")  # besides --config


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and what is left for the configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m deepgrpo.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All further flags are --config=PATH and --config.KEY=VALUE, as of deepgrpo.train.",
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, help="folder of a run, or of one of its steps")
    parser.add_argument("--best", action="store_true", help="of a run, the step that it chose instead of the newest")
    parser.add_argument("--model", type=pathlib.Path, help="Hugging Face folder")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the answers (default: evaluations/ in run_dir)")
    parser.add_argument("--regrade", type=pathlib.Path, help="folder of an evaluation whose answers are marked again")
    parser.add_argument(
        "--grader", default="", choices=CHOICES["rewards.grader"], help="with --regrade: another rewards.grader than it had"
    )
    args, rest = parser.parse_known_args(argv)
    if args.best and not args.checkpoint:
        parser.error("--best needs --checkpoint=RUN")
    if args.grader and not args.regrade:
        parser.error("--grader needs --regrade=FOLDER; for a new evaluation set --config.rewards.grader")
    if args.regrade and (rest or args.checkpoint or args.model or args.out):
        parser.error("--regrade=FOLDER takes no other flag: the answers and their settings are there")
    return args, rest


def configure(args: argparse.Namespace, rest: list[str]):
    """The configuration, and the step's folder if a checkpoint is evaluated; mistakes and missing files end here."""
    step, model = None, args.model
    if args.checkpoint:
        step = run_folder.step_folder(args.checkpoint, args.best)
        model = args.model or run_folder.starting_model(step)
        run_folder.require_vocabulary(step, model)
    config, _ = rules.from_command_line(["evaluate", *rest, *([f"--config.model.path={model}"] if model else [])], OWN)
    if not config.data.validation:
        raise config_lib.ConfigError("data.validation names no set to evaluate on: add --config.data.validation=NAME:PATH")
    needed = config.copy_and_resolve_references()
    needed.data.train, needed.data.selection, needed.teacher.enabled = (), (), False
    for warning in check_inputs(needed):
        print(f"warning: {warning}", file=sys.stderr)
    return config, step


log = logging.getLogger("deepgrpo.evaluate")  # by its name: __name__ is __main__ here

CHUNK = 256  # problems whose answers are written together; a killed evaluation goes on after them
GRADING_PATIENCE = 20  # deadlines of one answer that a chunk may wait for verdicts after its last rollout


def main(config, step: pathlib.Path | None, out: pathlib.Path | None = None) -> dict[str, Any]:
    """Evaluates what `configure` returned and returns the result, which is also written and printed."""
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    label = f"{step.parent.parent.name}-{step.name}" if step else pathlib.Path(config.model.path).name
    out = out or pathlib.Path(config.run_dir, "evaluations", f"{config.name}-{label}-seed{config.seed}")
    setup = config_lib.Setup(f"evaluation {config.name} cannot start", out / "log.txt")
    with setup, contextlib.ExitStack() as stack:
        stack.enter_context(run_folder.held(out))
        stack.callback(close_log, open_log(out))
        return evaluate(config, step, out, stack, setup)


def evaluate(config, step, out: pathlib.Path, stack: contextlib.ExitStack, setup: config_lib.Setup) -> dict[str, Any]:
    ################################################################################################################
    #  Problems
    ################################################################################################################
    date = began(step, out)
    tokenizer, stop_ids, vocabulary = tokenizer_lib.open_tokenizer(config.model.path, date)
    data, keys, rollout = config.data, config.evaluation, config.rollout
    loaded: dict[str, list[Problem]] = {}
    lost: dict[str, int] = {}  # rows that never became a problem
    for spec in data.validation:
        loaded[spec], report = dataset_lib.load_problems(
            spec, tokenizer, data.template, data.max_prompt_length, data.validation_limit, config.loop == "agent"
        )
        lost[spec] = report.rows - report.kept
        log.info("data: %s", report)
    files = collections.Counter(source for problems in loaded.values() for source in {p.data_source for p in problems})
    named = {spec: [set_name(p.data_source, spec, files) for p in problems] for spec, problems in loaded.items()}
    left_out = {named[spec][0]: count for spec, count in lost.items()}
    config.rewards.weight, config.rewards.extra = 1.0, ()  # an evaluation reports the task's own score, without bonuses
    rubric = rubric_of(config.rewards)
    check_sources(files, rubric)

    ################################################################################################################
    #  Settings: everything that the numbers depend on
    ################################################################################################################
    protocol = {
        "sets": set_digests(loaded, named),
        "template": data.template,
        "stop_ids": list(stop_ids),
        "max_model_len": rollout.max_model_len,
        **{key: keys[key] for key in ("max_new_tokens", "truncated", "temperature", "top_p", "n")},
        "threshold": config.rewards.threshold,
        "loop": config.loop,
        "grader": grader_version(),
        "rubric": json.loads(json.dumps(dataclasses.asdict(rubric))),
        "engine": engine_version(config),
        "dtype": config.model.dtype,
    }
    if templates.prints_date(data.template, tokenizer):
        protocol["date"] = date
    where = {
        "path": str(step or pathlib.Path(config.model.path).absolute()),
        "weights": engines.weights_digest(config.model.path, step),
    }
    settings = {"protocol": protocol, "model": where, "seed": config.seed, "chunk": CHUNK, "left_out": left_out}
    settings |= {"second_grader": keys.second_grader, "selection": selection(step, loaded)}
    record = evaluation_lib.AnswerLog(out, settings)

    ################################################################################################################
    #  Answers, chunk by chunk
    ################################################################################################################
    chunks = [(spec, start) for spec, problems in loaded.items() for start in range(0, len(problems), CHUNK)]
    missing = [(spec, start) for spec, start in chunks if f"{spec}#{start}" not in record.chunks]
    log.info("%s: %d of %d chunks are there", out, len(chunks) - len(missing), len(chunks))
    if missing:
        limits = (rollout.max_model_len, keys.max_new_tokens or None)
        sampling = Sampling(keys.temperature, keys.top_p, -1, stop_ids, *limits)
        asked = [p.prompt_ids for problems in loaded.values() for p in problems]
        engine = open_policy(config, step, stack, vocabulary, sampling, asked, out)
        service = open_grading(config, stack, set(files), out / "judge")
        marks = Marks(service, keys.truncated)
        context = RolloutContext(engine, marks, tokenizer, sampling, config.seed, GRADING_PATIENCE * service.deadline)
        environments = open_environments(config, itertools.chain(*loaded.values()), tokenizer, stack)
        loop = functools.partial(agent.run, environments, config.agent) if environments else reasoning.run
        setup.done()
        for spec, start in missing:
            part = loaded[spec][start : start + CHUNK]
            prompts = [Prompt(p.prompt_ids, p, keys.n, f"{spec}#{p.index}") for p in part]
            groups = loop(context, prompts, 0, f"evaluation:{file_of(spec)}:{start}")
            service.end_step()
            end_step()
            entries = []
            for group in groups:
                index = group.prompt.problem.index
                seen = [answer_of(context, group.prompt, rollout) for rollout in group.rollouts]
                entries.append(evaluation_lib.entry_of(group, named[spec][index], f"{file_of(spec)}#{index}", seen))
            record.append(f"{spec}#{start}", entries)
            log.info("%s: %d of %d problems answered", spec, start + len(part), len(loaded[spec]))

    ################################################################################################################
    #  Result
    ################################################################################################################
    entries = [entry for spec, start in chunks for entry in record.chunks[f"{spec}#{start}"]]
    result = result_of(settings, entries, config.rewards.workers, config.rewards.deadline)
    evaluation_lib.write_json(out / evaluation_lib.RESULT, result)
    evaluation_lib.show(evaluation_lib.result_table(result))
    print(f"answers and result: {out}")
    return result


#### Parts


def answer_of(context: RolloutContext, prompt: Prompt, rollout: Rollout) -> Answer:
    """What the grader saw of a rollout."""
    if rollout.episode is None:
        return reasoning.as_answer(context, prompt, rollout.completion, "evaluation")
    return agent.as_answer(context, prompt, rollout.completion, rollout.episode, "evaluation")


def began(step: pathlib.Path | None, out: pathlib.Path) -> str:
    """ISO time that a chat template is told when it asks for the date: when the checkpoint's run began, else this evaluation."""
    with contextlib.suppress(FileNotFoundError, KeyError):  # no record, or one of prompts without a date
        return run_folder.record_of(step)["started"] if step else evaluation_lib.read_settings(out)["protocol"]["date"]
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def file_of(spec: str) -> str:
    """The file of NAME:PATH, or what a generator is asked for; a name that survives a move to another folder."""
    return spec.rpartition("/")[2] if "/" in spec else spec.partition(":")[2]


def set_name(source: str, spec: str, files: Mapping[str, int]) -> str:
    """The data source, which names a set in results; with its file where several files have it."""
    return f"{source} ({file_of(spec)})" if files[source] > 1 else source


def set_digests(loaded: dict[str, list[Problem]], named: dict[str, list[str]]) -> dict[str, Any]:
    """Which questions and keys every set holds, so that results on other problems are never compared."""
    texts: dict[str, list[str]] = {}
    for spec, problems in loaded.items():
        for name, problem in zip(named[spec], problems, strict=True):
            texts.setdefault(name, []).append(json.dumps([problem.question, problem.ground_truth]))
    hashed = {name: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] for name, lines in texts.items()}
    return {name: {"problems": len(texts[name]), "digest": digest} for name, digest in hashed.items()}


def selection(step: pathlib.Path | None, loaded: dict[str, list[Problem]]) -> dict[str, Any]:
    """Sets that the checkpoint was chosen on, and a label if questions of one of them are evaluated here."""
    sets = run_folder.selected_on(step) if step else []
    asked = [problem.question for problems in loaded.values() for problem in problems]
    shared = False
    for spec in sets:
        try:
            shared |= bool(overlap([row.question for row in dataset.read(spec)], asked).found)
        except (OSError, ValueError):  # the file is gone: its name has to tell
            shared |= spec.startswith("unknown") or file_of(spec) in map(file_of, loaded)
    return {"sets": sets, "label": checkpoint_lib.LABEL if shared else ""}


def engine_version(config) -> str:
    if config.rollout.engine == "native":
        return f"native, jax {jax.__version__}"
    if config.vllm.attach:
        return "vllm of attached servers"
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    asked = subprocess.run([config.vllm.python, "-c", code], capture_output=True, text=True, timeout=60)
    return f"vllm {asked.stdout.strip() or 'of unknown version'}"


def open_policy(config, step, stack: contextlib.ExitStack, vocabulary, sampling: Sampling, prompts, out: pathlib.Path):
    """The engine, proven to hold the weights; the mesh is the one of `learner.mesh`."""
    mesh = sharding.make_mesh(config.learner.mesh)
    stack.enter_context(jax.set_mesh(mesh))
    dtype, real, temperature = config.model.dtype, vocabulary.bound, sampling.temperature or 1.0
    model_config, params = engines.load_frozen(pathlib.Path(config.model.path), step, dtype, mesh)
    model_config = dataclasses.replace(model_config, holes=vocabulary.holes, tokenizer_size=real)
    policy = engines.FrozenPolicy(model_config, params, dtype, real, temperature)
    plain = Sampling(temperature, 1.0, -1, sampling.stop_ids, sampling.max_model_len)  # what log-probs are compared under
    version = int(step.name) if step else 0
    return engines.open_engine(config, stack, policy, prompts, plain, version, out)[0]


def parse(argv: Sequence[str]) -> tuple:
    """What `command` takes: the words after "compare", or our flags, and configuration and step of a new evaluation."""
    if argv[1:2] == ["compare"]:
        return argv[2:], None, None, None
    args, rest = arguments(argv[1:])
    with config_lib.Setup("error"):
        return None, args, *((None, None) if args.regrade else configure(args, rest))


def command(compared: Sequence[str] | None, args: argparse.Namespace, config, step: pathlib.Path | None) -> int | None:
    if compared is None and not args.regrade:
        steady()
        main(config, step, args.out)
        return None
    with tool():
        if compared is not None:
            return compare_lib.main(compared)
        result, changes = regrade(args.regrade, args.grader)
        evaluation_lib.show(evaluation_lib.result_table(result))
        print(changes)


if __name__ == "__main__":
    flags.run(command, parse, lasting=False)
