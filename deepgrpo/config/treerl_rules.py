"""Values and combinations of the section `treerl` that cannot work."""

from ml_collections import config_dict

RANGES = {
    "treerl.M": "[1, inf)",
    "treerl.N": "[1, inf)",
    "treerl.L": "[0, inf)",
    "treerl.T": "[1, inf)",
}

Rule = tuple[tuple[str, ...], bool, str]


def rules(config: config_dict.ConfigDict) -> list[Rule]:
    """Only if the loop is used."""
    if config.loop != "treerl":
        return []
    keys = config.treerl
    return [
        (
            ("loop", "curriculum.pool"),
            config.curriculum.pool == "none",
            "trees grow from the data set's prompts; set curriculum.pool=none",
        ),
        (
            ("treerl.M", "treerl.L"),
            keys.M > 1 or keys.L > 0,
            "a single response has nothing to be compared with; raise either",
        ),
        (
            ("loop", "objective.advantage"),
            config.objective.advantage == "group_mean",
            "the tokens of a tree have advantages of their own; leave objective.advantage=group_mean",
        ),
        (
            ("loop", "objective.overlong"),
            config.objective.overlong == "none",
            "the advantages of a tree are found before rewards are changed for length; set objective.overlong=none",
        ),
    ]
