"""Values and combinations of the sections `objective`, `optim.teacher` and `rollout.dynamic_sampling` that cannot work."""

from ml_collections import config_dict

from deepgrpo.config.curriculum_rules import pool_of

CHOICES = {
    "objective.advantage": ("group_mean", "grpo_std", "rloo"),
    "objective.zero_gradient_rows": ("drop", "keep"),
    "objective.overlong": ("none", "mask", "soft"),
    "objective.ratio": ("token", "sequence", "sequence_token"),
    "objective.aggregation": ("token_mean", "sequence_mean", "dr_grpo"),
    "objective.kl_type": ("low_var_kl", "kl", "abs", "mse", "k1", "k2", "k3", "off"),
    "objective.teacher_loss": ("null", "sft", "luffy", "snis"),
    "objective.teacher_update": ("joint", "post_ppo"),
    "objective.teacher_reduction": ("mixed_token_mean", "separate_stream_mean"),
    "rollout.dynamic_on_cap": ("train", "skip"),
}

RANGES = {
    "objective.overlong_buffer": "[0, inf)",
    "objective.overlong_penalty": "(0, inf)",
    "objective.clip_low": "(0, 1)",
    "objective.clip_high": "(0, inf)",
    "objective.clip_c": "(1, inf)",
    "objective.sequence_clip_low": "(0, 1)",
    "objective.sequence_clip_high": "(0, inf)",
    "objective.length_constant": "[0, inf)",
    "objective.kl_coef": "[0, inf)",
    "objective.entropy_coef": "(-inf, inf)",
    "objective.kl_stop": "[0, inf)",
    "objective.tis_cap": "[0, inf)",
    "objective.branch_lambda": "[0, inf)",
    "objective.teacher_coef": "[0, inf)",
    "objective.auto_coef_init": "(0, inf)",
    "objective.auto_coef_decay": "[0, 1)",
    "objective.luffy_gamma": "(0, inf)",
    "objective.snis_beta": "(0, inf)",
    "optim.teacher.lr": "[-1, inf)",
    "optim.teacher.weight_decay": "[-1, inf)",
    "optim.teacher.b1": "[-1, 1)",
    "optim.teacher.b2": "[-1, 1)",
    "optim.teacher.mini_batch_rows": "[1, inf)",
    "rollout.dynamic_sampling": "[0, inf)",
}


Rule = tuple[tuple[str, ...], bool, str]


def rules(config: config_dict.ConfigDict) -> list[Rule]:
    return student_rules(config) + teacher_token_rules(config) + teacher_row_rules(config)


def student_rules(config: config_dict.ConfigDict) -> list[Rule]:
    o = config.objective
    return [
        (
            ("objective.aggregation", "objective.length_constant"),
            o.aggregation != "dr_grpo" or o.length_constant > 0,
            "dr_grpo divides by a fixed number of tokens a row; set objective.length_constant, e.g. to the longest response",
        ),
        (
            ("objective.aggregation", "objective.advantage"),
            o.aggregation != "dr_grpo" or o.advantage != "grpo_std",
            "Dr. GRPO divides by no deviation; use objective.advantage=group_mean (or rloo), or another aggregation",
        ),
        (
            ("objective.overlong", "objective.overlong_buffer", "rollout.max_model_len"),
            o.overlong != "soft" or 0 < o.overlong_buffer < config.rollout.max_model_len,
            "the soft penalty grows over the last overlong_buffer tokens below max_model_len; expected a buffer between the two",
        ),
    ]


