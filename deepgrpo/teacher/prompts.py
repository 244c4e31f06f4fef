"""What the teacher is asked, and how its replies are read.

Instructions come first and are the same for every request (a server can reuse their prefix); the slots follow in tags, each text
exactly as it is between one newline after the opening tag and one before the closing tag, so that `read_slots` gets it back byte
for byte.
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

ERROR_HEADER, SOLUTION_HEADER = "[ERROR_DESCRIPTION]", "[CORRECT_SOLUTION]"
INDEX_KEY = "first_error_step_index"

PROBLEM, FORM, VERIFIED, STUDENT = "problem", "answer_form", "verified_start", "student_text"


class ParseError(ValueError):
    """A reply holds nothing usable."""


#### Templates

_CUT = """\
Proceed like this.

1. Solve the problem yourself first, without looking at the student's text.
2. Read the student's text from its beginning and find the earliest spot from which it cannot be relied on: a mistake, a claim
   that is not justified or not clear, a step in a wrong direction, or anything that a correct solver would have to take back
   later.
3. Write {whole}.
   It begins with a verbatim copy of the student's text up to just before that spot: byte for byte, with the same line breaks,
   spaces and symbols. From there on it is entirely yours and leads to a final answer, in the form that the problem asks for
   (<answer_form>, if that is given, says it once more).

Keep as much of the student's text as is sound, and not one piece that is faulty or harmful. If the text is faulty from its very
first word, keep nothing. After the cut use none of the student's material.

