"""Combinations of values that cannot work, found before anything is loaded, and settings that nothing would use.

A rule is an `if` and the sentence that is reported, with the values of all keys that it names, unless one of these is impossible
by itself. A rule judges only what the run will use: without injection, for example, nobody asks the teacher.
"""

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ml_collections import config_dict

from deepgrpo import curriculum as pools
from deepgrpo.config import flags
from deepgrpo.config.errors import ConfigError, Finding
from deepgrpo.config.flags import CommandLine, flatten, load_schema
from deepgrpo.environments.base import environment_class
from deepgrpo.preflight.values import inside, wrong

ORACLE = "oracle"  # teacher.base_url that stands for the rule-based teacher, served for the length of the run
STEP_CHECKED = (
    "carry_chain",
    "lookup_chain",
    "arithmetic",
)  # data sets whose grader reports how much of a wrong answer was right
VLLM_TEMPERATURES = "[0.01, 2]"  # above it refuses; anything between 0 and 0.01 it silently takes for 0.01


def from_command_line(argv: Sequence[str], others: Sequence[str] = ()) -> tuple[config_dict.ConfigDict, CommandLine]:
    """Reads the command line as `flags.read` does and checks every value; raises ConfigError with all problems."""
    config, line = flags.read(argv, others)
    validate(config)
    return config, line


def validate(config: config_dict.ConfigDict) -> None:
    """Raises one ConfigError with every value out of its range and every combination that cannot work."""
    if found := problems(config):
        count = f"{len(found)} problems" if len(found) > 1 else "1 problem"
        raise ConfigError("\n  ".join([f"configuration error (values): {count}", *found]))


def problems(config: config_dict.ConfigDict) -> list[str]:
    """Returns every problem of a configuration's values."""
    flat = flatten(config)
    impossible = {key: text for key, value in flat.items() if (text := wrong(key, value))}
    found = [f"{key} = {flat[key]!r}: {text}" for key, text in impossible.items()]
    for text in rules(config):
        named = dict.fromkeys(
            word for word in re.findall(r"[\w.]*\w", text) if word in flat and ("." in word or f"{word}=" in text)
        )
        if not impossible.keys() & named.keys():
            found.append(f"{', '.join(f'{key} = {flat[key]!r}' for key in named)}: {text}")
    return found


#### Combinations


def rules(c: config_dict.ConfigDict) -> Iterator[str]:
    yield from run_rules(c)
    yield from size_rules(c)
    yield from (f"{text} (learner.process)" for text in several_rules(c, max(c.learner.process, default=1)))
    yield from objective_rules(c)
    yield from teacher_token_rules(c)
    yield from reward_rules(c)
    yield from evaluation_rules(c)
    yield from diagnostics_rules(c)
    if c.rollout.engine == "vllm":
        yield from vllm_rules(c)
    if c.loop == "treerl":
        yield from treerl_rules(c)
    if c.loop == "agent":
        yield from agent_rules(c)
    if c.judge.base_url:
        yield from endpoint_rules("judge", c.judge)
    if pool_of(c).branches:
        yield from branch_rules(c)
    if c.curriculum.pool != "none":
        yield from curriculum_rules(c)
        if c.teacher.enabled:
            yield from endpoint_rules("teacher", c.teacher)
            if not c.teacher.temperatures:
                yield "teacher.temperatures: expected at least one temperature"
            if len(c.teacher.prices) != 2:
                yield "teacher.prices: expected two, of a million prompt tokens and of a million completion tokens"
            yield from oracle_rules(c)


def pool_of(c: config_dict.ConfigDict) -> Any:
    """The class of the pool in use, whose attributes say what it can do (`curriculum.base.Curriculum` lists them)."""
    name = c.curriculum.pool
    return pools.pool_class(name if name in pools.POOLS else "none")  # a wrong name is reported by itself


