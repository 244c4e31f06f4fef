"""The pools replay recorded traces operation by operation; so do the mini-batches of the epoch-local SFT phase."""

import json

import pytest

from deepgrpo.curriculum.suffix_sft import epoch_sft_minibatches
from tests.conftest import golden_files
from tests.curriculum.replay import REPLAYS


def _scenarios(*kinds: str) -> list:
    scenarios = [
        pytest.param(kind, scenario, suite.get("stat_keys"), id=f"{path.stem}-{scenario['name']}")
        for kind in kinds
        for path in golden_files(f"pools_*_{kind}*.json")
        for suite in [json.loads(path.read_text())]
        for scenario in suite["scenarios"]
    ]
    absent = pytest.mark.skip(reason=f"golden traces of {kinds} are absent: set DEEPGRPO_GOLDEN")
    return scenarios or [pytest.param(None, None, None, marks=absent, id="absent")]


@pytest.mark.parametrize(("kind", "scenario", "stat_keys"), _scenarios(*REPLAYS))
def test_trace(kind, scenario, stat_keys):
    REPLAYS[kind](scenario["config"]).run(scenario["ops"], stat_keys)


@pytest.mark.parametrize(("kind", "scenario", "stat_keys"), _scenarios("epoch_sft"))
def test_epoch_sft_minibatches(kind, scenario, stat_keys):
    for case in scenario["cases"]:
        args = case["args"]
        snapshot = [(entry["tree"], entry["node"]) for entry in args["snapshot"]]
        batches = epoch_sft_minibatches(snapshot, args["mini_batch_size"], args["epoch_passes"])
        assert [{"pass": epoch_pass, "batch": batch} for epoch_pass, batch in batches] == case["result"], args
