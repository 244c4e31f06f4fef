"""DS-1000: code in, verdict out, and no way for the code to write it."""

import functools
import io
import json
import pickle

import numpy  # noqa: F401  the harness's cases need it
import pytest

from deepgrpo.rewards.agents import ds1000, ds1000_harness, sandbox
from deepgrpo.rewards.answer import Answer
from tests.conftest import golden_files

SUM = "def test_execution(code):\n    env = {'x': [1, 2, 3]}\n    exec(code, env)\n    assert env['result'] == 6\n"
ARRAYS = """
import numpy as np
def test_execution(code):
    env = {"a": np.arange(6).reshape(2, 3)}
    exec("import numpy as np\\n" + code, env)
    np.testing.assert_array_equal(env["result"], np.arange(6).reshape(2, 3).T)
"""
NAMES = """
import contextlib, io
def test_execution(code):
    env, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<code>", "exec"), env)
    assert printed.getvalue() == "hello\\n"
    assert env["square"](3) == 9 and list(env["count"](2)) == [0, 1] and eval("square(2)", env) == 4
    stack = env["Stack"]()
    stack.push(4)
    assert len(stack) == 1 and stack.items[0] == 4
    try:
        exec("1 / 0", env)
    except ZeroDivisionError:
        return
    raise AssertionError("no error")
"""
CLASSES = """
print("hello")
def square(v): return v * v
def count(n):
    for i in range(n): yield i
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
"""
OWN_SPACE = """
def check(value): return abs(value - 9) < 1
def test_execution(code):
    exec(code, globals())
    assert check(result)
"""
PLOT = """
import matplotlib.pyplot as plt
def test_execution(code):
    for title in ("one", "two"):
        plt.figure(); plt.plot([0], [0]); plt.close()
        exec("import matplotlib.pyplot as plt\\n" + code + "\\nplt.savefig('output.png')\\nresult = None", {"title": title})
        ax = plt.gca()
        assert ax.get_title() == title and ax.get_lines()[0].get_linestyle() == "--"
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["y"]
        assert open("output.png", "rb").read(4) == b"\\x89PNG" and len(plt.get_fignums()) == 1
        plt.close("all")
"""
DRAWN = "plt.plot([1, 2], [1, 4], '--', label='y')\nplt.legend(loc='upper left')\nplt.title(title)"
FIND = """
import gc, sys
frame = sys._getframe()
while frame:
    for space in (frame.f_locals, frame.f_globals):
        for name, value in list(space.items()):
            if name in ("words", "test_execution", "exec_test", "run_tests"): space[name] = lambda *a, **k: None
            if isinstance(value, str) and len(value) == 32: print(value)
    frame = frame.f_back
"""
ALWAYS = "class E:\n    def __eq__(self, other): return True\n"


@functools.cache
def isolated() -> bool:
    try:
        return bool(sandbox.wall_level())
    except sandbox.SandboxUnavailable:
        return False


pytestmark = pytest.mark.skipif(not isolated(), reason="code cannot be isolated on this machine")


def graded(response, context, finish="stop", seconds=20.0):
    return ds1000.grade(Answer("ds1000", "", "", response, finish, None, {"code_context": context}), seconds=seconds)


def golden():
    lines = [json.loads(line) for path in golden_files("rewards_*.jsonl") for line in path.read_text().splitlines()]
    cases = [pytest.param(case, id=case["id"]) for case in lines if case["grader"] == "ds1000"]
    return cases or [pytest.param(None, marks=pytest.mark.skip(reason="golden cases are absent"), id="absent")]


@pytest.mark.parametrize("case", golden())
def test_golden(case):
    seconds = 2.0 if "infinite-loop" in case["tags"] else 20.0
    grade = graded(case["response"], case["extra"]["code_context"], seconds=seconds)
    if case["human"]["verdict"] != "ambiguous":
        assert grade.reward == case["human"]["expected_reward"], grade
        assert grade.completed == (case["human"]["verdict"] != "unformatted")


@pytest.mark.parametrize(
    ("context", "code"),
    [
        (ARRAYS, "result = a.T"),
        (NAMES, CLASSES),
        (OWN_SPACE, "result = 9"),
        (SUM, "x.append(0)\nresult = sum(x)"),
        (SUM, "import os\nresult = sum(x)  # \u00e9 \u4e2d"),
        ("# matplotlib\n" + SUM, "result = sum(x)"),
        (PLOT, DRAWN),
        (PLOT, "plt.minorticks_on(); plt.grid(True); plt.scatter([1], [1], c=[1]); plt.bar([1], [1], hatch='/')\n" + DRAWN),
        ("result = None\ndef test_execution(code):\n    exec(code, globals())\n    assert result == 9\n", "result = 9"),
    ],
)
def test_right_code_passes(context, code):
    assert graded(f"```python\n{code}\n```", context).reward == 1.0


