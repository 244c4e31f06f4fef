"""Boxes, final numbers and declared answers, and the rules that hold for every grader."""

import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import gsm8k, latex, math
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.steps import sum_solution


def graded(source, response, key, question="", prefix="", finish="stop", **rubric):
    return graders.grade(Answer(source, question, prefix, response, finish, key), graders.Rubric(**rubric))


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


@pytest.mark.parametrize(
    ("text", "keys", "reward", "reason"),
    [
        (r"\boxed{\frac{28}{6}}", [r"\frac{14}{3}"], 1, "right"),
        (r"\boxed{5}", ["4", "5"], 1, "right"),
        (r"\boxed{5" + " " * 20_000 + "}", ["5"], 1, "right"),
        (r"\boxed{5" + " " * 20_000 + "6}", ["5"], 0, "wrong"),
        (r"\boxed{}", ["5"], 0, "unformatted"),
        (r"\boxed{9**9**9**9}", ["5"], 0, "too_complex"),
        (r"\boxed{" + "x" * 100_000 + "}", ["5"], 0, "too_long"),
        (r"\boxed{5}", [""], None, "bad_key"),
    ],
)
def test_boxed_answers(text, keys, reward, reason):
    grade = graded("MATH", text, keys)
    assert (grade.reward, grade.reason) == (reward, reason)


def test_math_verify_decides_what_the_parser_does_not_know():
    assert math.by_math_verify(r"\int_0^1 x^2 dx", r"\int_0^1 x \cdot x dx")
    assert not math.by_math_verify(r"\int_0^1 x^2 dx", r"\int_0^1 x^3 dx")
    assert not math.by_math_verify("5", r"\sum_{k=1}^{1000000000} k")


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (
            18,
            [
                "16 - 7 = 9\n#### 18.",
                "#### x = 18",
                "#### 18 = 9 * 2",
                "it costs \\boxed{18}",
                "The answer is $18. That is 2 a day",
            ],
        ),
        (70000, ["#### $70,000 of 90,000", "#### 70 000"]),
        (-10, ["#### **-10**<|im_end|>5", "#### \u221210", "The balance is -10 dollars."]),
        (1450000, ["#### $1.45 million"]),
        (3, ["2 + 1 = 3 bolts", "#### 3 hours"]),
        (12, ["the answer: we add 5 and get 12", "### 1. Add\n5 + 5 = 10\n### 2. Add\n10 + 2 = 12", "\\fbox{12}", "####\n12"]),
        (72, ["#### 72.000", "####" + " " * 50_000 + "72", "### Step 1: 3 + 4 = 7\n#### Step 2\n9 * 8 = 72\n#### 72"]),
        (210, ["#### 3 hours and 30 minutes", "It takes 3 hours 30 minutes."]),
        (None, ["#### 17\n#### 18", "#### 18 or 19", "so 18\n#### N/A", "I am not sure."]),
    ],
)
def test_the_final_number_of_gsm8k(number, texts):
    for text in texts:
        assert graded("GSM8K", text, str(number or 18)).reward == (number is not None), text[:60]
        found = gsm8k.final_number(text.split("<|")[0])[0]
        assert number in found if number is not None else found == ()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("3", text) for text in ("#### 3 hours and 30 minutes", "It is 3 hours, 30 minutes")),
        *(("-25", text) for text in ("The balance is 25", "30 -25")),
        ("72", "The answer is 72. No, the answer is 73."),
        ("210", "#### 3 hours and 20 minutes"),
    ],
)
def test_what_comes_near_a_final_number(key, text):
    assert graded("GSM8K", text, key).reward == 0


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
            assert graded(source, text, key, prefix="I think ", extract=extract).reason == reason
    assert graded("MATH", "", ["5"], prefix="</think> <answer>5</answer>", extract="answer_tag").reward == 0


def test_only_the_mark_counts_where_the_rubric_says_so():
    assert graded("GSM8K", "#### 18", "18", extract="mark").reward == 1
    assert graded("GSM8K", "The answer is 18", "18", extract="mark").reason == "unformatted"


def test_every_source_has_its_grader_and_its_leaks():
    for source, grader in graders.GRADERS.items():
        assert not graders.leaks_answer(source, "First we add three and four, ")
        assert grader.external or callable(graders.resolve(grader.path))


@pytest.mark.parametrize(
    ("source", "right", "key", "question"),
    [
        ("MATH", r"\boxed{42}", ["42"], r"Which number? \boxed{42}"),
        ("GSM8K", "#### 42", "42", "Is it 42?"),
        ("arithmetic", sum_solution([1, 2, 3]), "6", "1 + 2 + 3 = ?"),
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
