"""What a cell of a data file may hold: the one check that every column passes before anything uses it.

A schema gives each column a `Kind`, a mapping (an object with these fields), a list of one schema (a list of such), or `Maybe` of
one of them (the cell may be null or absent). Numbers must be finite, and text must be storable: a lone surrogate (half of a cut
emoji) or a NUL character would end a run wherever it is first written or encoded.
"""

import dataclasses
import decimal
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NOTHING = frozenset(("None", "nan", "NaN", "null", "<NA>"))  # what writes a table's gap as text
LISTED = 5  # rows that a message names
ROWS = "correct these rows or take them out of the file (rows are counted from 0)"


class DataError(ValueError):
    """A data file that cannot be used. what: file, row, column and what was found. remedy: what to do about it."""

    def __init__(self, what: str, remedy: str):
        super().__init__(what + ("\n   -> " if "\n" in what else " -> ") + remedy)
        self.what, self.remedy = what, remedy


@dataclasses.dataclass(frozen=True)
class Kind:
    """expected: what a value must be, in words. fits: whether it is."""

    expected: str
    fits: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Maybe:
    schema: "Schema"


Schema = Kind | Maybe | Mapping[str, "Schema"] | list["Schema"]


def whole(value: Any) -> bool:
    """Whether a value is text that every file, tokenizer and endpoint can take."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def blank(text: str) -> bool:
    """Whether nothing of a text can be seen: white space, zero-width characters, byte-order marks."""
    return not any(character.isprintable() and not character.isspace() for character in text)


def finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal):
        return False
    return isinstance(value, int) or math.isfinite(value)


def scalar(value: Any) -> bool:
    return whole(value) or finite(value)


def _leaves(value: Any) -> Iterator[Any]:
    """What lists and objects of any depth hold, the names of fields among it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        else:
            yield one


def plain(value: Any) -> bool:
    """Whether a value of any depth holds nothing but text, finite numbers, truth values and nulls."""
    return all(one is None or isinstance(one, bool) or scalar(one) for one in _leaves(value))


def writable(value: Any) -> bool:
    """Whether all text of a value of any depth can be written to a file."""
    return all(not isinstance(one, str) or whole(one) for one in _leaves(value))


def _answers(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(one is None or scalar(one) for one in values)


TEXT = Kind("text that is not empty", lambda value: whole(value) and not blank(value) and value.strip() not in NOTHING)
LINE = Kind("text", whole)
SCALAR = Kind("text or a finite number", scalar)
KEY = Kind("text, a finite number or a list of these", _answers)  # a null or an empty text is no usable key, and counted
PLAIN = Kind("text, finite numbers, or lists and objects of these", lambda value: value is not None and plain(value))
OBJECT: Schema = {}


def problem(value: Any, schema: Schema, name: str) -> str:
    """ "COLUMN must be ..., got ...", or "" if the value is what the schema says."""
    if isinstance(schema, Maybe):
        return "" if value is None else problem(value, schema.schema, name)
    if isinstance(schema, Mapping):
        if not isinstance(value, Mapping):
            return f"{name} must be an object, got {shown(value)}"
        return next((text for key, part in schema.items() if (text := problem(value.get(key), part, f"{name}.{key}"))), "")
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return f"{name} must be a list that is not empty, got {shown(value)}"
        return next((text for i, one in enumerate(value) if (text := problem(one, schema[0], f"{name}[{i}]"))), "")
    return "" if schema.fits(value) else f"{name} must be {schema.expected}, got {shown(value)}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: Any) -> str:
    """A value for a message: short, on one line, and without a character that cannot be printed."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        hurt = "text with a NUL character" if "\0" in value else "" if whole(value) else "text with a lone surrogate"
        kind = "empty text" if blank(value) else "the word for nothing" if value.strip() in NOTHING else "text"
        return f"{hurt or kind} {_SHORT.repr(value)}"
    if isinstance(value, float | int | decimal.Decimal):
        return f"the number {_SHORT.repr(value)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    name = {dict: "object", list: "list"}.get(type(value), type(value).__name__)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name} {_SHORT.repr(value)}"


def refuse(path: Any, wrong: Sequence[str], remedy: str = ROWS) -> None:
    """Ends the reading of a file if anything in it is wrong. wrong: place and defect, such as "row 3: answer must be ...".

    Raises:
      DataError: with the first few places and the number of the others.
    """
    if wrong:
        more = [f"and {len(wrong) - LISTED} more"] * (len(wrong) > LISTED)
        raise DataError("\n   ".join([f"data: {path}, {wrong[0]}", *wrong[1:LISTED], *more]), remedy)


def check(rows: Sequence[dict[str, Any]], schema: Mapping[str, Schema], path: Any) -> None:
    """Holds every row against a schema; objects and lists that a file keeps as JSON text are decoded in place.

    Raises:
      DataError: a column is missing, or a cell is not what the schema says.
    """
    needed = [column for column, part in schema.items() if not isinstance(part, Maybe)]
    for number, row in enumerate(rows):
        if missing := [column for column in needed if column not in row]:
            raise DataError(
                f"data: {path}, row {number} lacks {', '.join(missing)}; it has {_names(row) or 'no columns'}",
                f"this reader needs {', '.join(needed)}: rename the columns or choose another reader (the NAME of NAME:PATH)",
            )
    wrong = []
    for number, row in enumerate(rows):
        for column, part in schema.items():
            inner = part.schema if isinstance(part, Maybe) else part
            if isinstance(inner, Mapping | list) and isinstance(row.get(column), str):
                row[column] = _decoded(row[column])
        text = next((text for column, part in schema.items() if (text := problem(row.get(column), part, column))), "")
        if text:
            wrong.append(f"row {number}: {text}")
    refuse(path, wrong)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # which `problem` refuses, as it is neither object nor list


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(str(name) if str(name).isprintable() else repr(name) for name in row)
