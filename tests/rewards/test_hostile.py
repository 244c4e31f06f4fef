"""Hostile text: the cost of a verdict grows with the length of the text and no faster.

A square law at these lengths would take minutes, and a power of a power for ever: the deadline is far beyond what a slow machine
needs, and far below both.
"""

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.service import GradingService

SIZE = 60_000
PIECES = [
    " ",
    "\n",
    "{",
    "\\boxed{",
    "\\boxed{5} and ",
    "#",
    "#### 5\n",
    "1,",
    "1 ",
    "answer is ",
    "The answer: ",
    "\\text{",
    "'",
] + ["\\sqrt{", "\\frac{1}{", "<answer>", "<answer>5</answer>", "5 hours and ", "is ", "(C) ", "\\pm 1", "\\begin{pmatrix} 1 & "]
TOWERS = ["9^{9^{9^9}}", "(x+1)^{99999999}", "\\binom{1000000000}{500000000}", "\\binom{x}{999}", "((9!)!)!", "e^{e^{e^{e^{e}}}}"]
SOURCES = {"MATH": ("\\boxed{%s}", ["\\frac{14}{3}"]), "GSM8K": ("#### %s", "5"), "wikitq": ("<answer>%s</answer>", "a|b")}


def test_the_cost_of_a_verdict_is_bounded():
    answers = [
        Answer(source, "", "", text, "stop", key)
        for source, (frame, key) in SOURCES.items()
        for piece in PIECES
        for body in [piece * (SIZE // len(piece))]
        for text in (frame % body, frame % body[:9000], body + frame % "5")
    ]
    keys = ("\\frac{14}{3}", "\\int_0^1 x\\,dx", "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}")  # the parser knows the first
    answers += [Answer("MATH", "", "", f"\\boxed{{{tower}}}", "stop", [key]) for tower in TOWERS for key in keys]
    with GradingService(workers=2, deadline=60.0, sources=set(SOURCES)) as service:
        grades = [future.result(600) for future in [service.submit(answer) for answer in answers]]
    late = [
        (a.data_source, a.response[:30])
        for a, g in zip(answers, grades, strict=True)
        if g.reward is None or g.reason == "timeout"
    ]
    assert late == []
