"""What a run's data files can be told before anything is loaded: every file is read through the readers, without a tokenizer."""

import math
from typing import Any

from deepgrpo.config.errors import Finding
from deepgrpo.curriculum import replaces_prompts
from deepgrpo.data import tables
from deepgrpo.data.cells import TEXT, DataError
from deepgrpo.data.dataset import listed, usable_rows
from deepgrpo.rewards.grade import remedy_for, unknown_sources
from deepgrpo.rewards.reward import Rubric
from deepgrpo.telemetry.statistics import choosing_metrics

KEYS = ("train", "validation", "selection")


def data_problems(config: Any) -> list[Finding]:
    """Every file that a run cannot use, and what its sets do not allow: one finding each."""
    data, rubric = config.data, Rubric.from_config(config.rewards)
    findings, absent = [], []
    sources: dict[str, list[str]] = {key: [] for key in KEYS}  # of each usable row
    for key in KEYS:
        for spec in data[key]:
            try:
                rows = usable_rows(spec, data.template, config.loop == "agent")
            except FileNotFoundError as error:
                absent.append(f"{str(error).removeprefix('data: ').partition(' does not exist')[0]} (data.{key})")
                continue
            except ValueError as error:
                findings.append(_finding(error))
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
            findings.append(_finding(error))
    if absent:
        get = data.origin or "put the files there, or point --config.data.train and --config.data.validation at yours"
        findings.insert(0, Finding(f"data: {', '.join(absent)} not found", get))
    return findings or _of_sets(config, sources)


def _finding(error: ValueError) -> Finding:
    return Finding(error.what, error.remedy) if isinstance(error, DataError) else Finding(f"data: {error}", "name another set")


def _warm_up(config: Any, count: int) -> list[Finding]:
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


def _of_sets(config: Any, sources: dict[str, list[str]]) -> list[Finding]:
    """What the sets, each of them readable, do not allow."""
    data, optim, findings = config.data, config.optim, []
    count = len(sources["train"])
    if data.train and data.batch_size > count:
        what = f"data: a batch of data.batch_size={data.batch_size} can't be drawn from {count} training problems"
        findings.append(Finding(what, f"set --config.data.batch_size (and optim.mini_batch_prompts) to at most {count}"))
    if data.train and optim.warmup_steps:
        findings += _warm_up(config, count)
    metric, chosen_by = config.checkpoint.best_metric, "selection" if data.selection else "validation"
    known = choosing_metrics(sources[chosen_by], config.validation.n, "selection/" if data.selection else "")
    if metric and config.validation.every and known and metric not in known:
        what = f"checkpoint.best_metric={metric} is no score of data.{chosen_by} of which the highest is the best"
        findings.append(Finding(f"checkpoint: {what}", f"set it to one of {', '.join(known)}"))
    return findings