def run_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    if not re.fullmatch(r"[\w][\w.+=-]*", str(c.name)):
        yield "expected name=FOLDER of letters, digits and . _ - + ="
    if not c.data.train:
        yield "data.train names no training set; add --config.data.train=NAME:PATH"
    if c.validation.every and not c.data.validation:
        yield "validation needs a set: name one in data.validation, or set validation.every=0"
    if c.optim.schedule != "constant" and not c.train.steps and not steps_are_known(c):
        yield (
            "the cosine ends with the run, and train.student_tokens, curriculum.injection_mode=replace or "
            "rollout.dynamic_sampling leave its steps open; set train.steps (python -m deepgrpo.plan estimates them), or "
            "optim.schedule=constant"
        )
    if c.curriculum.start_from and c.curriculum.pool != "forest":
        yield "curriculum.start_from begins with a forest; set curriculum.pool=forest, or leave it empty"
    if c.model.attention == "cudnn" and c.model.dtype != "bfloat16":
        yield "cuDNN's attention is for bfloat16; set model.dtype=bfloat16, or model.attention=xla"


def steps_are_known(c: config_dict.ConfigDict) -> bool:
    """Whether the passes over the data alone say how many steps a run has."""
    return not pools.replaces_prompts(c) and not c.train.student_tokens and not c.rollout.dynamic_sampling


def size_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    mesh, buckets, length = c.learner.mesh, c.learner.buckets, c.rollout.max_model_len
    if c.data.max_prompt_length >= length:
        yield "rollout.max_model_len leaves a prompt of data.max_prompt_length no room for a response; raise it"
    if c.optim.mini_batch_prompts > c.data.batch_size:
        yield "optim.mini_batch_prompts is above data.batch_size: an optimizer step cannot hold more than a training step"
    if not buckets or list(buckets) != sorted(set(buckets)):
        yield "learner.buckets: expected at least one row length, in rising order"
    elif buckets[-1] < length:
        yield "the last of learner.buckets must hold the longest sequence; append rollout.max_model_len"
    elif c.learner.micro_batch_tokens < buckets[-1]:
        yield "learner.micro_batch_tokens must hold one row of the longest of learner.buckets; raise it"
    if len(mesh) != 3 or mesh.count(-1) > 1 or 0 in mesh:
        yield "learner.mesh: expected devices along (data, fsdp, tensor), at most one of them -1 (what is left)"
    if c.learner.coordinator and not re.fullmatch(r"\S+:\d+", c.learner.coordinator):
        yield "learner.coordinator: expected HOST:PORT of process 0"
    if len(c.learner.process) != 2 or c.learner.process[0] >= c.learner.process[1]:
        yield "learner.process: expected (NUMBER, COUNT), the number from 0 and below the count"
    elif c.learner.process[1] != 1 and not c.learner.coordinator:
        yield "learner.process needs learner.coordinator=HOST:PORT (schedulers that JAX knows set neither)"


def several_rules(c: config_dict.ConfigDict, processes: int) -> Iterator[str]:
    """What stands in the way of a learner of so many processes."""
    if processes == 1:
        return
    if c.rollout.engine != "vllm":
        yield "the native engine lives in one process with its learner; set rollout.engine=vllm"
    if c.weights.route != "orbax":
        yield "route direct reads the whole policy in one process; set weights.route=orbax"
    if not c.weights.folder:
        yield "the learner's processes write a snapshot together; set weights.folder to one that all their hosts share"


def process_problems(config: config_dict.ConfigDict, processes: int) -> list[str]:
    """What a learner of so many processes cannot work with: for those whose number a scheduler decided."""
    return [f"with {processes} processes of the learner: {text}" for text in several_rules(config, processes)]


def objective_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    o = c.objective
    if o.aggregation == "dr_grpo" and o.length_constant == 0:
        yield "objective.aggregation=dr_grpo divides by objective.length_constant; set it, e.g. to the longest response"
    if o.aggregation == "dr_grpo" and o.advantage == "grpo_std":
        yield "objective.aggregation=dr_grpo divides by no deviation; set objective.advantage=group_mean or rloo"
    if o.overlong == "soft" and not 0 < o.overlong_buffer < c.rollout.max_model_len:
        yield "objective.overlong=soft needs objective.overlong_buffer between 0 and rollout.max_model_len"


