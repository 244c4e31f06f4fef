"""Whatever a function returns is a number, a Grade or a fault that names it; and a bonus makes no success."""

import decimal
import fractions

import numpy as np
import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import qa, reward
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.reward import Rubric
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids

NUMBERS = [1, True, 0.5, np.float32(0.5), np.float16(1), np.int64(3), np.bool_(True), np.array(0.25), -0.0]
NUMBERS += [fractions.Fraction(1, 4), decimal.Decimal("0.5")]


async def coroutine():
    return 1.0


def generator():
    yield 1.0


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_any_library_are_numbers(value):
    assert type(reward.number(value, "f")) is float and reward.number(value, "f") == float(value)


NO_NUMBERS = ["1", b"1", [1.0], (1.0,), {"score": 1.0}, {1}, np.ones(1), np.array([1.0, 2.0]), 1j, np.complex64(1), object(), len]
NO_NUMBERS += [
    float("nan"),
    float("inf"),
    -np.inf,
    np.float32("nan"),
    10**400,
    1e300,
    decimal.Decimal("NaN"),
    np.datetime64(0, "s"),
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:20])
def test_all_else_is_a_fault_that_names_the_function(value):
    with pytest.raises(reward.GraderFault, match="my_reward"):
        reward.number(value, "my_reward")


@pytest.mark.parametrize(
    "grade",
    [1.0, None, Grade(float("nan"), True, "right"), Grade("1", True, "right"), Grade(1.0, True, None), Grade(1.0, True, "r", 5)]
    + [Grade(1.0, True, "r", right_prefix=-1), Grade(1.0, True, "r", right_prefix="x"), Grade(1.0, True, "r", parts=1.0)]
    + [Grade(1.0, True, "r", parts=(("bonus", 0.5),)), Grade(1.0, True, "r", parts=(("task", float("inf")),))]
    + [Grade(1.0, True, "r", parts=(("task", None),)), Grade([1.0], True, "r"), generator(), Grade(np.ones(2), True, "r")],
    ids=lambda value: type(value).__name__,  # an address in a name would differ between test processes
)
def test_a_bad_grade_is_a_fault(grade):
    with pytest.raises(reward.GraderFault, match="my_grader"):
        reward.checked(grade, "my_grader")


def test_a_good_grade_has_plain_fields_and_short_texts():
    checked = reward.checked(
        Grade(np.float32(0.5), np.bool_(True), "very wrong\n" * 50, "x\udc80" * 10**5, np.int64(3), [["task", np.float64(1)]]),
        "f",
    )
    assert [type(field) for field in (checked.reward, checked.completed, checked.right_prefix)] == [float, bool, int]
    assert len(checked.reason) <= 64 and " " not in checked.reason and len(checked.answer) <= reward.MAX_TEXT
    checked.answer.encode()
    assert checked.parts == (("task", 1.0),)


@pytest.mark.parametrize("raised", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), MemoryError(), RecursionError()])
def test_whatever_a_function_raises_is_its_fault_and_no_label(raised):
    def function(_):
        raise raised

    with pytest.raises(reward.GraderFault, match=f"(?s)mine.*{type(raised).__name__}"):
        reward.called("mine", function, None)
    assert reward.called("mine", lambda _: coroutine(), None) == 1.0  # a coroutine function is as good as any


def group_of(*grades):
    problem = Problem(0, "GSM8K", as_ids([1]), "18", "?")
    done = Completion(as_ids([2]), np.zeros(1, np.float32), "stop", 0)
    return Group(Prompt(problem.prompt_ids, problem, len(grades), "1:0"), tuple(Rollout(done, grade) for grade in grades))


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_bonuses_make_no_success_and_their_lack_no_failure(threshold):
    def graded(response, **changes):
        return graders.grade(Answer("GSM8K", "?", "", response, "stop", "18"), Rubric(**changes))

    bonus = {"extra": ("format=0.1",)}
    wrong, right = graded("#### 19", **bonus), graded("#### 18 \n so 18", weight=0.3, extra=("length=10",))
    assert wrong.reward > 0 and right.reward < threshold + 0.3  # totals alone would tell it the wrong way round
    malformed = graded("no number", extra=("repetition=-1",))
    group = group_of(wrong, right, malformed, Grade(None, False, "error", parts=(("task", 1.0),)))
    assert group.successes(threshold) == (1, 3)
    assert [rollout.grade for rollout in group.failures(threshold)] == [wrong, malformed]


def test_structure_is_no_success():
    structured = "<think>t</think><answer>Rhine</answer>"
    grades = [
        qa.grade_search(Answer("hotpotqa", "?", "", response, "stop", ["Danube"]))
        for response in (structured, "<answer>Rhine</answer>", "x", structured.replace("Rhine", "Danube"))
    ]
    assert [grade.reward for grade in grades] == pytest.approx([0.2, 0.1, 0.0, 1.0])
    assert [grade.succeeds(0.0) for grade in grades] == [False, False, False, True]
    assert dict(grades[0].parts)["task"] == 0
