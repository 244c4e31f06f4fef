"""Settings that someone chose and that do nothing in this combination: warned of at the start, as nothing else would tell.

Only keys whose value is not the default of configs/common.py are told, and none that the experiments here set for all their arms.
"""

from ml_collections import config_dict

from deepgrpo.config.constraints import ORACLE
from deepgrpo.config.curriculum_rules import pools
from deepgrpo.config.errors import Finding
from deepgrpo.config.flags import flatten, load_schema

Unused = tuple[bool, str, tuple[str, ...]]  # whether these keys (or sections, by their dot) do nothing, what would use them, keys


def unused(config: config_dict.ConfigDict) -> list[Unused]:
    o, c, teacher, validation = config.objective, config.curriculum, config.teacher, config.validation
    return [
        (config.rollout.engine != "vllm", "rollout.engine=vllm", ("vllm.", "weights.")),
        (config.rollout.dynamic_sampling == 0, "rollout.dynamic_sampling above 0", ("rollout.dynamic_on_cap",)),
        (config.loop != "treerl", "loop=treerl", ("treerl.",)),
        (config.loop == "treerl", "loop=reasoning (treerl.M, N, L and T decide)", ("rollout.n",)),
        (not config.judge.base_url, "judge.base_url", ("judge.",)),
        (o.teacher_loss != "luffy", "objective.teacher_loss=luffy", ("objective.luffy_gamma",)),
        (o.teacher_loss != "snis", "objective.teacher_loss=snis", ("objective.snis_beta",)),
        (not o.auto_teacher_coef, "objective.auto_teacher_coef=true", ("objective.auto_coef_init", "objective.auto_coef_decay")),
        (
            o.teacher_reduction != "separate_stream_mean",
            "objective.teacher_reduction=separate_stream_mean",
            ("objective.teacher_coef",),
        ),
        (o.aggregation != "dr_grpo", "objective.aggregation=dr_grpo", ("objective.length_constant",)),
        (o.overlong != "soft", "objective.overlong=soft", ("objective.overlong_buffer", "objective.overlong_penalty")),
        (o.ratio == "token", "objective.ratio=sequence", ("objective.sequence_clip_low", "objective.sequence_clip_high")),
        (o.kl_coef == 0, "objective.kl_coef above 0", ("objective.kl_type",)),
        (
            o.teacher_update != "post_ppo",
            "objective.teacher_update=post_ppo",
            tuple(f"optim.teacher.{name}" for name in ("weight_decay", "b1", "b2")),
        ),
        (c.suffix_sft != "post_step", "curriculum.suffix_sft=post_step", ("optim.teacher.allow_partial",)),
        *unused_by_pool(c.pool),
        (teacher.base_url != ORACLE, f"teacher.base_url={ORACLE}", ("teacher.oracle",)),
        (
            teacher.base_url == ORACLE,
            "a teacher.base_url of an endpoint",
            ("teacher.model", "teacher.enable_thinking", "teacher.api_key_env"),
        ),
        (
            validation.every == 0,
            "validation.every above 0",
            ("validation.n", "validation.temperature", "validation.top_p", "validation.before_train", "checkpoint.best_metric"),
        ),
    ]


def unused_by_pool(name: str) -> list[Unused]:
    """Keys that only other pools read (`Curriculum.keys`), and the section of branches."""
    every = {other: pools.pool_class(other) for other in pools.POOLS}
    users: dict[tuple[str, ...], list[str]] = {tuple(other for other, pool in every.items() if pool.branches): ["branches."]}
    for key in dict.fromkeys(key for pool in every.values() for key in pool.keys if name != "none"):
        users.setdefault(tuple(other for other, pool in every.items() if key in pool.keys), []).append(f"curriculum.{key}")
    listed = {names: " or ".join(filter(None, (", ".join(names[:-1]), names[-1]))) for names in users}
    return [(name not in names, f"curriculum.pool={listed[names]}", tuple(keys)) for names, keys in users.items()]


def settings_problems(config: config_dict.ConfigDict) -> list[Finding]:
    """A warning for each reason why settings do nothing, and for combinations that quietly do what nobody wants."""
    flat, defaults = flatten(config), flatten(load_schema())
    chosen = [key for key, value in flat.items() if value != defaults[key]]
    found = []
    for nothing, user, keys in unused(config):
        named = [f"{key}={flat[key]}" for key in chosen if key.startswith(keys)] if nothing else []
        if named:
            what = f"settings: {', '.join(named)} without effect: only {user} uses it"
            found.append(Finding(what, "leave it out", fatal=False))
    if config.rollout.max_staleness and not config.objective.tis_cap:
        what = "settings: rollout.max_staleness=1 trains on answers of older weights; objective.tis_cap=0 does not correct that"
        found.append(Finding(what, "set --config.objective.tis_cap=2, or rollout.max_staleness=0", fatal=False))
    return found