def teacher_token_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    """Of the teacher's tokens in the loss."""
    o, pool, teacher = c.objective, pool_of(c), c.optim.teacher
    mixed, post = o.teacher_reduction == "mixed_token_mean", o.teacher_update == "post_ppo"
    attaches = c.curriculum.teacher_rows and pool.by_ratio and pool.keeps_suffixes  # rows beside injected groups
    if -1 < teacher.lr <= 0:
        yield "optim.teacher.lr: expected more than 0, or -1 for that of optim"
    if mixed and (post or o.teacher_loss == "sft"):
        yield "objective.teacher_reduction=separate_stream_mean is needed by teacher_loss=sft and teacher_update=post_ppo"
    if mixed and (abs(o.teacher_coef - 1.0) > 1e-12 or o.auto_teacher_coef):
        yield "the mixed mean has no coefficient: leave objective.teacher_coef=1 and objective.auto_teacher_coef=False"
    if o.auto_teacher_coef and o.teacher_loss == "null":
        yield "objective.auto_teacher_coef: there is no teacher loss to weigh; set it to False, or an objective.teacher_loss"
    if post and o.teacher_loss != "sft":
        yield "objective.teacher_update=post_ppo trains on -logp; set objective.teacher_loss=sft, or teacher_update=joint"
    if post and o.auto_teacher_coef:
        yield "objective.teacher_update=post_ppo needs no coefficient; set objective.auto_teacher_coef=False"
    if o.teacher_loss == "snis" and not mixed:
        yield "objective.teacher_loss=snis weighs against student tokens; set objective.teacher_reduction=mixed_token_mean"
    if o.teacher_loss == "snis" and not attaches:
        yield "objective.teacher_loss=snis needs curriculum.teacher_rows=True and curriculum.pool=forest"
    if o.teacher_loss != "null" and not pool.keeps_suffixes:
        yield "there are no teacher tokens; set objective.teacher_loss=null, or curriculum.pool to forest or suffixes"
    if attaches and o.teacher_loss == "sft":
        yield "objective.teacher_loss=sft trains in batches of its own; set curriculum.teacher_rows=False"
    elif attaches and not mixed:
        yield "rows beside injected groups need objective.teacher_reduction=mixed_token_mean or curriculum.teacher_rows=False"
    if o.whiten and (attaches or (pool.branches and pool.keeps_suffixes and o.teacher_loss != "sft")):
        yield "whitened advantages do not go with teacher rows; set objective.whiten=False or curriculum.teacher_rows=False"


def reward_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    """Only the form of the entries: the functions that they name are imported when the run starts, before its data are read."""
    if c.rewards.threshold < 0.01 and any(name.startswith("reasoning_gym:") for name in (*c.data.train, *c.data.validation)):
        yield "some generators of reasoning_gym give a wrong answer 0.01: set rewards.threshold=0.01 or above"
    path, number = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
    if not each(c.rewards.extra, rf"([a-z_]+|{path})={number}", lambda entry: entry.rpartition("=")[0]):
        yield "rewards.extra: expected NAME=WEIGHT each, NAME of rewards/reward.py or package.module:function, none twice"
    if not each(c.rewards.graders, rf"[^=]+={path}", lambda entry: entry.partition("=")[0]):
        yield "rewards.graders: expected SOURCE=package.module:function each, no source twice"
    if c.rewards.weight == 0 and not c.rewards.extra:
        yield "nothing would be rewarded; set rewards.weight above 0 or add a reward to rewards.extra"


def each(entries: Sequence[str], pattern: str, key: Callable[[str], str] = str) -> bool:
    """Whether each entry has the pattern's form, and no two the same key."""
    return all(re.match(rf"(?:{pattern})$", str(entry)) for entry in entries) and len(set(map(key, entries))) == len(entries)


