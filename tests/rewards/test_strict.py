"""The reference's own graders: stage by stage, and against its recorded verdicts through the service."""

import json
import pathlib

import pytest

from deepgrpo.rewards import strict
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import Rubric, grade
from deepgrpo.rewards.service import GradingService
from tests.conftest import golden_files

BOX = " Explain briefly and put the result inside \\boxed{}."
INSTRUCTIONS = {"boxed": BOX, "mathverify": BOX, "gsm8k": ' Explain briefly and put the result after "####".'}
SYSTEM = "<|im_start|>system\nYou are a careful assistant.<|im_end|>\n<|im_start|>user\n"
BUSY = 0.9  # seconds that the reference took from which on its clock decided, and not its rule


@pytest.mark.parametrize(
    ("answer", "key", "text", "algebra"),
    [
        (r"\dfrac{14}3", r"\frac{14}{3}", False, True),
        (r"\tfrac12", "0.5", True, True),
        ("14/3", r"\frac{14}{3}", True, True),
        (r"90^{\circ}", r"90^\circ", True, False),
        ("x = 5", "5", True, False),
        (r"(c+5)(b+2)", "(a+5)(b+2)", True, False),  # lone letters are taken for units
        ("", "a + b + c", True, False),  # nothing is left of the key
        ("a-c", "a + b + c", False, False),
        ("528", "52_8", False, True),  # Python reads 52_8 as 528
        ("025", "25", False, True),
        ("-2,1", "1,-2", False, False),
        ("4/2", "2", False, False),
        (r"\frac{70}{128}", r"\frac{35}{64}", False, False),
        ("2(k+1)", "2k+2", False, True),
        ("(1,2]", "[1,2]", False, False),
        ("Evelyn", r"\text{Evelyn}", True, True),
        ("10,080", r"10,\!080", True, True),
    ],
)
def test_stages(answer, key, text, algebra):
    assert strict.same_text(answer, key) == text
    assert strict.same_algebra(answer, key) == algebra


def test_the_third_stage_knows_lists_and_the_second_does_not():
    assert strict.equal("-2,1", "1,-2", strict.FULL) and not strict.equal("-2,1", "1,-2", strict.FAST)
    repetitive = "ab" * 100
    assert not strict.same_by_math_verify(repetitive, repetitive)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        *((text, None) for text in (r"\boxed 5", r"\boxed {5}", r"\boxed{5} \boxed{6", r"\fbox{5}", "5")),
    ],
)
def test_box(text, box):
    assert strict.box(text) == box


def graded(response, key, prompt="", **kinds):
    answer = Answer("GSM8K", "", "", response, "stop", key, prompt=prompt, ending="<|im_end|>")
    return strict.grade_gsm8k(answer, **kinds).reward


def test_gsm8k_compares_the_last_run_of_digits_as_text():
    assert graded("so 8-18", "-18") == 1 and graded("18.", "18") == graded("70,000", "70000") == 0
    assert graded("no idea", "20", prompt="How far in 20 days?") == 1  # the prompt's number
    assert graded("#### 18\n#### 18", "18") == graded(r"\boxed{1} \boxed{1}", "1") == 0
    chat = "<|im_start|>user\n#### 1 #### 2<|im_end|><|im_start|>assistant\n"
    assert graded("#### 18", "18", prompt=chat) == 1  # only the assistant's own marks count
    assert graded("#### 70,000 dollars, 3 times", "70000", only_mark=True) == 1 and graded("18", "18", only_mark=True) == 0


def test_answer_tags():
    def tags(text, lenient):
        return strict.grade_tagged(Answer("MATH", "", "", text, "stop", ["5"]), "compat_fast", lenient).reason

    assert tags("</think> <answer> \\boxed{5} </answer>", False) == tags("<answer>5</answer>", True) == "right"
    assert tags("<answer>5</answer>", False) == tags("</think> <answer>5", True) == "unformatted"


def recorded(data):
    """(id, answer, the reference's record by mode) of every golden case of mathematics that ended by itself."""
    for case in (json.loads(line) for path in golden_files("rewards_*.jsonl") for line in path.read_text().splitlines()):
        if case["grader"] in INSTRUCTIONS and case["finish"] != "length":
            question, reference = case["question"], case["reference"]
            if place := case["question_ref"]:
                row = json.loads((data / place["file"]).read_text().splitlines()[place["row"]])
                question = row.get("problem") or row["question"]
            prompt = f"{SYSTEM}{question}{INSTRUCTIONS[case['grader']]}<|im_end|>\n<|im_start|>assistant\n"
            fields = (case["source"], question, "", case["response"], "stop", case["ground_truth"])
            modes = {"compat_fast": reference["deployed"], "compat_full": reference.get("main_thread", reference["deployed"])}
            yield case["id"], Answer(*fields, prompt=prompt, ending="<|im_end|>"), modes


@pytest.mark.parametrize("mode", ["compat_fast", "compat_full"])
def test_verdicts_are_the_recorded_ones(mode, data_folder: pathlib.Path, record_property):
    cases = [(name, answer, modes[mode]) for name, answer, modes in recorded(data_folder)]
    if not cases:
        pytest.skip("golden cases rewards_*.jsonl are absent: set DEEPGRPO_GOLDEN")
    quick = [case for case in cases if case[2].get("sec", 20.0) <= BUSY]
    slow = [case for case in cases if case[2].get("sec", 20.0) > BUSY] if mode == "compat_fast" else []
    graded = [(*case, grade(case[1], Rubric(grader=mode))) for case in quick]
    if slow:
        with GradingService(1, 1.5, ["MATH", "GSM8K", "DeepScaleR"], Rubric(grader=mode)) as service:
            futures = [service.submit(answer) for _, answer, _ in slow]
            graded += [(*case, future.result(300)) for case, future in zip(slow, futures, strict=True)]
    differ = [
        (name, verdict.reason, record)
        for name, _, record, verdict in graded
        if (verdict.reward, verdict.completed) != (record.get("reward", 0.0), bool(record.get("completed", 0)))
    ]
    assert not {name for name, *_ in differ} & {name for name, *_ in quick}, differ
    assert all(verdict.reward is not None or verdict.reason == "timeout" for *_, verdict in graded)
    count = len(quick) + len(slow)
    record_property("figures", f"{mode}: {count - len(differ)} of {count} verdicts as recorded; others: {differ}")
