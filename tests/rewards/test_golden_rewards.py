"""The golden grading cases, through the service: agreement with a careful person, source by source."""

import collections
import json

import pytest

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.service import GradingService
from tests.conftest import golden_files

NEVER_ACCEPTED_WRONGLY = {"base", "other-variable", "empty-box", "key-empty"}
THRESHOLDS = {"boxed": (0.95, 0.01), "gsm8k": (0.98, 0.01)}  # grader: least agreement, most wrong accepts


@pytest.fixture(scope="module")
def graded():
    """(case, grade) of every boxed and GSM8K case."""
    cases = [json.loads(line) for path in golden_files("rewards_*.jsonl") for line in path.read_text().splitlines()]
    cases = [case for case in cases if case["grader"] in THRESHOLDS]
    if not cases:
        pytest.skip("golden cases rewards_*.jsonl are absent: set DEEPGRPO_GOLDEN")
    with GradingService(workers=2, deadline=5.0) as service:
        futures = [
            service.submit(Answer(c["source"], c["question"], "", c["response"], c["finish"], c["ground_truth"])) for c in cases
        ]
        return [(case, future.result(timeout=120)) for case, future in zip(cases, futures, strict=True)]


@pytest.mark.parametrize("grader", THRESHOLDS)
def test_agreement_with_a_person(graded, grader, capsys):
    counts = collections.defaultdict(collections.Counter)
    wrongly_accepted = []
    for case, grade in graded:
        expected = case["human"]["expected_reward"]
        if case["grader"] != grader or expected is None:
            continue
        outcome = "agree" if grade.reward == expected else "wrong accept" if grade.reward else "wrong refusal"
        counts[case["source"]].update([outcome, "cases"])
        if outcome == "wrong accept":
            wrongly_accepted.append(case)
    total = sum(counts.values(), collections.Counter())
    with capsys.disabled():
        print()
        for source, row in (*counts.items(), (grader, total)):
            print(
                f"{source:>14}: {row['cases']:4d} cases, agreement {row['agree'] / row['cases']:.1%}, "
                f"{row['wrong accept']} wrongly accepted, {row['wrong refusal']} wrongly refused"
            )
    least, most = THRESHOLDS[grader]
    assert total["agree"] / total["cases"] >= least
    assert len(wrongly_accepted) / total["cases"] <= most
    assert not [case["id"] for case in wrongly_accepted if NEVER_ACCEPTED_WRONGLY & set(case["tags"])]


def test_every_case_is_in_time_and_truncation_earns_nothing(graded):
    assert not [case["id"] for case, grade in graded if grade.reason in ("timeout", "crash", "error")]
    assert all(grade.reward == 0 for case, grade in graded if case["finish"] == "length")
    assert all(grade.reward in (0, 1) or case["ground_truth"] in ([""], ["None"]) for case, grade in graded)
