"""The real training loop with each of the other pools, and one of one's own: a gradient, metrics, the same after a resume."""

import pytest

from deepgrpo.curriculum import POOLS
from tests.conftest import enter_documented
from tests.telemetry.published_names import missing
from tests.telemetry.test_documented import documented
from tests.test_train import STEPS, assert_resumes_the_same, in_process

SMALL = {
    **{"data__batch_size": 8, "data__train": "carry_chain:train:8", "optim__mini_batch_prompts": 8, "validation__every": 0},
    **{"checkpoint__every": 4, "checkpoint__keep": 2, "telemetry__rollouts_every": 0},
}
METRICS = {
    "chain": ("chain_pool/learning", "chain_pool/main_failures_enqueued_this_step", "synthetic_inject/failed_collected"),
    "flat": ("synthetic_pool/size", "failed_pool/unique_keys", "synthetic_inject/failed_gated_to_teacher"),
}
PUBLISHED = {"chain": (), "flat": ("flat_states", "failures")}


@pytest.mark.parametrize("pool", METRICS)
def test_pool_trains(student, tmp_path, pool):
    settings = SMALL | {"curriculum__pool": pool}
    records = in_process(tmp_path / "whole", **settings)
    if pool == "chain":  # each pool by itself is resumed in tests/curriculum/test_resume.py
        assert_resumes_the_same(tmp_path / "whole", student, **settings)
    assert len(records) == STEPS and all(name in records[-1] for name in METRICS[pool])
    assert records[0]["synthetic_inject/injected_count"] == 0 and records[-1]["synthetic_inject/injected_count"] > 0
    assert records[-1]["teacher_worker/total_succeeded"] > 0
    assert sum(record["actor/optimizer_steps"] for record in records) >= 1  # plain GRPO has none: every group fails as a whole
    assert not missing(records, "actor", "data", "states", "time", "injection", "teacher", pool, *PUBLISHED[pool])
    known = documented()
    prefixes = ("chain_pool/", "synthetic_", "failed_pool/")
    assert not [name for name in records[-1] if name.startswith(prefixes) and not known.fullmatch(name)]


def test_the_documented_pool_is_planned_trained_with_saved_and_resumed(student, tmp_path, monkeypatch):
    """docs/method.md's, as it stands there: one module and one entry."""
    name = enter_documented("A pool of your own", "my_pools", POOLS, monkeypatch)
    settings = SMALL | {"curriculum__pool": name, "teacher__enabled": False, "checkpoint__every": 2}
    records = in_process(tmp_path, **settings, train__steps=2)
    assert records[0]["retry_pool/size"] == 8 and records[1]["synthetic_inject/injected_count"] > 0
    (record,) = in_process(tmp_path, **settings, train__steps=3)[2:]  # resumed from step 2
    assert record["synthetic_inject/injected_count"] > 0
