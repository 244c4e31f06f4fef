"""Boxes, final numbers, sums, and the rules that hold for every grader."""

import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import gsm8k, latex, math
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.steps import sum_solution as solution


def graded(source, response, key, question="", prefix="", finish="stop"):
    return graders.grade(Answer(source, question, prefix, response, finish, key))


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"First \boxed{5}, no: it is \boxed{\frac{14}{3}}.", [r"\frac{14}{3}"]),
        (r"\boxed{3}, \boxed{5} and \boxed{7}", ["3", "5", "7"]),
        (r"Either \boxed{6} or $\boxed{5}$.", ["6", "5"]),
        (r"\boxed{x = \boxed{5}}", ["5"]),
        (r"so \boxed 5.", ["5"]),
        ("\\boxed\n{1}", ["1"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{7} and so on \boxed{\frac{1}{", None),
        ("no box, or boxed{5}", None),
    ],
)
def test_last_boxes(text, boxes):
    assert latex.last_boxes(text) == boxes


def test_boxed_reasons():
    assert graded("MATH", r"\boxed{\frac{28}{6}}", [r"\frac{14}{3}"]).reason == "right"
    assert graded("MATH", r"\boxed{}", ["5"]).reason == "unformatted"
    assert graded("MATH", r"\boxed{5}", ["4", "5"]).reward == 1
    assert graded("MATH", r"\boxed{9**9**9**9}", ["5"]).reason == "too_complex"
    assert graded("MATH", r"\boxed{" + "x" * 100_000 + "}", ["5"]).reason == "too_long"
    bad_key = graded("MATH", r"\boxed{5}", [""])
    assert bad_key.reward is None and bad_key.reason == "bad_key"


def test_math_verify_decides_what_the_parser_does_not_know():
    assert math.by_math_verify(r"\int_0^1 x^2 dx", r"\int_0^1 x \cdot x dx")
    assert not math.by_math_verify(r"\int_0^1 x^2 dx", r"\int_0^1 x^3 dx")
    assert not math.by_math_verify("5", r"\sum_{k=1}^{1000000000} k")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 7 = 9\n#### 18.", 18),
        ("#### $70,000 of 90,000", 70000),
        ("#### x = 18", 18),
        ("#### 18 = 9 * 2", 18),
        ("#### **-10**<|im_end|>5", -10),
        ("#### \u221210", -10),
        ("#### $1.45 million", 1450000),
        ("it costs \\boxed{18}", 18),
        ("The answer is $18. That is 2 a day", 18),
        ("2 + 1 = 3 bolts", 3),
        ("#### 17\n#### 18", None),
        ("so 18\n#### N/A", None),
        ("I am not sure.", None),
    ],
)
def test_final_number(text, number):
    assert graded("GSM8K", text, str(number)).reward == float(number is not None)
    assert gsm8k.final_number(text.split("<|")[0])[0] == (() if number is None else (number,))


def test_headings_are_no_marks():
    steps = "### Step 1: 3 + 4 = 7\n#### Step 2\n9 * 2 = 18\n"
    assert graded("GSM8K", steps + "#### 18", "18").reward == graded("GSM8K", "####\n18", "18").reward == 1
    assert graded("GSM8K", "#### 18 or 19", "18").reason == "hedge"
    assert graded("GSM8K", "#### 70 000", "70000").reward == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"so \boxed{\frac12}", "right"),
        ("The final answer is 0.5.", "right"),
        ("Hence the answer is: $\\frac{2}{4}$. Done.", "right"),
        (r"The answer is \boxed{3}. Of these, the answer is 0.5.", "wrong"),
        (r"\boxed{3} or \boxed{0.5}", "wrong"),
        ("We tried 0.25 and 0.5.", "unformatted"),
        ("", "unformatted"),
    ],
)
def test_deepscaler_takes_a_box_or_a_declared_answer(text, reason):
    assert graded("DeepScaleR", text, [r"\frac{1}{2}"]).reason == reason


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("so it is 5.</think> <answer>5</answer>", "right", "right"),
        (r"</think> <answer> The answer is \boxed{5}. </answer><|im_end|>", "right", "right"),
        ("</think>\n<answer>5</answer>", "unformatted", "right"),
        ("</think> <answer>6</answer>", "wrong", "wrong"),
        ("</think> <answer>5</answer> <answer>6</answer>", "wrong", "wrong"),
        ("</think> <answer>5", "unformatted", "unformatted"),
        (r"</think> \boxed{5}", "unformatted", "unformatted"),
    ],
)
def test_answer_tags(text, strict, lenient):
    for extract, reason in (("answer_tag", strict), ("answer_tag_lenient", lenient)):
        for source, key in (("MATH", ["5"]), ("GSM8K", "5")):
            answer = Answer(source, "", "I think ", text, "stop", key)
            assert graders.grade(answer, graders.Rubric(extract=extract)).reason == reason
    stated = Answer("MATH", "", "</think> <answer>5</answer>", "", "stop", ["5"])  # by the locked prefix
    assert graders.grade(stated, graders.Rubric(extract="answer_tag")).reward == 0
    assert graders.leaks_answer("MATH", stated.prefix)


def test_only_the_mark_counts_where_the_rubric_says_so():
    strict = graders.Rubric(extract="mark")
    assert graders.grade(Answer("GSM8K", "", "", "#### 18", "stop", "18"), strict).reward == 1
    assert graders.grade(Answer("GSM8K", "", "", "The answer is 18", "stop", "18"), strict).reason == "unformatted"


def test_every_source_has_its_grader_and_its_leaks():
    for source, grader in graders.GRADERS.items():
        assert not graders.leaks_answer(source, "First we add three and four, ")
        if not grader.external:
            assert callable(graders.resolve(grader.path))


@pytest.mark.parametrize(
    ("source", "right", "key", "question"),
    [
        ("MATH", r"\boxed{42}", ["42"], r"Which number? \boxed{42}"),
        ("GSM8K", "#### 42", "42", "Is it 42?"),
        ("arithmetic", solution([1, 2, 3]), "6", "1 + 2 + 3 = ?"),
    ],
)
def test_only_the_response_earns_and_only_if_it_ended(source, right, key, question):
    assert graded(source, right, key, question).reward == 1
    assert graded(source, "", key, question, prefix=right).reward == 0
    cut = graded(source, right, key, question, finish="length")
    assert cut.reward == 0 and cut.reason == "truncated" and not cut.completed
    assert graders.leaks_answer(source, f"so far {right} and") and not graders.leaks_answer(source, "1 + 2 = 3\n")


def test_unknown_sources_are_refused_by_name():
    with pytest.raises(ValueError, match="'geometry3k'.*known: GSM8K, MATH"):
        graders.check_sources(["MATH", "geometry3k"])
    with pytest.raises(ValueError, match="abort"):
        graded("MATH", "", ["1"], finish="abort")
