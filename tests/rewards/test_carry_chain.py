"""The step-checking grader: reward, reasons, and how much was right."""

import numpy as np
import pytest

from deepgrpo.data import carry_chain
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.carry_chain import depth, grade

QUESTION = "57a6b9c8d7e9f6g8h7i9j6=?"
RIGHT = "a+6=63\nb+9=72\nc+8=80\nd+7=87\ne+9=96\nf+6=02\ng+8=10\nh+7=17\ni+9=26\nj+6=32\n####32"


def graded(response, prefix="", key="32"):
    return grade(Answer("carry_chain", QUESTION, prefix, response, "stop", key))


@pytest.mark.parametrize(
    ("response", "prefix", "reason", "completed", "right"),
    [
        (RIGHT, "", "right", True, len(RIGHT)),
        (RIGHT + "<|im_end|>", "", "right", True, len(RIGHT)),
        (RIGHT[7:], RIGHT[:7], "right", True, len(RIGHT) - 7),
        (RIGHT[4:], RIGHT[:4], "right", True, len(RIGHT) - 4),
        (RIGHT + "\n", "", "wrong", True, len(RIGHT)),
        (RIGHT + "32", "", "wrong", True, len(RIGHT)),
        ("", "", "empty", False, 0),
        ("", RIGHT, "empty", False, 0),
        ("<|im_end|>", RIGHT, "empty", False, 0),
        ("####32", "", "wrong", True, 0),  # the answer alone, without its steps
        (RIGHT.replace("f+6=02", "f+6=92"), "", "wrong", True, RIGHT.index("02\n")),  # later lines right, but not from here
        (RIGHT[:-6], "", "unformatted", False, len(RIGHT) - 6),
        (RIGHT[7:], RIGHT[:6] + "!", "wrong", True, 0),  # a wrong prefix leaves nothing that could be right
        ("a+6=53\nb+9=72", "", "unformatted", False, 4),
    ],
)
def test_reward_reason_and_right_prefix(response, prefix, reason, completed, right):
    verdict = graded(response, prefix)
    assert (verdict.reward, verdict.reason, verdict.completed) == (float(reason == "right"), reason, completed)
    assert verdict.right_prefix == right


def test_depth_counts_steps_before_the_first_mistake():
    assert depth(QUESTION, RIGHT) == depth(QUESTION, RIGHT[:-2]) == 1
    assert depth(QUESTION, "") == depth(QUESTION, "a+6=53\nb+9=72\n") == depth(QUESTION, RIGHT[:6]) == 0
    assert depth(QUESTION, RIGHT.replace("c+8=80", "c+8=70")) == 0.2


def test_a_wrong_key_is_an_error_and_not_a_label():
    with pytest.raises(ValueError, match="ground truth is '33', but the solution ends in '32'"):
        graded(RIGHT, key="33")


def test_only_the_solution_earns_among_sloppy_ones():
    rng = np.random.default_rng(0)
    for row in carry_chain.problems("heldout", 50):
        text = carry_chain.sloppy_solution(row["question"], 0.3, rng)
        verdict = grade(Answer("carry_chain", row["question"], "", text, "stop", row["answer"]))
        assert verdict.reward == (text == carry_chain.solution(row["question"]))
        assert verdict.completed and (verdict.answer == text[-2:])
