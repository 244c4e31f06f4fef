"""Keys against answers (pairs.txt): what is the same, what is not, and what may never change a verdict; expressions by value."""

import pathlib
import random
import re
from fractions import Fraction

import pytest

from deepgrpo.rewards.compare import Rules, same
from deepgrpo.rewards.expression import ParseError, TooComplex, equal, exact, parse, symbols
from deepgrpo.rewards.math import by_math_verify


def read_pairs(name):
    """(key, answer, whether they say the same) by kind."""
    kinds, kind, key = {}, "", ""
    for line in pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[2:]:
        if line.startswith("# "):
            kind = line[2:]
        elif line.startswith(("  = ", "  ! ")):
            kinds.setdefault(kind, []).append((key, line[4:], line[2] == "="))
        else:
            key = line
    return kinds


PAIRS = read_pairs("pairs.txt")
RULES = Rules(fallback=by_math_verify)


@pytest.mark.parametrize("kind", PAIRS)
def test_same(kind):
    assert [(key, answer) for key, answer, label in PAIRS[kind] if same(key, answer, RULES) != label] == []


@pytest.mark.parametrize("kind", PAIRS)
def test_spelling_does_not_change_a_verdict(kind):
    for key, answer, _ in (pair for pair in PAIRS[kind] if pair[2]):
        for changed in (f"${answer}$", f" {answer} ", answer.replace(r"\frac", r"\dfrac"), f"{answer}.", rf"\({answer}\)"):
            assert same(key, changed, RULES), (key, changed)


def test_a_changed_digit_or_variable_is_never_accepted():
    noise = random.Random(0)
    for key in {pair[0] for pair in PAIRS["forms"]}:
        for match in re.finditer(r"\d|(?<![A-Za-z\\])[a-z](?![A-Za-z])", key):
            new = str((int(match.group()) + noise.randrange(1, 9)) % 10) if match.group().isdigit() else "w"
            changed = key[: match.start()] + new + key[match.end() :]
            assert changed == key or not same(key, changed, Rules()), (key, changed)


def test_what_a_source_or_a_question_allows():
    measured, free = Rules(measured=True), Rules(free_constant=True)
    assert same("9.6", "9.64", measured) and same(r"7 \times 10^{37}", "7.3e37", measured)
    assert not same("9.6", "9.7", measured) and not same("6630", "6630.4", measured) and not same("9.6", "9.64", Rules())
    assert same("e^t + ce^{-2t}", "e^t + Ce^{-2t}", free) and not same("e^t + ce^{-2t}", "e^t + Ce^{-2t}", Rules())
    assert same("52", "52_8", Rules(bases=True)) and not same("42", "52_8", Rules(bases=True)) and not same("52", "52_8", Rules())


def test_leaves_that_the_parser_does_not_know_go_to_the_fallback():
    asked = []
    rules = Rules(fallback=lambda key, answer: bool(asked.append((key, answer))) or True)
    assert same(r"\int_0^1 x\,dx", r"\int_0^1 t\,dt", rules) and len(asked) == 1


def test_random_text_never_raises():
    noise = random.Random(1)
    pieces = [
        *"0123456789abcxyz+-*/^_{}()[]|!,;=<>$%& .'\u2264\x00",
        "\\frac",
        "\\sqrt",
        "\\pm",
        "\\cup",
        "\\text{",
        "\\\\",
        "\\in",
    ]
    for _ in range(400):
        text = "".join(noise.choices(pieces, k=noise.randrange(1, 25)))
        for pair in ((text, "5"), ("(3,4]", text), (text, text[::-1])):
            try:
                same(*pair, Rules())
            except TooComplex:
                pass


#### Expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac12", Fraction(1, 2)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        ("-1.25e-2", Fraction(-1, 80)),
        (r"2021 \cdot 505 / 5", 204121),
        (r"{14 \over 3}", Fraction(14, 3)),
        (r"\binom{7}{3}/2^6", Fraction(35, 64)),
        ("5!", 120),
        ("-3^2", -9),
        ("2^-3", Fraction(1, 8)),
        ("|2-5|", 3),
        (r"\lfloor 7/2 \rfloor", 3),
        ("4.5*10^33", 45 * 10**32),
        *((text, None) for text in (r"\sqrt 2", r"\pi", "x", "10000!", "9^{9^9}", "1/0")),
    ],
)
def test_exact_values(text, value):
    assert exact(parse(text)) == value


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        (r"\log_{2/3} 2", r"\frac{\log 2}{\log 2 - \log 3}", True),
        (r"\sin^2 x", r"1 - \cos^2 x", True),
        (r"\sin^{-1} x", r"\arcsin x", True),
        (r"\cos(2t - \pi/4)", r"\frac{\cos 2t + \sin 2t}{\sqrt2}", True),
        (r"8 \cdot 7^{-1/3}", r"\frac{8}{\sqrt[3]{7}}", True),
        (r"\sqrt[3]{-8}", "-2", True),
        (r"2e^{i\pi/3}", r"1 + i\sqrt3", True),
        (r"90\degree", r"\frac{\pi}{2}", True),
        (r"\dot x_0 \omega", r"\omega \dot{x}_0", True),
        (r"\sqrt{a^2}", "a", False),
        ("I(0)", "0", False),
        ("x_1", "x_2", False),
        (r"\sqrt2", "1.41421356237309504880", False),
    ],
)
def test_equal(left, right, alike):
    assert equal(parse(left), parse(right)) == equal(parse(right), parse(left)) == alike


def test_symbols_of_a_tree():
    assert symbols(parse(r"\frac{\dot{x}_{0}}{\omega} \sin(\omega t) + 2\pi e")) == {"\\dotx_0", "\\omega", "t"}


@pytest.mark.parametrize("text", ["", "1,2", r"\frac{5}{}", "2 3", "3+", r"\sum_{k=1}^n k", "(1", "x=2", "#"])
def test_unknown_notation(text):
    with pytest.raises(ParseError):
        parse(text)


@pytest.mark.parametrize("text", ["(" * 60 + "1" + ")" * 60, "1+" * 3000 + "1", "9" * 5000, "10^99999999"])
def test_limits(text):
    with pytest.raises(TooComplex):
        equal(parse(text), parse(r"10^{999999999999}"))
