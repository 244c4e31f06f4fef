"""Grader of DS-1000: the code of the response runs against the row's tests, in the sandbox.

How code and tests are kept apart, and the verdict out of the code's reach, is the harness's business (`ds1000_harness`). The row
brings the tests as `extra["code_context"]`.
"""

import json
import os
import pathlib
import re
import secrets
import sys
import tempfile

from deepgrpo.rewards.agents import sandbox
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

HARNESS = pathlib.Path(__file__).with_name("ds1000_harness.py")
SECONDS = 120.0  # wall clock and CPU of one answer (the reference's)
DRAWS = re.compile(r"\b(?:matplotlib|seaborn)\b")  # tests that look at the state of the library, not at values

_FENCE = re.compile(r"```(?:(?P<python>(?:python|py)[23]?)\b|(?P<other>[\w+#.-]+)(?=[ \t]*(?:\n|$)))?", re.IGNORECASE)
_END = re.compile(r"^[ \t]*(?:#+[ \t]*)?END SOLUTION", re.MULTILINE)


def grade(answer: Answer, *, seconds: float = SECONDS, allow_network: bool = False) -> Grade:
    """1 if the tests pass. Must run where child processes may live for `seconds`: in a thread of the trainer's process, not in a
    grading worker, whose memory limit they would inherit.

    Raises:
      sandbox.SandboxUnavailable: code cannot be isolated here. KeyError: the row has no code_context.
    """
    code = extract_code(own_words(answer.response))
    if code is None:
        return Grade(0.0, False, "unformatted")
    try:
        outcome, verdict = run_tests(answer.extra["code_context"], code, seconds=seconds, allow_network=allow_network)
    except sandbox.SandboxError:
        return Grade(None, True, "sandbox", code)
    if verdict == "broken":
        return Grade(None, True, "broken_tests", code)
    if verdict == "passed" and outcome == "ok":
        return Grade(1.0, True, "right", code)
    return Grade(0.0, True, "timeout" if outcome in ("timeout", "cpu") else "wrong", code)


def extract_code(response: str) -> str | None:
    """The code of the last Python block, else of the last block without a language; None without a block.

    A block that is never closed reaches to the end. DS-1000's own marks (code tags, END SOLUTION) are cut off.
    """
    blocks: list[tuple[bool, str]] = []  # is Python, text
    fences, inside = list(_FENCE.finditer(response)), False
    for fence, end in zip(fences, [*(fence.start() for fence in fences), len(response)][1:], strict=True):
        named = bool(fence["python"] or fence["other"])
        if inside and not named:
            inside = False
            continue
        inside = True
        if fence["python"] or not named:
            blocks.append((bool(fence["python"]), response[fence.end() : end]))
    if not blocks:
        return None
    text = next((text for python, text in reversed(blocks) if python), blocks[-1][1])
    text = text.split("</code>")[0]
    if end := _END.search(text):
        text = text[: end.start()]
    return text.replace("<code>", "").removeprefix("\r").removeprefix("\n")


def run_tests(context: str, code: str, *, seconds: float, allow_network: bool = False) -> tuple[str, str]:
    """Returns the sandbox's outcome and the harness's verdict: passed, failed, broken, or "" when none came.

    The tests go in and the verdict comes out by files that only the harness process holds open; the verdict carries a word that
    only it was told.
    """
    nonce = secrets.token_hex(16)
    job = {"context": context, "code": code, "draws": bool(DRAWS.search(context)), "nonce": nonce}
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(json.dumps(job).encode())
        question.seek(0)
        descriptors = question.fileno(), answer.fileno()
        result = sandbox.run(
            [sys.executable, "-I", "-B", str(HARNESS), *map(str, descriptors)],
            seconds=seconds,
            cpu_seconds=max(1, int(seconds)),
            readonly=[str(HARNESS)],
            pass_fds=descriptors,
            allow_network=allow_network,
        )
        said = os.pread(answer.fileno(), 65536, 0)
    try:
        verdict = json.loads(said)
    except ValueError:
        return result.outcome, ""
    return result.outcome, verdict["verdict"] if verdict["nonce"] == nonce else ""
