"""The chain, flat, failed and annotated pools replay recorded traces operation by operation."""

import json

import pytest

from tests.conftest import golden_files
from tests.curriculum.chain_replay import ChainReplay
from tests.curriculum.flat_replay import FlatReplay
from tests.curriculum.queue_replay import AnnotatedReplay, FailedReplay

REPLAYS = {"chain": ChainReplay, "flat": FlatReplay, "failed": FailedReplay, "annotated": AnnotatedReplay}


def _scenarios() -> list:
    scenarios = [
        pytest.param(kind, scenario, suite.get("stat_keys"), id=f"{path.stem}-{scenario['name']}")
        for kind in REPLAYS
        for path in golden_files(f"pools_*_{kind}*.json")
        for suite in [json.loads(path.read_text())]
        for scenario in suite["scenarios"]
    ]
    absent = pytest.mark.skip(reason="golden traces of the pools are absent: set DEEPGRPO_GOLDEN")
    return scenarios or [pytest.param(None, None, None, marks=absent, id="absent")]


@pytest.mark.parametrize(("kind", "scenario", "stat_keys"), _scenarios())
def test_trace(kind, scenario, stat_keys):
    REPLAYS[kind](scenario["config"]).run(scenario["ops"], stat_keys)
