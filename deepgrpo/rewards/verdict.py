"""The one door that every grade passes, wherever it comes from: graders here, functions of the user's, judges, workers.

What a user's function returns is not ours to trust: it may be a numpy scalar (a number), text, a list, a coroutine, infinite, or
nothing at all; and the function may raise, or end the process. `called` runs it and turns all that into a number, a Grade, or one
`GraderFault` that names the function. `checked` is the last look at a grade before anything counts it.
"""

import asyncio
import dataclasses
import decimal
import inspect
import numbers
import re
import traceback
from collections.abc import Callable
from typing import Any

from deepgrpo.types import TASK, Grade

LARGEST = 1e9  # of a reward: squares of rewards must be far from the end of float32
MAX_TEXT = 20_000  # characters of an extracted answer (a program is the longest); the rest is cut
MAX_PARTS = 32


class GraderFault(Exception):
    """A grader or reward function gave no usable verdict. function: its name; detail: a traceback, or what it returned."""

    def __init__(self, function: str, detail: str):
        super().__init__(f"{function}: {detail}")
        self.function, self.detail = function, detail


def called(name: str, function: Callable, *args: Any) -> Any:
    """What a user's function returns, awaited if it is a coroutine.

    Raises:
      GraderFault: it raised, whatever that was (SystemExit and lack of memory among them).
    """
    try:
        value = function(*args)
        return asyncio.run(value) if inspect.iscoroutine(value) else value
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        frames = traceback.format_tb(error.__traceback__)[-4:]
        raise GraderFault(name, "".join([*frames, *traceback.format_exception_only(error)]).strip()) from None


def number(value: Any, name: str) -> float | None:
    """A finite number as a float (of Python, numpy, JAX or torch; true and false count as 1 and 0); None stays None.

    Raises:
      GraderFault: it is something else; names the function.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()  # a scalar of an array library
    if not isinstance(value, numbers.Real | decimal.Decimal):
        raise GraderFault(name, f"returned {_shown(value)}, expected a number or None (no verdict)")
    try:
        plain = float(value)
    except (OverflowError, ValueError):
        plain = float("inf")
    if not abs(plain) <= LARGEST:  # not a number, too
        raise GraderFault(name, f"returned {str(value)[:40]}; a reward must be finite and at most {LARGEST:g}")
    return plain


def checked(grade: Any, name: str) -> Grade:
    """A grade whose every field is what `types.Grade` says: numbers are plain and finite, texts are short.

    Raises:
      GraderFault: it is no Grade, or a field of it cannot be read as what it should be; names the function.
    """
    if not isinstance(grade, Grade):
        raise GraderFault(name, f"returned {_shown(grade)}, expected a Grade")
    try:
        parts = tuple((str(part)[:64], number(value, f"{name}: part {part}")) for part, value in grade.parts)
        right_prefix = None if grade.right_prefix is None else int(number(grade.right_prefix, f"{name}: right_prefix"))
        texts = re.sub(r"[^\w.:/-]+", "_", grade.reason)[:64], grade.answer[:MAX_TEXT].encode(errors="replace").decode()
    except (TypeError, ValueError, AttributeError) as error:
        raise GraderFault(name, f"returned a Grade with a field of a wrong type: {error}") from None
    if len(parts) > MAX_PARTS or any(value is None for _, value in parts) or (parts and TASK not in dict(parts)):
        raise GraderFault(name, f"returned a Grade with parts {_shown(parts)}; expected numbers, one of them named {TASK!r}")
    if right_prefix is not None and right_prefix < 0:
        raise GraderFault(name, f"returned a Grade with right_prefix {right_prefix}, expected a count of characters")
    return dataclasses.replace(
        grade,
        reward=number(grade.reward, name),
        completed=bool(grade.completed),
        reason=texts[0] or "unnamed",
        answer=texts[1],
        right_prefix=right_prefix,
        parts=parts,
    )


def _shown(value: Any) -> str:
    hint = " (a coroutine that nobody awaits)" if inspect.isawaitable(value) else ""
    kind = " (the function yields; it must return)" if inspect.isgenerator(value) or inspect.isasyncgen(value) else hint
    try:
        return f"{type(value).__name__} {repr(value)[:80]}{kind}"
    except Exception:  # a class of the user's whose repr fails
        return f"{type(value).__name__}{kind}"