The joint must not be visible. Do not apologise, do not announce a correction, do not start over, do not mention the student;
nothing that you write may overrule or reinterpret the part that you kept. The result has to read as one complete solution by one
author.
"""

_OUTPUT = f"""\
Reply in plain text with exactly two sections. The first starts with the line {ERROR_HEADER} and says in a sentence or two
what is wrong with the student's text. The second starts with the line {SOLUTION_HEADER} and holds the solution and nothing else:
no JSON, no code fence around it, no remarks after it.
"""

_PLAIN = (
    "A student tried to solve a problem and failed. You turn the attempt into a right solution.\n\n"
    + _CUT.format(whole="a whole solution")
    + "\n"
    + _OUTPUT
)

_PREFIX_AWARE = (
    "A student tried to solve a problem and failed. You turn the attempt into a right solution.\n\n"
    f"You are given the problem and, possibly, the start of a solution in <{VERIFIED}>. That start has been verified. It is "
    "fixed: neither judge nor change it, and do not repeat it. The student's text goes on exactly where it stops, and so must "
    "your solution.\n\n"
    + _CUT.format(whole="the rest of the solution, from where the verified start stops to the end")
    + "\n"
    + _OUTPUT
)


def _ask(instructions: str, slots: Sequence[tuple[str, str]]) -> str:
    return instructions + "".join(f"\n<{tag}>\n{text}\n</{tag}>\n" for tag, text in slots)


def plain_prompt(problem: str, student: str, form: str = "") -> str:
    """Asks for a corrected solution of a response to the plain problem.

    Args:
      problem: all that the student is told. form: how a final answer is written, where the problem does not say it.
    """
    return _ask(_PLAIN, _slots(problem, form, "", student))


def prefix_aware_prompt(problem: str, verified: str, student: str, form: str = "") -> str:
    """The same for a response that continues `verified`, a locked prefix ("" at a root)."""
    return _ask(_PREFIX_AWARE, _slots(problem, form, verified, student))


def _slots(problem: str, form: str, verified: str, student: str) -> list[tuple[str, str]]:
    optional = [(tag, text) for tag, text in ((FORM, form), (VERIFIED, verified)) if text]
    return [(PROBLEM, problem), *optional, (STUDENT, student)]


class Slots(NamedTuple):
    problem: str
    verified: str
    student: str


_FILLED = re.compile(
    rf"\n<{PROBLEM}>\n(?P<problem>.*?)\n</{PROBLEM}>\n"
    rf"(?:\n<{FORM}>\n[^\n]*\n</{FORM}>\n)?"
    rf"(?:\n<{VERIFIED}>\n(?P<verified>.*?)\n</{VERIFIED}>\n)?"
    rf"\n<{STUDENT}>\n(?P<student>.*)\n</{STUDENT}>\n\Z",
    re.DOTALL,
)


def read_slots(prompt: str) -> Slots:
    """The inverse of both prompts (for texts that hold none of the tags).

    Raises:
      ParseError: `prompt` was made by neither.
    """
    match = _FILLED.search(prompt)
    if match is None:
        raise ParseError(f"not a correction prompt of deepgrpo.teacher.prompts: it ends in {prompt[-120:]!r}")
    return Slots(match["problem"], match["verified"] or "", match["student"])


#### Replies

_LINE = r"^[\ufeff #*_>`\t]*\[{}\]"  # a header in Markdown's dress
_SOLUTION_LINE = re.compile(_LINE.format(r"CORRECT\\?_SOLUTION") + r"[*_:`]*(?:[ \t]*\n|[ \t]+|\Z)", re.MULTILINE)
_ERROR_LINE = re.compile(_LINE.format(r"ERROR\\?_DESCRIPTION"), re.MULTILINE)
_THOUGHT = re.compile(r"<(?:seed:)?(?:think|thinking|thought|reasoning)>|\[THINK\]|\u25c1think\u25b7", re.IGNORECASE)
_THOUGHT_END = re.compile(r"</(?:seed:)?(?:think|thinking|thought|reasoning)>|\[/THINK\]|\u25c1/think\u25b7", re.IGNORECASE)
_FENCED = re.compile(r"\s*```[^\n`]*\n(.*?)\n?```\s*\Z", re.DOTALL)


def parse_solution_strict(reply: str) -> str:
    """The reference's rule: all that follows the first solution header, wherever that is, stripped.

    Raises:
      ParseError: no header, or nothing after it.
    """
    _, found, solution = reply.partition(SOLUTION_HEADER)
    return _not_empty(solution.strip(), found)


def parse_solution(reply: str, student: str = "") -> str:
    """Returns the solution, its leading whitespace kept and its trailing whitespace removed.

    A header counts at the start of a line. The solution follows the first solution header after the last error header: an echoed
    prompt and reflections come before it. Without an error header it follows the last solution header. What stands before the
    headers, such as the teacher's thoughts, is dropped; of the solution itself nothing is, for the student may have written the
    same. Only a code fence around all of it is removed, unless the student's text begins with one, too.

    Raises:
      ParseError: no header, nothing after it, or only a thought that was never closed.
    """
    reply = reply.replace("\r\n", "\n")
    found = sorted(match.start() for line in (_ERROR_LINE, _SOLUTION_LINE) for match in line.finditer(reply))
    if not found:
        raise ParseError(f"no line starts with {SOLUTION_HEADER}")
    thought = _THOUGHT.search(reply, 0, found[0])
    ends = [match.end() for match in _THOUGHT_END.finditer(reply, 0, found[-1])]
    if thought and not (ends and ends[-1] > thought.end()):
        raise ParseError("the reply is a thought that was never closed")
    reply = reply[ends[-1] :] if ends else reply
    errors = list(_ERROR_LINE.finditer(reply))
    headers = list(_SOLUTION_LINE.finditer(reply, errors[-1].end() if errors else 0))
    if not headers:
        raise ParseError(f"no line starts with {SOLUTION_HEADER}")
    solution = reply[headers[0 if errors else -1].end() :]
    fenced = None if student.lstrip().startswith("```") else _FENCED.match(solution)
    return _not_empty((fenced[1] if fenced else solution).rstrip(), True)


def _not_empty(solution: str, found: object) -> str:
    if not found or not solution.strip():
        raise ParseError(f"nothing follows {SOLUTION_HEADER}" if found else f"no {SOLUTION_HEADER} in the reply")
    return solution


def parse_index(reply: str) -> int:
    """Returns the first faulty step's index from a reply that locates it: the last JSON value that holds the key decides.

    Fenced objects are looked at first, then any fenced text, then the reply as a whole.

    Raises:
      ParseError: no such value.
    """
    candidates = re.findall(r"```(?:json)?\s*(\{.*?\})\s*```", reply, re.DOTALL)
    candidates = candidates or re.findall(r"```(?:json)?\s*(.*?)\s*```", reply, re.DOTALL) or [reply]
    for candidate in reversed(candidates):
        try:
            return int(json.loads(candidate)[INDEX_KEY])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue  # not JSON, not an object, or not a number: an earlier candidate may be
    raise ParseError(f"no JSON object with the key {INDEX_KEY} in the reply")
