"""Keys against answers: what is the same, what isn't, and what may never change a verdict."""

import random
import re

import pytest

from deepgrpo.rewards.compare import Rules, same
from deepgrpo.rewards.expression import TooComplex

RIGHT = [
    (r"\frac{14}{3}", r"4\frac23"),
    (r"\frac{14}{3}", r"\frac{14}{3} \approx 4.67"),
    (r"3\sqrt{13}", "3√13"),
    (r"1 \pm \sqrt{19}", r"\{1-\sqrt{19}, 1+\sqrt{19}\}"),
    ("1,-2", r"x = 1 \text{ or } x = -2"),
    ("52_8", r"52_{\text{eight}}"),
    (r"10,\!080", "10 080"),
    (r"\text{(C)}", r"\text{Option C}"),
    ("(3,4]", r"3 < x \le 4"),
    (r"(0,9) \cup (9,36)", r"(0,36)\setminus\{9\}"),
    (r"(-\infty, 0]", r"x \le 0"),
    ("5x - 7y + 11z + 4 = 0", "0 = 4 + 5x + 11z - 7y"),
    ("y = 2x + 3", "3 + 2x"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\frac13\begin{bmatrix} -1 \\ 2 \end{bmatrix}"),
    (r"864 \mbox{ inches}^2", r"864 \text{ square inches}"),
    (r"\$32,\!348", r"32348\text{ dollars}"),
    ("62.5%", "0.625"),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{(n!)^2}"),
    (r"\frac{dx}{dt} = kx - a", "x' = -a + kx"),
    ("$69$,$84$", "84, 69"),
    (r"\text{east}", "East"),
    (r"90^\circ", "90º"),
    (r"90^\circ", r"90^{\text{o}}"),
    ("52_8", r"52 \text{ in base } 8"),
    ("52_8", r"{52}_{\text{octal}}"),
    (r"\cot x", r"\operatorname{cot} x"),
    (r"1 \pm \sqrt{19}", r"1 +/- \sqrt{19}"),
    ("1,-2", r"\begin{cases} x = 1 \\ x = -2 \end{cases}"),
    (r"(2,\infty)", r"\left]2, \infty\right["),
    ("(3,4]", r"x > 3 \text{ and } x \le 4"),
    (r"(0,9) \cup (9,36)", r"0 < x < 36, x \ne 9"),
    (r"(0,9) \cup (9,36)", "(0,9) U (9,36)"),
    (r"\frac43", "1.(3)"),
    (r"8.7 \times 10^{8}", "8.7 x 10^8"),
    (r"\frac{dx}{dt} = kx - a", r"\dot{x} = kx - a"),
    ("5.4 \\text{ cents}", "5.4¢"),
    ("x=5", r"2x = 10 \implies x = 5"),
]
WRONG = [
    (r"\frac{35}{64}", "0.547"),
    (r"3\sqrt{13}", "10.8167"),
    ("x=5", r"5 \text{ or } 6"),
    ("52_8", "528"),
    ("52_8", "42"),
    ("52_8", r"52\text{ (base 9)}"),
    ("5", "-x = 5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}+1"),
    (r"(a+5)(b+2)", "(c+5)(b+2)"),
    ("(-2,1)", "(1,-2)"),
    (r"(2,\infty)", r"[2,\infty)"),
    (r"15\mbox{ cm}^2", r"15\text{ m}^2"),
    (r"\$36", r"36\%"),
    (r"2^{1009}", r"2^{1009}+10^{-400}"),
    ("0", "2x - 4 = 0"),
    ("6", "5 = 6"),
    (r"\frac{1}{2004!}", r"\frac{1}{2005!}"),
    (r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor\sqrt{n+1}\rfloor"),
    (r"\text{even}", r"\text{neve}"),
    (r"\{1\}", r"\varnothing"),
    ("x", "|x|"),
]
HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "1+" * 4000 + "1",
    "(" * 300 + "5",
    r"\sqrt{" * 90 + "2" + "}" * 90,
    "7" * 5000,
    "ab" * 2000,
]


@pytest.mark.parametrize(("key", "answer"), RIGHT)
def test_same(key, answer):
    assert same(key, answer, Rules())


@pytest.mark.parametrize(("key", "answer"), WRONG)
def test_not_same(key, answer):
    assert not same(key, answer, Rules())


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: text[:12])
def test_hostile_answers_are_refused(answer):
    try:
        assert not same(r"\frac{14}{3}", answer, Rules())
    except TooComplex:
        pass


def test_measured_keys_match_within_half_a_unit_of_their_last_digit():
    measured = Rules(measured=True)
    assert same("9.6", "9.64", measured) and same(r"7 \times 10^{37}", "7.3e37", measured)
    assert not same("9.6", "9.7", measured) and not same("6630", "6630.4", measured) and not same("9.6", "9.64", Rules())


def test_the_name_of_the_constant_of_integration_is_free_only_where_the_question_has_one():
    assert same("e^t + ce^{-2t}", "e^t + Ce^{-2t}", Rules(free_constant=True))
    assert not same("e^t + ce^{-2t}", "e^t + Ce^{-2t}", Rules())


def test_leaves_that_the_parser_does_not_know_go_to_the_fallback():
    asked = []
    rules = Rules(fallback=lambda key, answer: bool(asked.append((key, answer))) or True)
    assert same(r"\int_0^1 x\,dx", r"\int_0^1 t\,dt", rules) and len(asked) == 1


@pytest.mark.parametrize(("key", "answer"), RIGHT)
def test_spelling_does_not_change_a_verdict(key, answer):
    for changed in (f"${answer}$", f" {answer} ", answer.replace(r"\frac", r"\dfrac"), f"{answer}.", rf"\({answer}\)"):
        assert same(key, changed, Rules()), changed


def test_a_changed_digit_or_variable_is_never_accepted():
    noise = random.Random(0)
    for key, _ in RIGHT:
        for match in re.finditer(r"\d|(?<![A-Za-z\\])[a-z](?![A-Za-z])", key):
            new = str((int(match.group()) + noise.randrange(1, 9)) % 10) if match.group().isdigit() else "w"
            changed = key[: match.start()] + new + key[match.end() :]
            assert changed == key or not same(key, changed, Rules()), (key, changed)


def test_random_text_never_raises():
    noise = random.Random(1)
    pieces = [
        *"0123456789abcxyz+-*/^_{}()[]|!,;=<>$%& .'",
        r"\frac",
        r"\sqrt",
        r"\pm",
        r"\cup",
        r"\text{",
        r"\\",
        r"\in",
        "\u2264",
        "\x00",
    ]
    for _ in range(400):
        text = "".join(noise.choices(pieces, k=noise.randrange(1, 25)))
        for pair in ((text, "5"), ("(3,4]", text), (text, text[::-1])):
            try:
                same(*pair, Rules())
            except TooComplex:
                pass
