"""Hostile text: it runs no code, and the cost of a verdict grows with the length of the text and no faster.

A square law at these lengths would take minutes, and a power of a power for ever: the deadline is far beyond what a slow machine
needs, and far below both.
"""

import os

import pytest

from deepgrpo.rewards import math, strict, sympy_reader
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import grade
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.service import GradingService

SIZE = 30_000
PIECES = [
    *("ab", "1+", "@x[", "and ", "may 1 ", "<think>", "</search>", "<answer></think>", "Answer:", *"([%7| \n{#'\ufdfa"),
    *("\\boxed{", "\\boxed{5} and ", "#### 5\n", "1,", "1 ", "answer is ", "The answer: ", "\\text{", "\\begin{pmatrix} 1 &"),
    *("\\sqrt{", "\\frac{1}{", "<answer>", "<answer>5</answer>", "5 hours and ", "is ", "(C) ", "\\pm 1"),
]
TOWERS = [
    *("9**9**9**9", "9^{9^{9^9}}", "(x+1)^{99999999}", "\\binom{1000000000}{500000000}", "\\binom{x}{999}", "((9!)!)!"),
    "e^{e^{e^{e^{e}}}}",
]
KEYS = ("\\frac{14}{3}", "\\int_0^1 x\\,dx", "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}")  # our parser knows the first
SOURCES = {
    **{"MATH": ("\\boxed{%s}", ["\\frac{14}{3}"]), "GSM8K": ("#### %s", "5"), "wikitq": ("<answer>%s</answer>", "a|b")},
    **{"hotpotqa": ("<think>%s</think><answer>%s</answer>", ["a"]), "DABench": ("<answer>@x[%s]</answer>", [["x", "1"]])},
}


def test_the_cost_of_a_verdict_is_bounded():
    answers = [
        Answer(source, "", "", text, "stop", key)
        for source, (frame, key) in SOURCES.items()
        for piece in PIECES
        for body in [piece * (SIZE // len(piece))]
        for text in (frame.replace("%s", body), frame.replace("%s", body[:9000]), body + frame.replace("%s", "5"))
    ]
    answers += [Answer("MATH", "", "", f"\\boxed{{{tower}}}", "stop", [key]) for tower in TOWERS for key in KEYS]
    with GradingService(workers=2, deadline=60.0, sources=set(SOURCES)) as service:
        grades = [future.result(600) for future in [service.submit(answer) for answer in answers]]
    late = [(a.data_source, a.response[:30]) for a, g in zip(answers, grades, strict=True) if g.reward is None]
    assert late == [] and not [g for g in grades if g.reason == "timeout"]


#### Code


def in_octal(code: str) -> str:
    return "".join(f"\\{ord(char):03o}" for char in code)


def hostile(mark: str) -> list[str]:
    """Texts that would make the file `mark` if any part of them ran."""
    code = f"open({mark!r},'w').close()"
    strings = [in_octal(f"exec({code!r})"), "".join(f"\\u{ord(c):04x}" for c in code), "".join(f"\\x{ord(c):02x}" for c in code)]
    strings += [f"\\N{{LATIN SMALL LETTER E}}val({code!r})", code]
    texts = [f"{'{' * n}re('{string}'){'}' * n}" for string in strings for n in (0, 1, 25)]
    texts += [f're("{in_octal(code)}")', f"re('''{in_octal(code)}''')", f"ln('{in_octal(code)}')", f"sqrt('{in_octal(code)}')"]
    texts += [code, f"__import__('os').system('touch {mark}')", f"(lambda:{code})()", f"[{code} for i in [1]]", f"{{{code}}}"]
    texts += [f"f'{{{code}}}'", f"re(f'{{{code}}}')", "re.__class__.__base__.__subclasses__()", f"(i:={code})", f"id({code})"]
    texts += [f"\\text{{{code}}}", f"\\operatorname{{eval}}({code})", f"\\mathrm{{exec}}('{in_octal(code)}')", f"1)or({code}"]
    return texts + ["1.__class__", "9**9**9**9**9", "(" * 25 + "1" + ")" * 25, "i" * 100, "print"]


@pytest.mark.parametrize("mode", ["typed", "compat_fast", "compat_full"])
def test_answers_and_keys_that_are_code_leave_no_trace(mode, tmp_path, capfd):
    mark = str(tmp_path / "m")
    before = dict(os.environ), strict.equal, strict.same_algebra
    for text in hostile(mark):
        for source in ("MATH", "DeepScaleR"):
            answer = Answer(source, "q", "", f"\\boxed{{{text}}}", "stop", "\\frac{1}{2}")
            assert grade(answer, Rubric(grader=mode)).reward == 0, text
            assert grade(Answer(source, "q", "", "\\boxed{7}", "stop", text), Rubric(grader=mode)).reward in (0, None), text
    assert not os.path.exists(mark)
    assert (dict(os.environ), strict.equal, strict.same_algebra) == before
    assert capfd.readouterr().out == ""


NOT_ARITHMETIC = [
    *("open('x')", "sqrt.__class__", "__import__('os')", "lambda: 1", "[1]", "{1}", "(1, 2)", "1 if 1 else 2", "x", "f'{1}'"),
    *("1 < 2", "sqrt('1')", "Symbol(open)", "Integer('1')", "Symbol('x')('y')", "9**9**9", "factorial(10**5)", "sqrt(x=1)"),
]


@pytest.mark.parametrize("text", NOT_ARITHMETIC)
def test_only_arithmetic_is_evaluated(text):
    with pytest.raises((sympy_reader.Refused, TypeError)):
        sympy_reader.evaluate(text)


def test_sympy_itself_reads_through_it():
    """`sympify` of a text, which any function of sympy applies to its arguments, and math-verify's parser."""
    math.math_verify()
    import sympy

    assert sympy.sympify("2*(3+x)/4 - sqrt(pi)") == (3 + sympy.Symbol("x")) / 2 - sympy.sqrt(sympy.pi)
    assert sympy.parse_expr("1/2 + 3**2", evaluate=False).doit() == sympy.Rational(19, 2)
    for text in ("exec('1')", "open('x').read()", "().__class__"):
        with pytest.raises((sympy.SympifyError, sympy_reader.Refused)):
            sympy.sin(text)
