"""Rules that correct a student's text without a model: what the rule-based teacher (`deepgrpo.teacher.oracle`) knows.

A rule keeps what is right of the student's text, verbatim, and goes on with the right steps.
"""

import re
from collections.abc import Callable

from deepgrpo.data import carry_chain, tables
from deepgrpo.data.cells import TEXT

# (question with what else the student is told, student's text, locked prefix) -> its continuation; None: no idea
Correct = Callable[[str, str, str], str | None]


def correct_carry_chain(question: str, student: str, locked: str) -> str | None:
    """The one right solution, from where the locked prefix stops."""
    del student  # solutions are unique: what is right of the student's text is a prefix of this
    found = carry_chain.QUESTION.search(question)
    return found and _after(locked, carry_chain.solution(found[0]))


_SUM = re.compile(r"(\d+(?:\s*\+\s*\d+)+)\s*=\s*\?")


def correct_arithmetic(question: str, student: str, locked: str) -> str | None:
    """Sums line by line: "47 + 38 + 25 = ?" -> "47 + 38 = 85\\n85 + 25 = 110\\n#### 110", in the student's spacing."""
    asked = _SUM.findall(question)  # the last one: examples come before it
    if not asked:
        return None
    terms = [int(term) for term in asked[-1].split("+")]
    written, total, lines, right = (locked + student).splitlines(), terms[0], [], True
    for i, term in enumerate(terms[1:]):
        line, total = f"{total} + {term} = {total + term}", total + term
        if right and i < len(written):
            line, right = _keep_spacing(written[i], line)
        lines.append(line)
    return _after(locked, "\n".join([*lines, f"#### {total}"]))


def _keep_spacing(written: str, right: str) -> tuple[str, bool]:
    """Returns `right`, spaced like `written` as far as they agree otherwise, and whether they agree to the end."""
    position = done = 0
    for token in re.finditer(r"\d+|\S", right):
        found = re.compile(r" *(\d+|\S)").match(written, position)
        if found is None:
            return written[:position] + right[done:], False
        if found[1] != token[0]:
            return (written[: found.start(1)] + right[token.start() :] if position else right), False
        position, done = found.end(), token.end()
    return (written, True) if not written[position:].strip() else (right, False)


def solutions_rule(path: str) -> Correct:
    """Reference solutions from a JSONL file of `question` and `answer` (such as GSM8K's train file).

    Of the student's text it keeps the leading lines whose equations hold and whose results the reference has too, then goes on
    with the reference solution.

    Raises:
      FileNotFoundError, DataError: no such file, or no such rows in it; names it.
    """
    rows = tables.read(path, {"question": TEXT, "answer": TEXT})
    answers = {row["question"].strip(): re.sub(r"<<[^>]*>>", "", row["answer"]) for row in rows}

    def correct(question: str, student: str, locked: str) -> str | None:
        del locked  # its steps need not be repeated: the reference's may follow them
        answer = answers.get(question.strip())
        if answer is None:  # the question stands among instructions
            answer = answers.get(max((known for known in answers if known in question), key=len, default=""))
        return None if answer is None else _sound_lines(student, answer) + answer

    return correct


_EQUATION = re.compile(r"([\d.,]+(?:\s*[-+*/x×]\s*\$?[\d.,]+)+)\s*=\s*\$?([\d.,]*\d)")


def _sound_lines(student: str, reference: str) -> str:
    """The leading lines of `student` up to the last sound one: it has equations, all hold, all results occur in `reference`."""
    known = {_number(text) for text in re.findall(r"[\d.,]*\d", reference)}
    sound = seen = 0
    for line in student.splitlines(keepends=True):
        equations = _EQUATION.findall(line)
        if "####" in line or "boxed" in line or not all(_holds(*equation, known) for equation in equations):
            break
        seen += len(line)
        sound = seen if equations else sound
    kept = student[:sound]
    return kept if not kept or kept.endswith("\n") else kept + "\n"


def _holds(left: str, result: str, known: set[float | None]) -> bool:
    """Whether a chain of + - * / (left to right within precedence) gives `result`, and `result` is a known number."""
    total, sign, product = 0.0, 1.0, None
    for operator, text in re.findall(r"([-+*/x×]?)\s*\$?([\d.,]+)", left):
        number = _number(text)
        if number is None or (operator == "/" and number == 0):
            return False
        if operator in ("*", "x", "×"):
            product *= number
        elif operator == "/":
            product /= number
        else:
            total += sign * (product or 0.0)
            sign, product = (-1.0 if operator == "-" else 1.0), number
    value = _number(result)
    return value is not None and value in known and abs(total + sign * (product or 0.0) - value) < 1e-6


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return None


def _after(locked: str, solution: str) -> str | None:
    """What follows `locked` in the whole solution; None when the solution does not start like that."""
    return solution[len(locked) :] if solution.startswith(locked) else None


RULES: dict[str, Callable[[str], Correct]] = {  # each takes --solutions' path, which only one needs
    "carry_chain": lambda path: correct_carry_chain,
    "arithmetic": lambda path: correct_arithmetic,
    "solutions": solutions_rule,
}
