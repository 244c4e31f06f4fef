"""DEEP-GRPO: GRPO whose batches are topped up with hard states.

    python -m deepgrpo.train --config=configs/carry_chain.py --config.name=my-run --config.seed=1

One step, in the order of the banners below:

    prompts  = dataset prompts + hard states                  hard states are added, they do not replace (config: injection_mode)
    groups   = loop(prompts)                                  G rollouts each, graded as they finish
    curriculum.observe(groups)                                mastered -> retired; failed -> teacher queue
    rows     = training_rows(groups)                          advantages r - mean(group), teacher rows, no rows without gradient
    learner.update(rows)                                      M optimizer steps of the clipped objective
    publish(learner.policy)                                   the next rollouts are on-policy
    validate / log / checkpoint

The teacher works beside it: it corrects failures, and each prefix that student and corrected answer share becomes a new state.
"""

import contextlib
import dataclasses
import functools
import gc
import logging

import jax

from deepgrpo import config as config_lib
from deepgrpo import curriculum as curriculum_lib
from deepgrpo.config import flags
from deepgrpo.curriculum import suffix_sft
from deepgrpo.data import dataset as dataset_lib
from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.endpoint.client import DEADLINE_SLACK
from deepgrpo.environments import journal
from deepgrpo.environments.base import agent_metrics, open_environments
from deepgrpo.learner import distributed, report, sharding
from deepgrpo.learner.distributed import Stop
from deepgrpo.learner.learner import Learner, PendingUpdate
from deepgrpo.learner.minibatch import least_prompts, step_rows
from deepgrpo.learner.training_rows import Idle, find_continuations, training_rows
from deepgrpo.loops import agent, reasoning, treerl
from deepgrpo.loops.ahead import Rollouts
from deepgrpo.loops.base import RolloutContext, with_sampling
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params
from deepgrpo.preflight import rules
from deepgrpo.preflight.inputs import check_inputs
from deepgrpo.rewards.grade import rubric_of
from deepgrpo.rewards.reward import part_means
from deepgrpo.rewards.setup import open_grading
from deepgrpo.rollout.engine import Sampling
from deepgrpo.teacher.worker import NoTeacher, open_teacher
from deepgrpo.telemetry import dumps, statistics
from deepgrpo.telemetry.diagnostics import Diagnostics, rollout_mismatch
from deepgrpo.telemetry.log import Progress, Timer, end_step, format_position
from deepgrpo.telemetry.metrics import Metrics
from deepgrpo.types import Prompt
from deepgrpo.weights import checkpoint as checkpoint_lib
from deepgrpo.weights import hf, run_folder
from deepgrpo.weights.engines import open_engine, storing

log = logging.getLogger("deepgrpo.train")  # by its name: __name__ is __main__ here

LOOPS = {
    "reasoning": lambda config, environments: reasoning.run,
    "agent": lambda config, environments: functools.partial(agent.run, environments, config.agent),
    "treerl": lambda config, environments: functools.partial(treerl.run, config.treerl),
}
GRADING_PATIENCE = 20  # deadlines of one answer that a whole batch may still wait for verdicts after its last rollout


def main(config, line) -> None:
    """Runs, or resumes, the run that `config` describes. `line` is the command line it came from, for the run's record."""
    setup = config_lib.Setup(f"run {config.name} cannot start", config_lib.run_folder(config) / "log.txt")
    with setup, contextlib.ExitStack() as stack:
        if config.compilation_cache:
            jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        distributed.initialise(config.learner)
        if problems := rules.process_problems(config, jax.process_count()):
            raise config_lib.ConfigError("\n".join(problems))
        train(config, line, stack, Stop(), setup)  # only now: JAX's own handler of SIGTERM was in the way


