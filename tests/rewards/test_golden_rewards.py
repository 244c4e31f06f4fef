"""The golden grading cases, through the service: agreement with a careful person, source by source.

What other suites test case by case (executed code, judges' replies) is left to them.
"""

import collections
import json

import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.service import GradingService
from tests.conftest import golden_files

NEVER_ACCEPTED_WRONGLY = {"base", "other-variable", "empty-box", "key-empty"}
BOXED, NUMBER, OTHERS = "boxed", "gsm8k", "others"
THRESHOLDS = {BOXED: (0.95, 0.01), NUMBER: (0.98, 0.01), OTHERS: (0.90, 0.02)}  # least agreement, most wrong accepts


@pytest.fixture(scope="module")
def graded():
    """(case, grade) of every case whose source a rule grades."""
    cases = [json.loads(line) for path in golden_files("rewards_*.jsonl") for line in path.read_text().splitlines()]
    by_rule = {source for source, grader in graders.GRADERS.items() if not grader.external}
    cases = [case for case in cases if case["source"] in by_rule]
    if not cases:
        pytest.skip("golden cases rewards_*.jsonl are absent: set DEEPGRPO_GOLDEN")
    with GradingService(workers=2, deadline=60.0, sources={case["source"] for case in cases}) as service:
        return [
            (case, future.result(timeout=120)) for case, future in [(case, service.submit(as_answer(case))) for case in cases]
        ]


def as_answer(case):
    fields = (case["source"], case["question"], "", case["response"], case["finish"], case["ground_truth"])
    return Answer(*fields, validation=case["grader"] == "qa_val")


def group(case):
    return case["grader"] if case["grader"] in THRESHOLDS else OTHERS


@pytest.mark.parametrize("grader", THRESHOLDS)
def test_agreement_with_a_person(graded, grader, record_property):
    counts = collections.defaultdict(collections.Counter)
    differ, wrongly_accepted = [], []
    for case, grade in graded:
        expected = case["human"]["expected_reward"]
        if group(case) != grader or expected is None:
            continue
        right = grade.reward is not None and grade.reward >= 0.5
        outcome = "agree" if grade.reward is not None and right == (expected >= 0.5) else "accept" if right else "refusal"
        counts[case["source"]].update([outcome, "cases"])
        differ += [case["id"]] * (outcome != "agree")
        wrongly_accepted += [case] * (outcome == "accept")
    assert counts, f"no golden case of {grader}"
    total = sum(counts.values(), collections.Counter())
    late = sum(grade.reason == "timeout" for case, grade in graded if group(case) == grader)
    lines = [
        f"{source:>16}: {row['cases']:4d} cases, agreement {row['agree'] / row['cases']:6.1%}, "
        f"{row['accept']} wrongly accepted, {row['refusal']} wrongly refused"
        for source, row in (*counts.items(), (f"{grader}, all", total))
    ]
    lines.append(f"{late} past the deadline; not as a person: {', '.join(differ) or 'none'}")
    record_property("figures", "\n".join(lines))
    least, most = THRESHOLDS[grader]
    assert total["agree"] / total["cases"] >= least
    assert len(wrongly_accepted) / total["cases"] <= most
    assert not [case["id"] for case in wrongly_accepted if NEVER_ACCEPTED_WRONGLY & set(case["tags"])]


def test_every_case_is_in_time_and_truncation_earns_nothing(graded):
    assert not [case["id"] for case, grade in graded if grade.reason in ("timeout", "crash", "error")]
    assert all(grade.reward == 0 for case, grade in graded if case["finish"] == "length")
    assert not [case["id"] for case, grade in graded if case["human"]["verdict"] == "unformatted" and (grade.reward or 0) >= 0.5]
