"""DABench: named values, and the reference's verdicts."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from deepgrpo.rewards import dabench
from deepgrpo.rewards.answer import Answer
from tests.rewards import golden

KEY = [["mean", "29.7"], ["count", "891"]]


def graded(response, key=KEY, prefix=""):
    return dabench.grade(Answer("DABench", "", prefix, response, "stop", key))


@pytest.mark.parametrize("case", golden.cases("dabench"))
def test_golden(case):
    if case["finish"] == "stop":
        golden.check_person(case, dabench.grade(golden.as_answer(case)))
    golden.check_reference(case, dabench.grade_strict_reference)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("<Answer>@mean[29.70] and @count[891]</Answer>", "right"),
        ("<answer>@mean[29.7]@count[1]@count['891']</answer>", "right"),
        ("<Answer>@mean[29.7]\n@count[892]</Answer>", "wrong"),
        ("<Answer>@mean[29.70001]\n@count[891]</Answer>", "wrong"),
        ("<Answer>@mean[29.7]</Answer>", "partial"),
        ("<Answer>@mean[29.7]\n@count[891</Answer>", "partial"),
        ("<Answer>29.7, 891</Answer>", "unformatted"),
        ("@mean[29.7] @count[891]", "unformatted"),
        ("<Answer>@mean[29.7]<|im_end|>@count[891]</Answer>", "unformatted"),
    ],
)
def test_all_values_must_be_there_and_right(response, reason):
    grade = graded(response)
    assert (grade.reward, grade.completed, grade.reason) == (float(reason == "right"), reason in ("right", "wrong"), reason)


@pytest.mark.parametrize(
    ("key", "same", "other"),
    [
        ("true", "True|'true'", "false|1"),
        ("[1, 2]", "[1,2]|[1.0, 2]", "[2, 1]|[1, 2, 3]|1, 2|[1, [2]]"),
        ("[0, 5)", "[0, 5)", "[0, 5]x"),
        ("[a, b]", "['A', \"b\"]", "[a, c]"),
        ("1,234", "1234|1234.0000001", "1,235|1_234"),
        ("nan", "NaN", "inf|0"),
        ("inf", "Infinity", "-inf"),
        ("12", '12.0|"12"', "12%|-12"),
    ],
)
def test_values(key, same, other):
    for text in same.split("|"):
        assert graded(f"<Answer>@x[{text}] @y[1]</Answer>", [["x", key]]).reward == 1, text
    for text in other.split("|"):
        assert graded(f"<Answer>@x[{text}] @y[1]</Answer>", [["x", key]]).reward == 0, text


def test_keys_and_prefixes():
    right = "<Answer>@mean[29.7]@count[891]</Answer>"
    assert graded("", prefix=right).reward == 0
    assert re.search(dabench.LEAK, "@mean[") and not re.search(dabench.LEAK, "me@mean.org")
    for nothing in ([], None, "29.7", [["mean"]]):
        assert graded(right, nothing).reward is None
    assert graded("<Answer>@x[[1, 2]]</Answer>", [["x", [1, 2]]]).reward == 1


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from(["<Answer>", "</Answer>", "@x[", "]", "[", "1", ",", "nan"]) | st.text(max_size=3), max_size=20).map(
        "".join
    )
)
def test_any_text_has_a_verdict(text):
    for response in (text, f"<Answer>@x[{text}]</Answer>"):
        answer = Answer("DABench", "", "", response, "stop", [["x", "1"]])
        assert dabench.grade(answer).reward in (0, 1)
        assert dabench.grade_strict_reference(answer).reward in (0, 1)


@pytest.mark.parametrize("piece", ["@x[", "@x[]", "[", "]", "[1,", "1,", "<Answer>", "</Answer>"])
def test_long_hostile_text_has_a_verdict(piece):
    for frame in ("<Answer>{}</Answer>", "<Answer>@x[{}]</Answer>", "{}"):
        answer = Answer("DABench", "", "", frame.replace("{}", piece * (100_000 // len(piece))), "stop", [["x", "1"]])
        assert dabench.grade(answer).reward == 0
        assert dabench.grade_strict_reference(answer).reward == 0
