"""The real training loop in each arm of the teacher's tokens: it trains on them, leaves its metrics, and resumes bit for bit.

snis resumes as luffy does, and post_step keeps less than epoch_local: they are only trained.
"""

import pytest

from configs import common
from tests.telemetry.published_names import missing
from tests.telemetry.test_documented import documented
from tests.test_train import STEPS, assert_resumes_the_same, in_process

# 16 problems in batches of up to 8: two epochs end within the run, one of them before the checkpoint that is resumed from.
SMALL = {
    **{"data__batch_size": 8, "optim__mini_batch_prompts": 8, "rollout__n": 4, "optim__teacher__mini_batch_rows": 4},
    **{"validation__every": 0, "checkpoint__every": 4, "checkpoint__keep": 2, "telemetry__rollouts_every": 0},
}
ARMS = {name: common.TEACHER_ARMS[name] for name in ("luffy", "snis", "sft")}
PUBLISHED = {name: ("attached", "teacher_tokens", name) for name in ("luffy", "snis")}
PUBLISHED |= {"sft": ("suffix_sft", "epoch_sft", "post_sft"), "sft_post_step": ("suffix_sft", "post_sft")}
ARMS["sft_post_step"] = ARMS["sft"] | {"curriculum.suffix_sft": "post_step"}


@pytest.mark.parametrize(("arm", "resumes"), [("luffy", True), ("snis", False), ("sft", True), ("sft_post_step", False)])
def test_arm_trains_on_the_teachers_tokens_and_resumes_bit_for_bit(student, tmp_path, arm, resumes):
    settings = SMALL | {key.replace(".", "__"): value for key, value in ARMS[arm].items()}
    records = in_process(tmp_path, **settings)
    if resumes:
        assert_resumes_the_same(tmp_path, student, **settings)
    assert not missing(records, "actor", "data", "states", "time", "injection", "forest", "teacher", *PUBLISHED[arm])
    prefixes = ("prefix_luffy/", "prefix_suffix_sft/", "epoch_suffix_sft/", "sft/", "actor/teacher_chain/")
    names = {name for record in records for name in record if name.startswith(prefixes)}
    assert not [name for name in names if not documented().fullmatch(name)]
    {"luffy": check_rows, "snis": check_rows, "sft": check_epochs, "sft_post_step": check_steps}[arm](arm, records)


def check_rows(arm, records):
    built = [record["prefix_luffy/teacher_rows_built"] for record in records]
    assert built[0] == 0 < sum(built)
    assert [record["data/teacher_chain_count"] for record in records] == built
    assert all((f"actor/teacher_chain/{arm}_loss" in record) == (n > 0) for record, n in zip(records, built, strict=True))
    assert all(0 <= record["prefix_luffy/teacher_token_fraction"] < 0.5 for record in records)
    assert not any("sft/optimizer_steps" in r and r["sft/optimizer_steps"] for r in records)


def check_epochs(arm, records):
    phases = [record for record in records if "epoch_suffix_sft/enabled" in record]
    ends = [int(record["step"]) for record in phases]
    assert 2 <= len(ends) < STEPS and ends[-1] == STEPS  # at the end of each epoch and of the run
    starts = [record["epoch_suffix_sft/epoch_start_step"] for record in phases]
    assert starts == [1, *(end + 1 for end in ends[:-1])]
    assert sum(record["sft/optimizer_steps"] for record in records) > 0
    for record in phases:
        trained = record["epoch_suffix_sft/optimizer_steps"]
        assert record["sft/optimizer_steps"] == trained and record["epoch_suffix_sft/recorded_entries"] == 4 * trained
        assert record["teacher/events_queued"] == record["teacher/events_in_flight"] == 0
    assert all("prefix_suffix_sft/ready_trees" in record and "data/teacher_chain_count" in record for record in records)
    assert not any(name.startswith("prefix_luffy/") for name in records[-1])


def check_steps(arm, records):
    trained = [record["prefix_suffix_sft/recorded_entries"] for record in records]
    assert sum(n == 4 for n in trained) > STEPS // 2 and set(trained) <= {0, 4}
    assert all("epoch_suffix_sft/enabled" not in record for record in records)
