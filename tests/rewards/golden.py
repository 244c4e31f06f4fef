"""The golden grading cases as answers, with the transcripts that they were made from."""

import json

import pytest

from deepgrpo.rewards.answer import Answer
from tests.conftest import golden_files

_SEARCH = (
    "Reason between <think> and </think>. Query the search tool between <search> and </search>; results come back between "
    "<information> and </information>. Give the result between <answer> and </answer>, e.g. <answer> Rome </answer>. Question: "
)
_PROMPTS = {
    "tableqa": "{}\nFinish with a line `Answer: value` holding the result.",
    "qa_train": _SEARCH + "{}\n",
    "qa_val": _SEARCH + "{}\n",
}


def cases(*graders: str) -> list:
    """Parametrisation by the cases of some graders, or one skipped case that says what is absent."""
    lines = [line for path in golden_files("rewards_*.jsonl") for line in path.read_text().splitlines()]
    found = [pytest.param(case, id=case["id"]) for case in map(json.loads, lines) if case["grader"] in graders]
    absent = pytest.mark.skip(reason="golden cases rewards_*.jsonl are absent: set DEEPGRPO_GOLDEN")
    return found or [pytest.param(None, marks=absent, id="absent")]


def as_answer(case: dict, transcript: str = "deployed") -> Answer:
    """A case as the grader gets it. `transcript` says what the reference saw: "deployed", "no_eos" or "response_only"."""
    user = _PROMPTS.get(case["grader"], "{}").replace("{}", case["question"])
    prompt = (
        f"<|im_start|>system\nYou are a careful assistant.<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )
    return Answer(
        data_source=case["source"],
        question=case["question"],
        prefix="",
        response=case["response"],
        finish_reason=case["finish"],
        ground_truth=case["ground_truth"],
        validation=case["grader"] == "qa_val",
        prompt="\n" if transcript == "response_only" else prompt,
        ending="<|im_end|>" if transcript == "deployed" else "",
    )


def check_person(case: dict, grade) -> None:
    """Agreement with a careful person; half a reward and more counts as right. Ambiguous cases only must have a verdict."""
    expected = case["human"]["expected_reward"]
    assert grade.reward is not None
    if expected is not None:
        assert (grade.reward >= 0.5) == (expected >= 0.5), (case["ground_truth"], case["response"], grade)
    if case["human"]["verdict"] == "unformatted":
        assert not grade.completed


def check_reference(case: dict, grade_strict) -> None:
    """The reference's own verdicts, on each text that was tried with it."""
    for transcript in ("deployed", "no_eos", "response_only"):
        if case["finish"] == "stop" and transcript in case["reference"]:
            grade, expected = grade_strict(as_answer(case, transcript)), case["reference"][transcript]
            assert (grade.reward, int(grade.completed)) == (expected["reward"], expected["completed"]), (
                transcript,
                case["response"],
            )