def evaluation_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    selection, best = c.data.selection, c.checkpoint.best_metric
    for name in ("validation", "evaluation"):
        n, temperature = c[name].n, c[name].temperature
        if n > 1 and temperature == 0:
            yield f"greedy answers to one problem are all the same; set {name}.n=1 or {name}.temperature above 0"
        if c.rollout.engine == "vllm" and temperature and not inside(temperature, VLLM_TEMPERATURES):
            yield f"{name}.temperature: vLLM samples at 0 (greedy) or at temperatures in {VLLM_TEMPERATURES}"
    if c.evaluation.max_new_tokens >= c.rollout.max_model_len:
        yield "evaluation.max_new_tokens leaves a prompt no room in rollout.max_model_len; lower it"
    if set(selection) & set(c.data.validation):
        yield "a set that chooses the checkpoint is not reported; take it out of data.selection or data.validation"
    if selection and c.validation.every == 0:
        yield "data.selection is used by validations; set validation.every above 0"
    if best and selection and not best.startswith("selection/"):
        yield "checkpoint.best_metric must be of a set of data.selection: begin it with selection/, or empty data.selection"


def vllm_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    vllm, gpus = c.vllm, c.vllm.gpu_ids
    if not inside(c.rollout.temperature, VLLM_TEMPERATURES):
        yield f"rollout.temperature: vLLM samples at temperatures in {VLLM_TEMPERATURES}"
    if not each(vllm.attach, r"https?://[^/\s]+.*"):
        yield "vllm.attach: expected http://HOST:PORT each, no two the same"
    if len(gpus) not in (0, vllm.servers * vllm.tensor_parallel) or len(set(gpus)) != len(gpus):
        yield "vllm.gpu_ids: expected vllm.servers times vllm.tensor_parallel different GPUs, or none named"
    if not gpus and vllm.servers > 1 and not vllm.attach and c.requires_accelerator:
        yield "the GPUs that are visible would be shared by vllm.servers; name each one's with vllm.gpu_ids"


def agent_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    if pools.pool_class(c.curriculum.pool).branches:
        yield "loop=agent has no branches inside a conversation; set curriculum.pool to none, forest, chain or flat"
    if c.curriculum.cut != "teacher":
        yield "loop=agent: a state ends where student and teacher part; set curriculum.cut=teacher"
    if c.diagnostics.recover_every:
        yield "loop=agent: answers are not branched everywhere; set diagnostics.recover_every=0"
    if c.agent.environment:
        try:
            replay = environment_class(c.agent.environment).replay
        except ValueError as error:
            yield str(error)
        else:
            if replay != "pure" and c.curriculum.pool not in ("none", "forest"):
                yield "agent.environment has states that may be lost; only the forest retires these, set curriculum.pool=forest"
    if c.agent.turn_tokens + c.agent.observation_tokens >= c.rollout.max_model_len:
        yield "agent.turn_tokens and agent.observation_tokens leave a prompt no room; raise rollout.max_model_len"


def treerl_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    if c.curriculum.pool != "none":
        yield "loop=treerl grows trees from the data set's prompts; set curriculum.pool=none"
    if len(c.treerl) != 4 or 0 in (c.treerl[0], c.treerl[1], c.treerl[3]):
        yield "treerl=(M, N, L, T): expected four numbers, of which only L may be 0"
    elif c.treerl[0] == 1 and c.treerl[2] == 0:
        yield "treerl=(1, N, 0, T) makes a single response, which has nothing to be compared with; raise M or L"
    if c.objective.advantage != "group_mean":
        yield "loop=treerl gives tokens advantages of their own; leave objective.advantage=group_mean"
    if c.objective.overlong != "none":
        yield "loop=treerl takes rewards as they are before changes for length; set objective.overlong=none"


def endpoint_rules(name: str, endpoint: config_dict.ConfigDict) -> Iterator[str]:
    """Of the teacher's or the judge's endpoint."""
    if not re.match(r"https?://[^/\s]+", endpoint.base_url) and (name, endpoint.base_url) != ("teacher", ORACLE):
        yield f"{name}.base_url: expected http://HOST:PORT/v1" + (f" or {ORACLE}" if name == "teacher" else "")
    if not endpoint.model:
        yield f"{name}.model: expected the name of the model that the endpoint serves"
    if endpoint.replay and not pathlib.Path(endpoint.replay).is_dir():
        yield f"{name}.replay: expected the folder of an earlier run's replies (<run>/{name}); it does not exist"