def train(config, line, stack: contextlib.ExitStack, stop: Stop, setup: config_lib.Setup) -> None:
    ################################################################################################################
    #  Run folder
    ################################################################################################################
    first = jax.process_index() == 0  # of a learner of several processes, it alone writes and rolls out
    channel = stack.enter_context(distributed.open_channel(config.learner.coordinator))
    stop.attach(channel)
    stack.enter_context(setup)  # inside the channel too, which tells of errors itself
    run = config_lib.run_folder(config)
    rubric_of(config.rewards)  # a reward of the user's that can't be imported ends the run here
    devices = [device.device_kind for device in jax.devices()]
    checkpoints, resumed = run_folder.begin(config, line, stack, first, devices, check_inputs)

    ################################################################################################################
    #  Tokenizer and data
    ################################################################################################################
    began = distributed.of_first(config_lib.began(config) if first else "")
    tokenizer, stop_ids, vocabulary = tokenizer_lib.open_tokenizer(config.model.path, began)
    data = config.data
    problems, held_out, choosing = (dataset_lib.load_sets(config, key, tokenizer) for key in ("train", "validation", "selection"))
    sources = {problem.data_source for problem in problems + held_out + choosing}
    grading = open_grading(config, stack, sources, run / "judge")
    environments = open_environments(config, problems + held_out + choosing, tokenizer, stack)
    environments = journal.journalled(environments, config.agent.replay, run / "tools", stack)
    dataset_lib.refuse_overlap(problems, held_out, choosing, data.allow_overlap)
    dataset = dataset_lib.Dataset(problems, data.batch_size, config.seed)
    curriculum = curriculum_lib.create(config) if first else None  # before the model: it may refuse what it is given

    ################################################################################################################
    #  Learner, engine, grading
    ################################################################################################################
    mesh = sharding.make_mesh(config.learner.mesh)
    stack.enter_context(jax.set_mesh(mesh))
    model_config = dataclasses.replace(
        ModelConfig.from_hf(config.model.path), holes=vocabulary.holes, tokenizer_size=vocabulary.bound
    )
    params = hf.load(config.model.path, shardings=sharding.parameter_shardings(abstract_params(model_config), mesh))
    learner = Learner(
        model_config,
        params,
        config,
        max_rows=step_rows(config),
        total_steps=config.train.steps or config.train.epochs * dataset.batches_per_epoch,
        mesh=mesh,
        channel=channel,
    )
    del params  # the learner has its own copy
    learner.prepare()
    stack.callback(learner.programs.close)
    if resumed is not None:
        arrays, host, folder = checkpoints.restore(resumed, learner.abstract_state())
        learner.restore(arrays)
        learner.restore_host(host["learner"])
        del arrays
    if not first:
        store = storing(config, learner)
        setup.done(f"run {config.name} stopped")
        learner.follow({"save": lambda step: checkpoints.save(step, learner.state, {}), "store": store})
        return
    suffixes = suffix_sft.SuffixSft(config, curriculum, learner.update_teacher, stop_ids)
    parts = {"dataset": dataset, "grading": grading, "suffix_sft": suffixes}  # whose state is in host.json
    teacher = NoTeacher()
    if config.teacher.enabled and config.curriculum.pool != "none":
        teacher = parts["teacher"] = open_teacher(
            config,
            stack,
            curriculum=curriculum,
            grader=grading,
            tokenizer=tokenizer_lib.load_tokenizer(config.model.path, began),  # of its own: it works in another thread
            stop_ids=stop_ids,
            folder=run / "teacher",
            environments=environments,
        )

    ################################################################################################################
    #  Resume
    ################################################################################################################
    step, student_tokens, version = 0, 0, 0
    if resumed is not None:
        curriculum.restore(folder / "curriculum")
        for name, part in parts.items():
            part.restore(host[name])
        step, student_tokens = host["step"], host["student_tokens"]
        version = host.get("weight_version", step)  # the step that made the weights: not each one changes them
        log.info("resumed from %s after step %d", folder, step)
    metrics_file = Metrics(run, config.telemetry.tensorboard, resumed_step=-1 if resumed is None else step)
    stack.callback(metrics_file.close)
    state_dump = dumps.StateDump(tokenizer.decode, stop_ids, config.rewards.threshold)
    diagnostics = Diagnostics(config, run, curriculum, learner, state_dump, problems, teacher, step)
    loop = diagnostics.timed(LOOPS[config.loop](config, environments))
    teacher.start()  # only now: it takes work at once
    stack.callback(teacher.stop)
    rollout = config.rollout
    sampling = Sampling(rollout.temperature, 1.0, -1, stop_ids, rollout.max_model_len)
    training_prompts = [problem.prompt_ids for problem in problems]
    engine, publish = open_engine(config, stack, learner, training_prompts, sampling, version, run)
    context = RolloutContext(engine, grading, tokenizer, sampling, config.seed, GRADING_PATIENCE * grading.deadline)
    background_context = dataclasses.replace(context, tokenizer=tokenizer_lib.load_tokenizer(config.model.path))
    greedy = with_sampling(context, temperature=config.validation.temperature, top_p=1.0, top_k=-1)
    timer, idle = Timer(), Idle()

    def validate(at: int) -> dict[str, float]:
        validated = enumerate(held_out + choosing)
        prompts = [Prompt(p.prompt_ids, p, config.validation.n, f"validation:{i}") for i, p in validated]
        with timer("testing"):
            groups = loop(greedy, prompts, at, "validation")
            records = dumps.validation_records(groups[: len(held_out)], at, tokenizer.decode)
            chosen_on = dumps.validation_records(groups[len(held_out) :], at, tokenizer.decode)
            dumps.show(run / "validation" / f"{at}.jsonl", records + chosen_on)
        of_selection = statistics.validation_metrics(chosen_on)
        return statistics.validation_metrics(records) | {f"{checkpoint_lib.SELECTION}{key}": v for key, v in of_selection.items()}

    def save() -> None:
        host = {"step": step, "student_tokens": student_tokens, "learner": learner.host_state()}
        host |= {name: part.state() for name, part in parts.items()}
        host |= {"metrics": metrics_file.sync(), "weight_version": rollouts.version}
        learner.announce("save", step=step)
        with timer("save_checkpoint"):
            checkpoints.save(step, learner.state, host, {"curriculum": curriculum.state})

    def write_log(at: int, metrics: dict[str, float], update: PendingUpdate) -> dict[str, float]:
        metrics |= update.metrics()
        metrics |= rollout_mismatch(metrics, config.model.dtype)
        metrics_file.write(at, metrics)
        progress.update(at, metrics)
        end_step()
        return metrics

    def where() -> dict[str, float]:
        return {"training/global_step": step, "training/student_tokens": student_tokens} | dataset.metrics()

    def done() -> bool:
        """At a step's end, before the next one draws: steps, if they are set, else passes over the data; or the token budget."""
        over = step >= config.train.steps if config.train.steps else dataset.passes(least_prompts(config)) >= config.train.epochs
        return over or 0 < config.train.student_tokens <= student_tokens

    setup.done(f"run {config.name} stopped")
    stack.enter_context(report.end_if_not_finite())
    progress = Progress(config.train, where())
    stack.callback(progress.close)
    if step == 0:
        metrics = diagnostics.recover(loop, context, 0, timer) | {"training/student_tokens": 0.0}
        if held_out and config.validation.every:
            metrics |= validate(0)
        if len(metrics) > 1:
            metrics_file.write(0, metrics | timer.metrics())
            progress.update(0, metrics)
    gc.freeze()  # what exists by now stays: without this, a large forest makes every full collection a pause of a second
    if done():
        log.info("nothing to do: %s is at %s", run, format_position(where()))
        return

    rollouts = Rollouts(config, loop, context, background_context, dataset, curriculum, diagnostics)
    stack.callback(rollouts.close)
    last, pending_log = False, None  # the log of the step before is written once the present step's update is under way
    while not last and (rollouts.pending or not stop.is_set()):
        step += 1
        with timer("step", f"step {step}"):
            #### Rollouts: the data set's prompts and the curriculum's hard states, graded as they finish
            batch = rollouts.take(step, timer)
            diagnostics.look(batch.groups, step)
            student_tokens += batch.sampled

            #### Curriculum: mastered states retire, failures go to the teacher
            teacher.step = step
            continuations = find_continuations(batch.groups, curriculum.continuation)
            metrics = curriculum.observe(batch.groups, step)
            metrics["rollout_mismatch/staleness"] = rollouts.staleness(batch.groups)
            teacher.serve(step, config.teacher.timeout + DEADLINE_SLACK, timer)

            #### Update
            last, reached, ended = done(), where(), dataset.passes()
            validates = bool(held_out) and config.validation.every > 0 and (last or step % config.validation.every == 0)
            saves = last or (config.checkpoint.every > 0 and step % config.checkpoint.every == 0)
            # A checkpoint holds no half-made step, and nothing else uses the engine meanwhile.
            if rollout.max_staleness and not (saves or validates or diagnostics.recovers(step) or stop.is_set()):
                rollouts.start(step + 1)
            rows, row_metrics = training_rows(batch.trained, continuations, config, stop_ids, idle)
            update = learner.start_update(rows, step)
            sft_metrics = suffixes.train(rows, step, ended, last)  # the sft arm's own optimizer steps, when they are due
            if pending_log:
                write_log(*pending_log)
            rollouts.wait(timer)
            if rows or suffixes.steps:
                with timer("publish"):
                    publish(learner.policy, step)
                rollouts.published(step)

            #### Validation
            if validates:
                metrics |= validate(step)
            metrics |= diagnostics.recover(loop, context, step, timer)
            if not rollouts.pending:
                update.metrics()  # waits for the devices, which is part of the step

        #### Log
        metrics |= statistics.group_statistics(batch.groups, config.rewards.threshold) | part_means(batch.groups)
        metrics |= reached | row_metrics | batch.metrics | curriculum.metrics() | sft_metrics
        metrics |= teacher.metrics() | grading.metrics() | engine.metrics() | timer.metrics()
        metrics |= diagnostics.metrics(rows, metrics, step) | agent_metrics(batch.groups)
        pending_log = (step, metrics, update)
        if not rollouts.pending:
            metrics, pending_log = write_log(*pending_log), None
        if config.telemetry.rollouts_every and step % config.telemetry.rollouts_every == 0:
            with timer("dump_rollout_generations"):
                dumps.show(run / "rollouts" / f"{step}.jsonl", dumps.rollout_records(batch.groups, step, tokenizer.decode))

        #### Checkpoint
        deciding = {key: v for key, v in metrics.items() if not choosing or key.startswith(checkpoint_lib.SELECTION)}
        is_best = checkpoints.note_validation(step, deciding)
        if (is_best or saves or stop.is_set()) and not rollouts.pending:
            save()
    progress.close()
    reason = "stopped by a signal" if stop.is_set() and not last else "finished"
    log.info("%s: %s, %s", reason, run, format_position(where()))


if __name__ == "__main__":
    flags.run(main, rules.from_command_line)
