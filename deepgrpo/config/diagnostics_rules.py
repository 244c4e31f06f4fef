"""Values and combinations of the section `diagnostics` that cannot work."""

from ml_collections import config_dict

PAIRED = ("forest", "chain", "flat")  # pools of states that have a root to be compared with
AGED = ("forest", "flat")  # pools that know when a state was made

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
    keys, pool = config.diagnostics, config.curriculum.pool
    return [
        (
            ("diagnostics.paired_every", "curriculum.pool"),
            keys.paired_every == 0 or pool in PAIRED,
            f"only states of the pools {', '.join(PAIRED)} are compared with their roots; set diagnostics.paired_every=0",
        ),
        (
            ("diagnostics.dump_every", "curriculum.pool"),
            keys.dump_every == 0 or pool == "forest",
            "only states of a forest are dumped; set diagnostics.dump_every=0 (telemetry.rollouts_every dumps all rollouts)",
        ),
        (
            ("diagnostics.score_every", "curriculum.pool"),
            keys.score_every == 0 or pool in AGED,
            f"only the pools {', '.join(AGED)} know a state's age; set diagnostics.score_every=0",
        ),
        (
            ("diagnostics.recover_every", "loop"),
            keys.recover_every == 0 or config.loop == "reasoning",
            "only answers of one piece are branched; set diagnostics.recover_every=0, or loop=reasoning",
        ),
    ]