@pytest.mark.parametrize(
    ("context", "code"),
    [
        (ARRAYS, "result = a"),
        (SUM, ALWAYS + "result = E()"),
        (SUM, "class E(int):\n    def __eq__(self, other): return True\nresult = E(1)"),
        (SUM, "from unittest.mock import ANY as result"),
        (ARRAYS, ALWAYS + "result = np.array([[E()] * 2] * 3)"),
        (ARRAYS, "class E(np.ndarray):\n    def __eq__(self, other): return np.ones(1, bool)\nresult = a.view(E)"),
        (SUM, "raise SystemExit(0)"),
        (SUM, "import os; os._exit(0)"),
        (SUM, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"),
        (SUM, "import builtins; builtins.AssertionError = int; builtins.exec = print; result = 5"),
        (SUM, 'import os\nfor f in range(64):\n  try: os.write(f, b\'{"verdict": "passed"}\')\n  except OSError: pass'),
        (SUM, "class R:\n    def __reduce__(self): return (eval, ('__import__(\"os\")._exit(0)',))\nresult = R()"),
        (SUM, "import sys\nsys._getframe(1).f_globals['test_execution'] = print\nresult = 5"),
        (SUM, "open(f'/proc/{__import__(\"os\").getppid()}/mem', 'r+b'); result = 6"),
        (OWN_SPACE, "def abs(v): return 0\nresult = 100"),
        (OWN_SPACE, "def test_string(code): pass\ndef check(v): return True\nresult = 100"),
        (OWN_SPACE + "def test_string(code):\n    assert 'sum' in code\n", "def test_string(code): pass\nresult = 9"),
        (PLOT, DRAWN.replace("--", ":")),
        (PLOT, DRAWN.replace("(title)", "('one')")),
        (PLOT, FIND + DRAWN.replace("--", ":")),
        (
            PLOT,
            FIND
            + "import matplotlib.axes; matplotlib.axes.Axes.get_title = lambda self: 'one'\n"
            + DRAWN.replace("title)", "'x')"),
        ),
        ("# matplotlib\n" + SUM, FIND + "result = 5"),
        ("# matplotlib\n" + SUM, "import os; os._exit(0)"),
        ("# matplotlib\n" + SUM, "raise SystemExit(0)"),
    ],
)
def test_wrong_code_and_tricks_fail(context, code):
    grade = graded(f"```python\n{code}\n```", context)
    assert (grade.reward, grade.completed) == (0.0, True), grade


@pytest.mark.parametrize(
    "context", ["import no_such_module_here\n" + SUM, "def test_execution(code:\n  pass", "x = 1", "1 / 0\n" + SUM]
)
def test_faults_of_the_tests_are_no_verdict(context):
    grade = graded("```python\nresult = 6\n```", context)
    assert (grade.reward, grade.reason) == (None, "broken_tests")


def test_a_figure_that_cannot_be_brought_over_is_no_verdict():
    grade = graded(f"```python\n{DRAWN}\nplt.gca().xaxis.set_major_formatter(lambda x, at: 'x')\n```", PLOT)
    assert (grade.reward, grade.reason) == (None, "broken_tests")


@pytest.mark.parametrize(
    "attack",
    [
        b"cmatplotlib.figure\nFigure\n(N}X\x08\0\0\0suptitlecbuiltins\nlist\nstb.",  # an attribute of a class
        b"cbuiltins\ngetattr\n(cmatplotlib.figure\nFigure\nX\x08\0\0\0suptitletR.",  # of a class, not of a drawn object
        b"cmatplotlib.animation\nFFMpegWriter\n)R.",
        b"cmatplotlib.pyplot\nsavefig\n(X\x01\0\0\0xtR.",
        b"cfunctools\npartial\n(cbuiltins\nlist\ntR)R.",
        b"cos\nsystem\n(X\x01\0\0\0xtR.",
    ],
)
def test_what_changes_the_tests_own_process_is_not_loaded(attack):
    with pytest.raises(pickle.UnpicklingError):
        ds1000_harness.FigureUnpickler(io.BytesIO(attack)).load()


def test_a_module_that_only_the_code_wants_is_its_fault():
    assert graded("```python\nimport no_such_module_here\n```", SUM).reward == 0.0


def test_sandbox_failure_is_no_verdict(monkeypatch):
    def fails(*_, **__):
        raise sandbox.SandboxError("planted")

    monkeypatch.setattr(sandbox, "run", fails)
    grade = graded("```python\nresult = 6\n```", SUM)
    assert (grade.reward, grade.reason) == (None, "sandbox")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("no block", None),
        ("```python\na\n```", "a\n"),
        ("```py\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```a = 1```", "a = 1"),
        ("```python a = 1```", " a = 1"),
        ("```bash\nls\n```", None),
        ("```python\na\n```\nthen\n```\nout\n```", "a\n"),
        ("```\nx\n```\nthen\n```\na\n```", "a\n"),
        ("```python\na\n```\nthen\n```python\nb", "b"),
        ("```python\nold\n```python\nnew\n```", "new\n"),
        ("```python\n<code>\na\n</code>\nrest\n```", "\na\n"),
        ("```python\na\n### END SOLUTION\nb\n```", "a\n"),
        ("```python\na\n```<|im_end|>```python\nb\n```", "a\n"),
    ],
)
def test_extraction(response, code):
    assert ds1000.extract_code(ds1000.own_words(response)) == code


def test_values_come_back_by_an_allow_list():
    import pickle

    plain = [{"a": (1, 2.5, None)}, {3}, numpy.arange(3.0), numpy.float32(2), ValueError("x")]
    for value in plain:
        assert repr(ds1000_harness.load(pickle.dumps(value))) == repr(value)
    for value in (print, eval, numpy.sum, pytest.Item, json.loads):
        with pytest.raises(pickle.UnpicklingError, match="not a plain value"):
            ds1000_harness.load(pickle.dumps(value))
