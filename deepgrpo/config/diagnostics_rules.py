"""Values and combinations of the section `diagnostics` that cannot work."""

from ml_collections import config_dict

from deepgrpo.config.curriculum_rules import pool_of

RANGES = {
    "diagnostics.paired_every": "[0, inf)",
    "diagnostics.paired_states": "[1, inf)",
    "diagnostics.dump_every": "[0, inf)",
    "diagnostics.dump_prefixes": "[0, inf)",
    "diagnostics.dump_deeper": "[0, inf)",
    "diagnostics.dump_rollouts": "[0, inf)",
    "diagnostics.dump_characters": "[1, inf)",
    "diagnostics.dump_max_token_ids": "[0, inf)",
    "diagnostics.recover_every": "[0, inf)",
    "diagnostics.recover_problems": "[1, inf)",
    "diagnostics.compare_every": "[0, inf)",
    "diagnostics.compare_states": "[1, inf)",
    "diagnostics.score_every": "[0, inf)",
}

Rule = tuple[tuple[str, ...], bool, str]


def rules(config: config_dict.ConfigDict) -> list[Rule]:
    keys, name, pool = config.diagnostics, config.curriculum.pool, pool_of(config)
    return [
        (
            ("diagnostics.paired_every", "curriculum.pool"),
            keys.paired_every == 0 or pool.by_ratio,
            f"states of pool {name} have no root to be compared with; set diagnostics.paired_every=0",
        ),
        (
            ("diagnostics.dump_every", "curriculum.pool"),
            keys.dump_every == 0 or name == "forest",
            "only states of a forest are dumped; set diagnostics.dump_every=0 (telemetry.rollouts_every dumps all rollouts)",
        ),
        (
            ("diagnostics.score_every", "curriculum.pool"),
            keys.score_every == 0 or pool.knows_age,
            f"pool {name} does not know a state's age; set diagnostics.score_every=0",
        ),
        (
            ("diagnostics.recover_every", "loop"),
            keys.recover_every == 0 or config.loop == "reasoning",
            "only answers of one piece are branched; set diagnostics.recover_every=0, or loop=reasoning",
        ),
    ]
