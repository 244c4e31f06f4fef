"""Values and combinations of the section `branches` that cannot work."""

from ml_collections import config_dict

from deepgrpo.config.curriculum_rules import pool_of

CHOICES = {
    "branches.segment_method": ("sp", "tp", "fp"),
    "branches.choose_by": ("utility", "random"),
}

RANGES = {
    "branches.tokens_per_node": "[1, inf)",
    "branches.n_segments": "[1, inf)",
    "branches.position_bias": "(-inf, inf)",
    "branches.n_branch_points": "[1, inf)",
    "branches.branches_per_point": "[2, inf)",
    "branches.sample_size_per_step": "[1, inf)",
    "branches.branches_per_entry": "[0, inf)",
    "branches.batch_threshold": "[1, inf)",
}

Rule = tuple[tuple[str, ...], bool, str]


def rules(config: config_dict.ConfigDict) -> list[Rule]:
    """Only of the pool that is used."""
    pool = pool_of(config)
    if not pool.branches:
        return []
    return [
        (
            ("curriculum.pool", "curriculum.injection_mode"),
            config.curriculum.injection_mode == "add",
            "branches come on top of the data set's prompts; set curriculum.injection_mode=add",
        ),
        *(suffix_rules(config) if pool.asks_teacher else pivot_rules(config)),
    ]


def pivot_rules(config: config_dict.ConfigDict) -> list[Rule]:
    pool, keys, inline = config.curriculum.pool, config.branches, config.curriculum.pool == "branches_inline"
    return [
        (
            ("curriculum.pool", "teacher.enabled"),
            not config.teacher.enabled,
            f"nothing goes to the teacher with pool {pool}; set teacher.enabled=False, or use curriculum.pool=suffixes",
        ),
        (
            ("curriculum.pool", "objective.teacher_loss"),
            config.objective.teacher_loss == "null",
            "branches are the student's own: there are no teacher tokens; set objective.teacher_loss=null, or "
            "curriculum.pool=suffixes",
        ),
        (
            ("branches.branches_per_entry",),
            inline or keys.branches_per_entry >= 2,
            "a group of one has no advantage; expected at least 2",
        ),
    ]


def suffix_rules(config: config_dict.ConfigDict) -> list[Rule]:
    keys, curriculum, o = config.branches, config.curriculum, config.objective
    joint = o.teacher_loss != "sft"
    return [
        (
            ("branches.branches_per_entry", "objective.teacher_loss"),
            keys.branches_per_entry >= 1 or not joint,
            "only objective.teacher_loss=sft works without continuations; others compare the teacher with them",
        ),
        (
            ("curriculum.pool", "curriculum.teacher_rows"),
            curriculum.teacher_rows,
            "the teacher's suffixes are what this pool is for; set curriculum.teacher_rows=True, or use curriculum.pool=branches",
        ),
        (
            ("objective.whiten", "objective.teacher_loss"),
            not joint or not o.whiten,
            "a teacher's coefficient is relative to advantages that are not whitened; set objective.whiten=False or "
            "teacher_loss=sft",
        ),
    ]
