"""The real training loop with trees: it gets a gradient, leaves its metrics, resumes bit for bit."""

import json

from deepgrpo.types import as_ids
from tests.telemetry.test_documented import documented
from tests.test_train import STEPS, assert_resumes_the_same, in_process
from tests.test_train_branches import CONTRAST, SMALL, even_digits  # noqa: F401, a fixture

TREES = {"loop": "treerl", "curriculum__pool": "none", "treerl": (2, 1, 2, 1)}
SETTINGS = SMALL | CONTRAST | TREES | {"telemetry__rollouts_every": STEPS, "validation__every": STEPS // 2}


def test_trees_train_and_resume_bit_for_bit(student, tmp_path, even_digits):  # noqa: F811
    records = in_process(tmp_path / "whole", **SETTINGS)
    assert_resumes_the_same(tmp_path / "whole", student, **SETTINGS)
    known, steps = documented(), [record for record in records if record["step"]]
    prefixes = ("treerl/", "critic/", "data/", "actor/")
    assert len(steps) == STEPS
    assert not [name for record in steps for name in record if name.startswith(prefixes) and not known.fullmatch(name)]
    for record in steps:
        assert 2 < record["treerl/leaves"] <= 2 * (1 + 1 * 2 * 1) and 0 < record["treerl/forked_share"] <= 2 / 3
        assert 0 < record["treerl/shared_token_share"] < 0.6 and record["treerl/token_advantage_abs"] > 0
        assert record["data/main_chain_count"] > 0 and record["actor/optimizer_steps"] >= 1
        assert record["rollout_mismatch/abs_max"] <= 1e-4  # also of the tokens that an older response had sampled
    run = tmp_path / "whole" / "carry_chain"
    rollouts = [json.loads(line) for line in (run / "rollouts" / f"{STEPS}.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4 * steps[-1]["treerl/leaves"] and all(r["locked_length"] == 0 for r in rollouts)
    prompts = {as_ids(r["prompt_ids"]).tobytes() for r in rollouts}
    assert len(prompts) == 4  # every response is a row of the data set's prompt
    validated = (run / "validation" / f"{STEPS}.jsonl").read_text().splitlines()
    assert len(validated) == 16  # one plain answer a problem
