"""Text that is evaluated as arithmetic runs no code, whatever it is made of."""

import os

import pytest

from deepgrpo.rewards import math, strict, sympy_reader
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import grade
from deepgrpo.rewards.rubric import Rubric


def in_octal(code: str) -> str:
    return "".join(f"\\{ord(char):03o}" for char in code)


def hostile(mark: str) -> list[str]:
    """Texts that would make the file `mark` if any part of them ran."""
    code = f"open({mark!r},'w').close()"
    strings = [in_octal(f"exec({code!r})"), "".join(f"\\u{ord(c):04x}" for c in code), "".join(f"\\x{ord(c):02x}" for c in code)]
    strings += [f"\\N{{LATIN SMALL LETTER E}}val({code!r})", code]
    texts = [f"{'{' * n}re('{string}'){'}' * n}" for string in strings for n in (0, 1, 400)]
    texts += [f're("{in_octal(code)}")', f"re('''{in_octal(code)}''')", f"ln('{in_octal(code)}')", f"sqrt('{in_octal(code)}')"]
    texts += [code, f"__import__('os').system('touch {mark}')", f"(lambda:{code})()", f"[{code} for i in [1]]", f"{{{code}}}"]
    texts += [f"f'{{{code}}}'", f"re(f'{{{code}}}')", "re.__class__.__base__.__subclasses__()", f"(i:={code})", f"id({code})"]
    texts += [f"\\text{{{code}}}", f"\\operatorname{{eval}}({code})", f"\\mathrm{{exec}}('{in_octal(code)}')", f"1)or({code}"]
    return texts + ["1.__class__", "9**9**9**9**9", "(" * 150 + "1" + ")" * 150, "i" * 500, "print"]


@pytest.mark.parametrize("mode", ["typed", "compat_fast", "compat_full"])
def test_hostile_answers_and_keys_leave_no_trace(mode, tmp_path, capfd):
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


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "sqrt.__class__",
        "__import__('os')",
        "lambda: 1",
        "[1]",
        "{1}",
        "(1, 2)",
        "1 if 1 else 2",
        "x",
        "f'{1}'",
        "1 < 2",
    ]
    + ["sqrt('1')", "Symbol(open)", "Integer('1')", "Symbol('x')('y')", "9**9**9", "factorial(10**5)", "max(1, 2)", "sqrt(x=1)"],
)
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
