"""Expressions: what they parse to is known by its value."""

from fractions import Fraction

import pytest

from deepgrpo.rewards.expression import ParseError, TooComplex, equal, exact, parse, symbols


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
    ],
)
def test_exact_values(text, value):
    assert exact(parse(text)) == value


@pytest.mark.parametrize("text", [r"\sqrt 2", r"\pi", "x", "10000!", "9^{9^9}", "1/0"])
def test_no_exact_value(text):
    assert exact(parse(text)) is None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\log_{2/3} 2", r"\frac{\log 2}{\log 2 - \log 3}"),
        (r"\sin^2 x", r"1 - \cos^2 x"),
        (r"\cos(2t - \pi/4)", r"\frac{\cos 2t + \sin 2t}{\sqrt2}"),
        (r"8 \cdot 7^{-1/3}", r"\frac{8}{\sqrt[3]{7}}"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"2e^{i\pi/3}", r"1 + i\sqrt3"),
        (r"90\degree", r"\frac{\pi}{2}"),
        (r"\dot x_0 \omega", r"\omega \dot{x}_0"),
    ],
)
def test_equal(left, right):
    assert equal(parse(left), parse(right)) and equal(parse(right), parse(left))


@pytest.mark.parametrize(
    ("left", "right"), [(r"\sqrt{a^2}", "a"), ("I(0)", "0"), ("x_1", "x_2"), (r"\sqrt2", "1.41421356237309504880")]
)
def test_not_equal(left, right):
    assert not equal(parse(left), parse(right))


def test_symbols_of_a_tree():
    assert symbols(parse(r"\frac{\dot{x}_{0}}{\omega} \sin(\omega t) + 2\pi e")) == {"\\dotx_0", "\\omega", "t"}


@pytest.mark.parametrize("text", ["", "1,2", r"\frac{5}{}", "2 3", "3+", r"\sum_{k=1}^n k", "(1", "x=2", "#"])
def test_unknown_notation(text):
    with pytest.raises(ParseError):
        parse(text)


@pytest.mark.parametrize("text", ["(" * 60 + "1" + ")" * 60, "1+" * 3000 + "1", "9" * 5000, "10^99999999"])
def test_limits(text):
    with pytest.raises(TooComplex):
        tree = parse(text)
        equal(tree, parse(r"10^{999999999999}"))