def teacher_token_rules(config: config_dict.ConfigDict) -> list[Rule]:
    o, teacher = config.objective, config.optim.teacher
    mixed, post = o.teacher_reduction == "mixed_token_mean", o.teacher_update == "post_ppo"
    sign = "expected at least 0, or -1 for the value of the section optim"
    return [
        *(((f"optim.teacher.{key}",), teacher[key] >= 0 or teacher[key] == -1, sign) for key in ("weight_decay", "b1", "b2")),
        (
            ("optim.teacher.lr",),
            teacher.lr > 0 or teacher.lr == -1,
            "expected more than 0, or -1 for the value of the section optim",
        ),
        (
            ("objective.teacher_reduction", "objective.teacher_update"),
            not (mixed and post),
            "steps of the teacher's own share no denominator; set objective.teacher_reduction=separate_stream_mean",
        ),
        (
            ("objective.teacher_reduction", "objective.teacher_loss"),
            not (mixed and o.teacher_loss == "sft"),
            "the mixed mean is for null, luffy and snis; set objective.teacher_reduction=separate_stream_mean",
        ),
        (
            ("objective.teacher_reduction", "objective.teacher_coef"),
            not mixed or abs(o.teacher_coef - 1.0) < 1e-12,
            "the mixed mean has no coefficient; set teacher_coef=1 or teacher_reduction=separate_stream_mean",
        ),
        (
            ("objective.teacher_reduction", "objective.auto_teacher_coef"),
            not (mixed and o.auto_teacher_coef),
            "the mixed mean has no coefficient; set auto_teacher_coef=False or teacher_reduction=separate_stream_mean",
        ),
        (
            ("objective.auto_teacher_coef", "objective.teacher_loss"),
            not o.auto_teacher_coef or o.teacher_loss != "null",
            "there is no teacher loss to weigh; set auto_teacher_coef=False, or a teacher_loss",
        ),
        (
            ("objective.teacher_update", "objective.teacher_loss"),
            not post or o.teacher_loss == "sft",
            "steps of the teacher's own train on -logp; set objective.teacher_loss=sft, or teacher_update=joint",
        ),
        (
            ("objective.teacher_update", "objective.auto_teacher_coef"),
            not (post and o.auto_teacher_coef),
            "steps of the teacher's own need no coefficient; set auto_teacher_coef=False",
        ),
        (
            ("objective.teacher_loss", "objective.teacher_reduction"),
            o.teacher_loss != "snis" or mixed,
            "snis weights are relative to the students' tokens; set objective.teacher_reduction=mixed_token_mean",
        ),
    ]


def teacher_row_rules(config: config_dict.ConfigDict) -> list[Rule]:
    """Rules of teacher rows on injected states. Only the forest keeps the teacher's continuations."""
    o, curriculum, pool = config.objective, config.curriculum, pool_of(config)
    beside_groups = pool.by_ratio and pool.keeps_suffixes
    attaches = curriculum.teacher_rows and beside_groups
    return [
        (
            ("objective.teacher_loss", "curriculum.teacher_rows"),
            o.teacher_loss != "snis" or curriculum.teacher_rows,
            "snis trains on the teacher's continuations of injected states; set curriculum.teacher_rows=True",
        ),
        (
            ("objective.teacher_loss", "curriculum.pool"),
            o.teacher_loss != "snis" or beside_groups,
            "snis trains on the teacher's continuations of injected states; set curriculum.pool=forest",
        ),
        (
            ("objective.teacher_loss", "curriculum.pool"),
            o.teacher_loss == "null" or pool.keeps_suffixes,
            "there are no teacher tokens; set objective.teacher_loss=null, or curriculum.pool to forest or suffixes",
        ),
        (
            ("curriculum.teacher_rows", "objective.teacher_loss"),
            not attaches or o.teacher_loss != "sft",
            "sft trains on suffixes in batches of its own, not beside injected groups; set curriculum.teacher_rows=False",
        ),
        (
            ("curriculum.teacher_rows", "objective.teacher_reduction"),
            not attaches or o.teacher_loss == "sft" or o.teacher_reduction == "mixed_token_mean",
            "rows beside injected groups share the students' mean; set teacher_reduction=mixed_token_mean or teacher_rows=False",
        ),
        (
            ("curriculum.teacher_rows", "objective.whiten"),
            not attaches or not o.whiten,
            "a teacher's coefficient is relative to advantages that are not whitened; set whiten=False or teacher_rows=False",
        ),
    ]
