"""The graders that check every step: reward, reasons, and how much was right."""

import numpy as np
import pytest

from deepgrpo.data import carry_chain
from deepgrpo.rewards import steps
from deepgrpo.rewards.answer import Answer

CHAIN = "57a6b9c8d7e9f6g8h7i9j6=?"
RIGHT = "a+6=63\nb+9=72\nc+8=80\nd+7=87\ne+9=96\nf+6=02\ng+8=10\nh+7=17\ni+9=26\nj+6=32\n####32"
SUM = "4 + 5 = 9\n9 + 3 = 12\n#### 12"


@pytest.mark.parametrize(
    ("response", "prefix", "reason", "completed", "right"),
    [
        (RIGHT, "", "right", True, len(RIGHT)),
        (RIGHT + "<|im_end|>", "", "right", True, len(RIGHT)),
        (RIGHT[4:], RIGHT[:4], "right", True, len(RIGHT) - 4),
        (RIGHT + "\n", "", "wrong", True, len(RIGHT)),
        (RIGHT + "32", "", "wrong", True, len(RIGHT)),
        ("", RIGHT, "empty", False, 0),
        ("<|im_end|>", RIGHT, "empty", False, 0),
        ("####32", "", "wrong", True, 0),  # the answer alone, without its steps
        (RIGHT.replace("f+6=02", "f+6=92"), "", "wrong", True, RIGHT.index("02\n")),  # later lines right, but not from here
        (RIGHT[:-6], "", "unformatted", False, len(RIGHT) - 6),
        (RIGHT[7:], RIGHT[:6] + "!", "wrong", True, 0),  # a wrong prefix leaves nothing that could be right
    ],
)
def test_a_carry_chain(response, prefix, reason, completed, right):
    verdict = steps.grade_carry_chain(Answer("carry_chain", CHAIN, prefix, response, "stop", "32"))
    assert (verdict.reward, verdict.reason, verdict.completed) == (float(reason == "right"), reason, completed)
    assert verdict.right_prefix == right


def test_a_wrong_key_is_an_error_and_not_a_label():
    with pytest.raises(ValueError, match="ground truth is '33', but the solution ends in '32'"):
        steps.grade_carry_chain(Answer("carry_chain", CHAIN, "", RIGHT, "stop", "33"))


def test_only_the_solution_earns_among_sloppy_ones():
    rng = np.random.default_rng(0)
    for row in carry_chain.problems("heldout", 50):
        text = carry_chain.sloppy_solution(row["question"], 0.3, rng)
        verdict = steps.grade_carry_chain(Answer("carry_chain", row["question"], "", text, "stop", row["answer"]))
        assert verdict.reward == (text == carry_chain.solution(row["question"]))
        assert verdict.completed and (verdict.answer == text[-2:])


@pytest.mark.parametrize(
    ("response", "prefix", "reason", "right"),
    [
        (SUM + "<|im_end|>", "", "right", len(SUM)),
        (SUM[10:], SUM[:10], "right", len(SUM) - 10),
        (SUM.replace(" ", ""), "", "right", len(SUM.replace(" ", ""))),
        ("4 + 5 = 8\n8 + 3 = 11\n#### 11", "", "wrong", len("4 + 5 =")),
        ("#### 12", "", "wrong", 0),
        (SUM + "\n#### 12", "", "wrong", len(SUM)),
        (SUM[:9], "", "unformatted", 9),
        ("", SUM, "empty", 0),
    ],
)
def test_a_sum(response, prefix, reason, right):
    assert steps.sum_solution([4, 5, 3]) == SUM
    verdict = steps.grade_sum(Answer("arithmetic", "4 + 5 + 3 = ?", prefix, response, "stop", "12"))
    assert (verdict.reward, verdict.reason, verdict.right_prefix) == (float(reason == "right"), reason, right)
