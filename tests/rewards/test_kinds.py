"""Ways in which models write answers, kind by kind: a key, spellings of it, and what comes near without being it."""

import pytest

from deepgrpo.rewards import gsm8k
from deepgrpo.rewards import math as boxed
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.compare import Rules, same

RULES = Rules(fallback=boxed.by_math_verify)
KINDS = {
    "arguments without braces": [
        (r"3\sqrt{7}", [r"3\sqrt7", r"3\sqrt 7", r"\sqrt{63}"], [r"3\sqrt{17}", r"\sqrt37"]),
        (r"\frac{\sqrt{21}}{7}", [r"\frac{\sqrt21}7", r"\frac{\sqrt 21} 7"], [r"\frac{\sqrt2 1}7"]),
    ],
    "choices": [
        (
            "4",
            [r"\textbf{(C)}\ 4", r"(C)\ 4", r"\text{C. } 4", r"\text{Option C: }4", r"\mathrm{(C)}\;4"],
            [r"\textbf{(C)}\ 5", r"\textbf{(C)}"],
        ),
        (
            r"\text{(C)}",
            [r"\textbf{(C)}\ 4", r"\text{C. Line}", r"(C)\text{ Line}", "C)"],
            [r"\textbf{(B)}\ 4", r"\text{(B) or (C)}"],
        ),
    ],
    "sentences": [
        (
            r"\text{even}",
            [r"\text{The function is even.}", "It is an even function", r"f \text{ is even}"],
            [r"\text{The function is not even}", r"\text{neither even nor odd}", r"\text{The function is odd, not even}"],
        ),
        (
            "0.31",
            ["The growth rate is 0.31", r"\text{The growth rate is 0.31}", r"\text{Rate: } 0.31"],
            [r"\text{The growth rate is not 0.31}"],
        ),
        ("-25", [r"\text{The balance is -25 dollars}", "The balance is -25 dollars"], ["The balance is 25 dollars"]),
        (
            "15",
            [r"\text{There are }15\text{ ways}", r"\text{She has 15 apples}"],
            [r"\text{x is at most } 15", r"\text{more than 15}"],
        ),
    ],
    "remarks": [
        (
            "5",
            [
                r"5 \quad (x > 0)",
                r"5 \quad \text{(since } x > 0)",
                r"x = 5 \quad (\text{the other root is extraneous})",
                r"5 \qquad \checkmark",
            ]
            + [r"5 \quad (\text{since } n \text{ must be positive})", r"5 \; \text{(as } x>0)"],
            [r"5 \quad (\text{or } 6)", r"-5 \quad (x<0)", r"5 \quad 6"],
        ),
        ("n^2", [r"n^2, \quad n \ge 1", r"n^2 \quad \text{for all } n \geq 1"], [r"n^2, n^3"]),
        ("x > 3", ["x > 3"], ["x > 3, x < 5"]),
    ],
    "factors of one, trailing zeros": [
        (r"2^3 \cdot 3", [r"2^3 \cdot 3^1", r"2^3 \cdot 3 \cdot 1"], [r"2^3 \cdot 3 \cdot 11"]),
        ("72", ["72.000", r"72 \cdot 1", r"\$72.00"], ["72,000", "72.001", "720"]),
    ],
    "nothing": [
        (
            r"\emptyset",
            [r"\text{no solution}", r"\text{There are no real solutions.}", r"\{\}", r"\text{None}", r"x \in \varnothing"],
            ["0", r"\{0\}", r"\{\emptyset\}", r"\text{one solution}", r"\mathbb{R}"],
        ),
        (r"\text{no solution}", [r"\emptyset", r"\text{no real solutions}"], ["0", "3"]),
    ],
    "times of day": [
        (r"9:00 \text{ a.m.}", ["9:00 a.m.", r"\text{9 AM}", "9:00", "09:00"], [r"9:00 \text{ p.m.}", "21:00", "9:30"]),
        (r"4:30\text{ p.m.}", ["16:30", "4:30 PM"], ["14:30", r"\frac{4}{30}"]),
        (r"\text{noon}", [r"12:00\text{ p.m.}"], [r"12:00\text{ a.m.}"]),
    ],
    "primes and parts of units": [
        ("5''", ['5"', r"5^{\prime\prime}", r"5 \text{ seconds}"], ["5'", r"5 \text{ minutes}"]),
        (r"45^\circ 30'", [r"45.5^\circ"], [r"45^\circ 30''", r"45.3^\circ"]),
        (r"3.5", [r"3\text{ hours }30\text{ minutes}", "3 hours and 30 minutes"], []),
        (r"3", [], [r"3\text{ hours }30\text{ minutes}", "3 hours and 30 minutes", r"3\text{ feet and }6\text{ inches}"]),
    ],
    "members": [
        (
            "[-2,7]",
            [r"x \in [-2,7]", r"f(x) \in [-2,7]"],
            [r"-x \in [-2,7]", r"\sqrt{x} \in [-2,7]", r"2x \in [-2,7]", r"x \notin [-2,7]"],
        ),
        ("16,3,1,1", ["1, 16, 1, 3"], ["16,3,1", "16,16,3,1"]),
        ("1,-2", ["1, 1, -2"], ["1"]),
    ],
    "white space": [("5", ["5" + " " * 20_000, "x =" + "\n" * 15_000 + "5"], ["5" + " " * 20_000 + "6"])],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind):
    for key, right, wrong in KINDS[kind]:
        assert [a[:60] for a in right if not same(key, a, RULES)] == [], key
        assert [a[:60] for a in wrong if same(key, a, RULES)] == [], key


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("210", ["#### 3 hours and 30 minutes", "It takes 3 hours 30 minutes."], ["#### 3 hours and 20 minutes"]),
        ("3", ["#### 3 hours"], ["#### 3 hours and 30 minutes", "It is 3 hours, 30 minutes"]),
        ("-25", ["The balance is -25 dollars.", "#### -25"], ["The balance is 25", "30 -25"]),
        (
            "12",
            ["the answer: we add 5 and get 12", "### 1. Add\n5 + 5 = 10\n### 2. Add\n10 + 2 = 12", "\\fbox{12}"],
            ["### 3. Add"],
        ),
        ("72", ["#### 72.000", "####" + " " * 50_000 + "72"], ["The answer is 72. No, the answer is 73."]),
    ],
)
def test_kinds_of_final_numbers(key, right, wrong):
    for texts, reward in ((right, 1.0), (wrong, 0.0)):
        for text in texts:
            assert gsm8k.grade(Answer("GSM8K", "", "", text, "stop", key)).reward == reward, text[:60]