def oracle_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    teacher = c.teacher
    if teacher.base_url != ORACLE:
        return
    if not teacher.oracle.startswith("solutions") and any(name.partition(":")[0] != teacher.oracle for name in c.data.train):
        yield "teacher.oracle only knows its own questions; set it to that of data.train, or teacher.base_url to an endpoint"


def curriculum_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    curriculum, o, pool = c.curriculum, c.objective, pool_of(c)
    if pool.by_ratio:
        if math.floor(curriculum.injection_ratio * c.data.batch_size + 1e-9) < 1:
            yield "no state would be injected; raise curriculum.injection_ratio or data.batch_size, or set curriculum.pool=none"
        if curriculum.injection_mode == "replace" and curriculum.injection_ratio == 1:
            yield "no dataset prompt would be left; lower curriculum.injection_ratio or set curriculum.injection_mode=add"
        if curriculum.rollout_n == 1:
            yield "curriculum.rollout_n: a group of one has no advantage; expected 0 (rollout.n) or at least 2"
    room = c.rollout.max_model_len - curriculum.min_remaining_tokens
    if pool.asks_teacher and c.data.max_prompt_length >= room:
        yield "data.max_prompt_length and curriculum.min_remaining_tokens leave no room; raise rollout.max_model_len"
    if curriculum.failures != "all" and not all(name.partition(":")[0] in STEP_CHECKED for name in c.data.train):
        known = ", ".join(STEP_CHECKED)
        yield f"longest_prefix needs data.train whose grader checks steps ({known}); set curriculum.failures=all"
    if curriculum.cut != "teacher" and o.teacher_loss != "null":
        yield "other cuts leave no teacher suffix; set objective.teacher_loss=null, or curriculum.cut=teacher"
    if curriculum.suffix_sft != "off" and curriculum.pool != "forest":
        yield "only the forest keeps suffixes to train on; set curriculum.pool=forest, or curriculum.suffix_sft=off"
    if curriculum.suffix_sft != "off" and o.teacher_update != "post_ppo":
        yield "suffix SFT needs objective.teacher_update=post_ppo; set it, or curriculum.suffix_sft=off"
    if o.teacher_loss == "sft" and curriculum.pool == "forest" and curriculum.suffix_sft == "off":
        yield "objective.teacher_loss=sft would train on nothing; set curriculum.suffix_sft=epoch_local or post_step"


def branch_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    pool, o = c.curriculum.pool, c.objective
    if c.curriculum.injection_mode != "add":
        yield "branches come on top of the data set's prompts; set curriculum.injection_mode=add"
    if pool_of(c).asks_teacher:
        if c.branches.branches_per_entry == 0 and o.teacher_loss != "sft":
            yield "branches.branches_per_entry=0 is only for objective.teacher_loss=sft; others compare the teacher with branches"
        if not c.curriculum.teacher_rows:
            yield "curriculum.pool=suffixes is for the teacher's suffixes; set curriculum.teacher_rows=True, or pool=branches"
    else:
        if c.teacher.enabled:
            yield "nothing goes to the teacher with curriculum.pool=branches; set teacher.enabled=False, or use pool suffixes"
        if o.teacher_loss != "null":
            yield "branches are the student's own; set objective.teacher_loss=null, or curriculum.pool=suffixes"
        if pool == "branches" and c.branches.branches_per_entry < 2:
            yield "branches.branches_per_entry: a group of one has no advantage; expected at least 2"


