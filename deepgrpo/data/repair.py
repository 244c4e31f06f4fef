"""Answer keys in one form, and the known defects of published files: what was repaired, left out, or only looks suspicious."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deepgrpo.data.cells import NOTHING
from deepgrpo.data.tables import Row
from deepgrpo.rewards import expression, forms, latex

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
UNUSABLE = NOTHING | {""}  # keys that a broken extraction or a table's gap leaves behind
_MATH_MODE = re.compile(r"(?<!\\)\$")  # an escaped dollar is money


@dataclasses.dataclass(frozen=True)
class Repair:
    """One changed value: row of the source (0-based), what was done, the value before and after, and why."""

    row: int
    what: str
    before: Any
    after: Any
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Fix:
    row: int
    stored: str
    correct: str
    why: str


@dataclasses.dataclass(frozen=True)
class Corrections:
    """What a corrections file says about one data file.

    The file is JSON: `file` (the data file's name) and `answer_fixes`, a list of {row, stored, correct, why}. Optional, and held
    against the data by `mismatches`: `duplicate_problem_rows` (pairs), `statement_contains_boxed`, `normaliser_traps`.
    """

    path: str
    file: str
    fixes: tuple[Fix, ...]
    duplicates: tuple[tuple[int, ...], ...] = ()
    boxed_statements: tuple[int, ...] = ()
    traps: tuple[Fix, ...] = ()


def read_corrections(path: str | pathlib.Path) -> Corrections:
    """Raises ValueError: not JSON, or without `file` and `answer_fixes` as described at `Corrections`; FileNotFoundError."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"corrections: {path} does not exist (from {pathlib.Path.cwd()})")
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        fixes = tuple(Fix(int(fix["row"]), fix["stored"], fix["correct"], fix.get("why", "")) for fix in found["answer_fixes"])
        traps = tuple(Fix(int(t["row"]), t["stored"], t["stored"], t.get("why", "")) for t in found.get("normaliser_traps", ()))
        duplicates = tuple(tuple(int(row) for row in rows) for rows in found.get("duplicate_problem_rows", ()))
        boxed = tuple(int(row) for row in found.get("statement_contains_boxed", ()))
        return Corrections(str(path), found["file"], fixes, duplicates, boxed, traps)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"corrections: {path} is not such a file ({type(error).__name__}: {error}); expected JSON with `file` and "
            "`answer_fixes`, a list of {row, stored, correct, why}"
        ) from error


def corrections_beside(data: pathlib.Path) -> Corrections | None:
    """The corrections in the same folder, `*known_issues.json` or `*corrections.json`, that name this data file."""
    for path in sorted([*data.parent.glob("*known_issues.json"), *data.parent.glob("*corrections.json")]):
        if (found := read_corrections(path)).file == data.name:
            return found
    return None


def correct(rows: Sequence[Row], corrections: Corrections) -> tuple[list[Row], list[Repair]]:
    """Puts the corrected answers in; rows that hold them already stay.

    Raises:
      ValueError: a row holds another answer than the file says, so the file belongs to other data.
    """
    fixed, repairs = list(rows), []
    for fix in corrections.fixes:
        if not 0 <= fix.row < len(rows):
            raise ValueError(f"corrections: {corrections.path} names row {fix.row}, the data has rows 0 to {len(rows) - 1}")
        stored = rows[fix.row].get("answer")
        if stored == fix.correct:
            continue
        if ("" if stored is None else stored) != fix.stored and not (stored is None and fix.stored == "None"):
            raise ValueError(
                f"corrections: {corrections.path} is made for other data: row {fix.row} should hold {fix.stored!r} and "
                f"holds {stored!r}. Leave it out (--fixes=none) or give the file that it was made for ({corrections.file})"
            )
        fixed[fix.row] = {**rows[fix.row], "answer": fix.correct}
        repairs.append(Repair(fix.row, "answer corrected", stored, fix.correct, fix.why))
    return fixed, repairs


def mismatches(rows: Sequence[Row], corrections: Corrections) -> list[str]:
    """Remarks of the corrections file that the data doesn't bear out, in words."""
    notes = []
    for pair in corrections.duplicates:
        if any(row >= len(rows) for row in pair) or len({fold(question(rows[row])) for row in pair}) > 1:
            notes.append(f"{corrections.path} calls rows {', '.join(map(str, pair))} the same problem, they are not")
    for row in corrections.boxed_statements:
        if row >= len(rows) or not has_box(question(rows[row])):
            notes.append(f"{corrections.path} says that the statement of row {row} contains a box, it does not")
    for trap in corrections.traps:
        if trap.row >= len(rows) or str(rows[trap.row].get("answer")).strip() != trap.stored:
            notes.append(f"{corrections.path} says that row {trap.row} has the key {trap.stored!r}, it does not")
    return notes


def question(row: Row) -> str:
    return str(row.get("problem", row.get("question", "")))


def fold(text: str) -> str:
    return " ".join(text.split())


def has_box(text: str) -> bool:
    return _BOX.search(text) is not None


def duplicates(questions: Sequence[str]) -> dict[int, int]:
    """{row: earlier row} with the same question, white space folded."""
    first: dict[str, int] = {}
    return {row: first[text] for row, text in enumerate(map(fold, questions)) if first.setdefault(text, row) != row}


def stored_key(answer: Any) -> str:
    """A key as text and otherwise as it is: what the original converters write."""
    return str(answer)


def clean_key(answer: Any) -> str:
    """A key as text without what says nothing about the answer: outer white space and the dollars of math mode.

    Money keeps its escaped dollar, AIME's strings their zeros (025), and AMC's numbers are written as Python writes them (142.0).
    """
    text = str(answer).strip()
    if _MATH_MODE.search(text):
        text = re.sub(r"\s+", " ", _MATH_MODE.sub("", text)).strip()
        text = text.removesuffix(".").rstrip()  # a sentence's end after a formula, "$x=1$."
    return text


def keys(answer: Any, clean: bool = True) -> list[str] | None:
    """All accepted answers of a row, each once; None if one is empty or a word for nothing (`UNUSABLE`)."""
    answers = list(answer) if isinstance(answer, list | tuple) else [answer]
    texts = [clean_key(one) if clean else stored_key(one) for one in answers]
    if not texts or any(one is None or text.strip() in UNUSABLE for one, text in zip(answers, texts, strict=True)):
        return None
    return list(dict.fromkeys(texts)) if clean else texts


def unbalanced(key: str) -> bool:
    """Whether dollars or braces of a stored key don't pair up, which a person should look at."""
    text = re.sub(r"\\.", "", key)
    return text.count("$") % 2 == 1 or text.count("{") != text.count("}")


def summary(repairs: Sequence[Repair]) -> Mapping[str, int]:
    """{what was done: how often}"""
    counts: dict[str, int] = {}
    for repair in repairs:
        counts[repair.what] = counts.get(repair.what, 0) + 1
    return counts


def kind(key: str) -> str:
    """What the typed grader takes a key for: number, expression, words, items, brackets, relation, ..., or other notation.

    Keys in other notation are compared as text and by math-verify.
    """
    form = forms.parse(latex.clean(key))
    if not isinstance(form, forms.Value):
        return type(form).__name__.lower()
    try:
        tree = expression.parse(latex.unmarked(form.quantity.body))
    except expression.ParseError:
        return "other notation"
    except expression.TooComplex:
        return "expression"
    return "expression" if expression.symbols(tree) else "number"
