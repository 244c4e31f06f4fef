"""The real training loop with branches and with teacher suffixes: they train, leave their metrics, resume bit for bit."""

import pytest

from tests.telemetry.published_names import missing
from tests.telemetry.test_documented import documented
from tests.test_train import STEPS, assert_resumes_the_same, in_process

SMALL = {
    **{"data__batch_size": 4, "data__train": "carry_chain:train:8", "optim__mini_batch_prompts": 4, "validation__every": 0},
    **{
        "checkpoint__every": 4,
        "checkpoint__keep": 2,
        "telemetry__rollouts_every": 0,
        "curriculum__injection_mode": "add",
        "rollout__n": 4,
    },
    "objective__teacher_reduction": "separate_stream_mean",
}
# The students' answers are all wrong, and so are almost all of their branches: a second reward makes a contrast among them.
CONTRAST = {"rewards__extra": "('even_digits:share=0.1',)", "rewards__threshold": 0.5}
SHARE = 'def share(answer):\n    return sum(c in "02468" for c in answer.response) / (len(answer.response) + 1)\n'
LINES = {"teacher__enabled": False, "branches__tokens_per_node": 7, **CONTRAST}  # a segment is a line of the sum
SUFFIXES = {
    **{"curriculum__pool": "suffixes", "branches__batch_threshold": 6, "branches__branches_per_entry": 2},
    **{"objective__teacher_loss": "luffy", "curriculum__failures": "all"},
}
ARMS = {
    "inline": LINES | {"curriculum__pool": "branches_inline", "branches__branches_per_point": 4},
    "buffered": LINES | {"curriculum__pool": "branches", "branches__sample_size_per_step": 4, "branches__branches_per_entry": 2},
    "luffy": SUFFIXES,
    "sft": SUFFIXES
    | {"objective__teacher_loss": "sft", "objective__teacher_update": "post_ppo", "optim__teacher__mini_batch_rows": 4}
    | {"branches__branches_per_entry": 0},
}
OF_SUFFIXES = ("suffixes", "teacher", "teacher_tokens")
PUBLISHED = {
    **{"inline": ("branches", "inline"), "buffered": ("branches", "buffer")},
    **{"luffy": ("branches", "luffy", *OF_SUFFIXES), "sft": ("post_sft", *OF_SUFFIXES)},
}


@pytest.fixture
def even_digits(tmp_path_factory, monkeypatch):
    """A reward of one's own, importable here and by the grading workers."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "even_digits.py").write_text(SHARE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


@pytest.fixture
def train(student, tmp_path, even_digits):
    """Trains an arm; one of them is also resumed half way and must come to the same. Returns the records."""

    def run(arm):
        settings = SMALL | ARMS[arm]
        records = in_process(tmp_path / "whole", **settings)
        if arm == "luffy":  # it has all that a run holds; each pool by itself is resumed in tests/curriculum/test_resume.py
            assert_resumes_the_same(tmp_path / "whole", student, **settings)
        assert not missing(records, "actor", "data", "time", *PUBLISHED[arm])
        known, prefixes = documented(), ("branching/", "buffer/", "teacher/", "teacher_pool/", "failed_pool/", "critic/", "data/")
        assert not [name for r in records for name in r if name.startswith(prefixes) and not known.fullmatch(name)]
        assert len(records) == STEPS and any(record["data/branch_chain_count"] for record in records) == (arm != "sft")
        assert all(record.get("actor/steps_with_branch", 0) == (record["data/branch_chain_count"] > 0) for record in records)
        return records

    return run


def test_inline(train):
    records = train("inline")
    assert all(record["branching/points"] == 16 for record in records)  # every answer is wrong and has a branch point
    rolled = [record["data/branch_chain_count"] + record["data/branch_chain/filtered_count"] for record in records]
    assert rolled == [16 * 4] * len(records)
    assert records[-1]["branching/labels_seen"] == 16 * STEPS and 0 < records[-1]["branching/avg_position_ratio"] < 1
    assert all(record["data/main_chain/groups"] == 4 for record in records)
    assert not any(name.startswith("data/main_chain_synthetic/") for name in records[-1])  # branches are no hard states


def test_buffered(train):
    records = train("buffered")
    assert records[0]["buffer/entries_sampled"] == 0 and records[0]["buffer/new_points_collected"] == 16
    assert all(record["buffer/entries_sampled"] == 4 and record["branching/points"] == 4 for record in records[1:])
    assert records[-1]["buffer/unique_steps"] > 1 and records[-1]["branching/labels"] == 4 * (STEPS - 1)


def test_suffixes_beside_continuations(train):
    records = train("luffy")
    taken = [record["teacher/entries_sampled"] for record in records]
    assert taken[0] == 0 and set(taken) == {0, 6}  # a whole batch or nothing
    for record in records:
        assert record["teacher/rows_built"] == record["data/teacher_chain_count"] == record["teacher/entries_sampled"]
        if record["teacher/entries_sampled"]:
            students = record["data/branch_chain_count"] + record["data/branch_chain/filtered_count"]
            assert students == 12 and record["actor/steps_with_teacher"] == 1
    assert records[0]["teacher/failed_collected"] == 16 and records[-1]["teacher_worker/total_succeeded"] > 16
    assert records[-1]["failed_pool/enqueued"] == sum(record["teacher/failed_collected"] for record in records)


def test_suffixes_alone(train):
    """No continuations, optimizer steps of the teacher's own."""
    records = train("sft")
    for record in records:
        assert record["teacher/rows_built"] == record["teacher/entries_sampled"]
        assert record.get("actor/post_sft_optimizer_steps", 0) == (record["teacher/entries_sampled"] > 0)
    assert any(record["teacher/entries_sampled"] for record in records)