def diagnostics_rules(c: config_dict.ConfigDict) -> Iterator[str]:
    diagnostics, pool = c.diagnostics, pool_of(c)
    if diagnostics.paired_every and not pool.by_ratio:
        yield "diagnostics.paired_every: states of curriculum.pool have no root to be compared with; set it to 0"
    if diagnostics.dump_every and c.curriculum.pool != "forest":
        yield "diagnostics.dump_every is for curriculum.pool=forest; set it to 0 (telemetry.rollouts_every dumps all rollouts)"
    if diagnostics.score_every and not pool.knows_age:
        yield "diagnostics.score_every: curriculum.pool does not know a state's age; set it to 0"
    if diagnostics.recover_every and c.loop != "reasoning":
        yield "diagnostics.recover_every branches answers of one piece; set it to 0, or loop=reasoning"


#### Settings that do nothing


def unused(c: config_dict.ConfigDict) -> Iterator[tuple[bool, str, str]]:
    """(whether these do nothing, what would use them, keys or sections); not what experiments set for all their arms."""
    o, teacher = c.objective, c.teacher
    yield c.rollout.engine != "vllm", "rollout.engine=vllm", "vllm. weights."
    yield c.loop != "treerl", "loop=treerl", "treerl"
    yield c.loop != "agent", "loop=agent", "agent."
    yield c.loop == "treerl", "loop=reasoning (treerl decides)", "rollout.n"
    yield not c.judge.base_url, "judge.base_url", "judge."
    yield o.teacher_loss != "luffy", "objective.teacher_loss=luffy", "objective.luffy_gamma"
    yield o.teacher_loss != "snis", "objective.teacher_loss=snis", "objective.snis_beta"
    yield (
        o.teacher_reduction != "separate_stream_mean",
        "objective.teacher_reduction=separate_stream_mean",
        "objective.teacher_coef",
    )
    yield o.aggregation != "dr_grpo", "objective.aggregation=dr_grpo", "objective.length_constant"
    yield o.overlong != "soft", "objective.overlong=soft", "objective.overlong_"
    yield o.kl_coef == 0, "objective.kl_coef above 0", "objective.kl_type"
    yield c.curriculum.suffix_sft != "post_step", "curriculum.suffix_sft=post_step", "optim.teacher.allow_partial"
    yield from unused_by_pool(c.curriculum.pool)
    yield teacher.base_url != ORACLE, f"teacher.base_url={ORACLE}", "teacher.oracle"
    yield (
        teacher.base_url == ORACLE,
        "a teacher.base_url of an endpoint",
        "teacher.model teacher.enable_thinking teacher.api_key_env",
    )
    yield (
        c.validation.every == 0,
        "validation.every above 0",
        "validation.n validation.temperature checkpoint.best_metric",
    )


def unused_by_pool(name: str) -> Iterator[tuple[bool, str, str]]:
    """Keys that only other pools read (`Curriculum.keys`), and the section of branches."""
    every = {other: pools.pool_class(other) for other in pools.POOLS}
    users = {tuple(other for other, pool in every.items() if pool.branches): "branches."}
    for key in dict.fromkeys(key for pool in every.values() for key in pool.keys if name != "none"):
        names = tuple(other for other, pool in every.items() if key in pool.keys)
        users[names] = f"{users.get(names, '')} curriculum.{key}"
    for names, keys in users.items():
        yield name not in names, f"curriculum.pool={' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}", keys


def settings_problems(config: config_dict.ConfigDict) -> list[Finding]:
    """A warning for each reason why chosen settings do nothing, and for combinations that quietly do what nobody wants."""
    flat, defaults = flatten(config), flatten(load_schema())
    chosen = [key for key, value in flat.items() if value != defaults[key]]
    found = []
    for nothing, user, prefixes in unused(config):
        if nothing and (named := [f"{key}={flat[key]}" for key in chosen if key.startswith(tuple(prefixes.split()))]):
            what = f"settings: {', '.join(named)} without effect: only {user} uses it"
            found.append(Finding(what, "leave it out", fatal=False))
    if config.rollout.max_staleness and not config.objective.tis_cap:
        what = "settings: rollout.max_staleness=1 trains on answers of older weights; objective.tis_cap=0 does not correct that"
        found.append(Finding(what, "set --config.objective.tis_cap=2, or rollout.max_staleness=0", fatal=False))
    return found
