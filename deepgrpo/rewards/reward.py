"""How a run grades (`Rubric`), what any function of a grade may return, and the total reward.

    total = rewards.weight * task + sum over rewards.extra of weight * part

What a user's function returns is not ours to trust: it may be a numpy scalar (a number), text, a list, a coroutine, infinite, or
nothing at all; and the function may raise, or end the process. `called` runs it and turns all that into a number, a Grade, or one
`GraderFault` that names the function. `checked` is the last look at a grade before anything counts it.

To add a reward: write a function of an Answer that returns a number (or None: no verdict) and enter it in REWARDS, or name it in
the configuration: rewards.extra=("my_package.my_module:brevity=0.2",). It runs in the grading workers, under their deadline. A
part without a verdict leaves the whole without one: a total that lacks a part would be a wrong label.

Success, for curriculum, teacher and metrics, is the task's own part above rewards.threshold (`types.Grade.succeeds`): bonuses
shape the reward that is learned from, and make no success of a failure.
"""

import asyncio
import dataclasses
import decimal
import functools
import importlib
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepgrpo.rewards import latex
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import TASK, Grade, Group

MODES = ("typed", "compat_fast", "compat_full")
EXTRACTS = ("default", "answer_tag", "answer_tag_lenient", "mark")

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Rubric:
    """Which grader, where it looks for the answer, and what else counts.

    grader: of mathematics and GSM8K: typed | compat_fast | compat_full (see `strict`).
    extract: where their answer stands: default (each source's own rule) | answer_tag | answer_tag_lenient (R1's template) | mark
      (GSM8K: only after ####).
    weight: of the task's own reward in the total.
    extra: further rewards, "NAME=WEIGHT" each; NAME is one of REWARDS or "package.module:function".
    graders: graders of one's own, "SOURCE=package.module:function" each; a known source's grader is replaced.
    """

    grader: str = "typed"
    extract: str = "default"
    weight: float = 1.0
    extra: tuple[str, ...] = ()
    graders: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, rewards) -> "Rubric":
        """From the `rewards` section of a configuration."""
        return cls(rewards.grader, rewards.extract, float(rewards.weight), tuple(rewards.extra), tuple(rewards.graders))

    def own_graders(self) -> dict[str, str]:
        """Path of the grader by source.

        Raises:
          ValueError: an entry isn't SOURCE=package.module:function, or a source is named twice.
        """
        return _named(self.graders, "rewards.graders", "SOURCE=package.module:function")

    def extra_weights(self) -> dict[str, float]:
        """Weight by the name or path of an extra reward.

        Raises:
          ValueError: an entry isn't NAME=WEIGHT, a weight isn't a finite number, or a name comes twice.
        """
        weights = {}
        for name, text in _named(self.extra, "rewards.extra", "NAME=WEIGHT").items():
            try:
                weights[name] = float(text)
            except ValueError:
                weights[name] = math.nan
            if not math.isfinite(weights[name]):
                raise ValueError(f"rewards.extra: the weight of {name} is {text!r}, expected a finite number")
        return weights


DEFAULT = Rubric()


def _named(entries: Iterable[str], key: str, expected: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.rpartition("=") if key == "rewards.extra" else entry.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{key}: {entry!r} is not {expected}")
        if name in named:
            raise ValueError(f"{key}: {name} is named twice. Keep one")
        named[name] = value
    return named


@functools.cache
def resolve(path: str) -> Callable:
    """The function that "package.module:function" names.

    Raises:
      ValueError: no such module or function, or the module failed to import; says which, and why.
    """
    if not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is no function: expected package.module:function")
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's may fail in any way
        where = "; is its folder in PYTHONPATH, or the package installed?" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{path}: importing {module_name} failed: {type(error).__name__}: {error}{where}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            n for n, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module_name
        ]
        raise ValueError(f"{path}: {module_name} has no function {name}; it has {', '.join(functions) or 'none'}")
    return function


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


def format_reward(answer: Answer) -> float:
    """1 if the response ended by itself and states exactly one final answer: one box, one `####` line or one answer pair."""
    text = own_words(answer.response)
    boxes = [content for content in latex.boxes(text) if content.strip()]
    marks = re.findall(r"^#{4}[^\S\n]*\S", text, re.MULTILINE)
    tags = re.findall(r"<answer>\s*\S.*?</answer>", text, re.DOTALL | re.IGNORECASE)
    stated = len(tags) if tags else len(boxes) + len(marks)  # a box within answer tags is the same answer
    return float(answer.finish_reason == "stop" and stated == 1)


def length_reward(answer: Answer) -> float:
    """-1 for every 1,000 characters of the response: give it a small weight."""
    return -len(own_words(answer.response)) / 1000


def repetition_reward(answer: Answer) -> float:
    """Minus the share of the response's runs of four words that occurred before: from 0 down to almost -1."""
    words = own_words(answer.response).split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return (len(set(runs)) - len(runs)) / len(runs) if runs else 0.0


REWARDS: dict[str, Callable[[Answer], float | None]] = {
    "format": format_reward,
    "length": length_reward,
    "repetition": repetition_reward,
}


def extra_rewards(rubric: Rubric) -> dict[str, tuple[float, Callable]]:
    """(weight, function) of each extra reward by its short name, which is the function's where a path is given.

    Raises:
      ValueError: a malformed entry, an unknown name, a function that can't be imported, or two of the same short name.
    """
    found: dict[str, tuple[float, Callable]] = {}
    for name, weight in rubric.extra_weights().items():
        short = name.rpartition(":")[2]
        if ":" not in name and name not in REWARDS:
            known = ", ".join(REWARDS)
            raise ValueError(f"rewards.extra: no reward is named {name!r}; known: {known}, or package.module:function")
        if short in found or short == TASK:
            raise ValueError(f"rewards.extra: two rewards would be reported as reward/{short}; rename one function")
        found[short] = weight, resolve(name) if ":" in name else REWARDS[name]
    return found


def total(task: Grade, answer: Answer, weight: float, extras: Mapping[str, tuple[float, Callable]]) -> Grade:
    """The task's grade with the weighted total as its reward, and its parts if there are extra ones.

    Raises:
      GraderFault: an extra reward raised, or returned something other than a finite number or None.
    """
    if task.reward is None or (not extras and weight == 1.0):
        return task
    parts, reward = list(task.parts or ((TASK, task.reward),)), weight * task.reward
    for name, (part_weight, function) in extras.items():
        value = number(called(name, function, answer), name)
        if value is None:
            return _with(task, None, ())
        parts.append((name, value))
        reward += part_weight * value
    return _with(task, reward, tuple(parts))


def _with(task: Grade, reward: float | None, parts: tuple[tuple[str, float], ...]) -> Grade:
    reason = "no_part_verdict" if reward is None else task.reason
    return dataclasses.replace(task, reward=reward, reason=reason, parts=parts)


def part_means(groups: Sequence[Group]) -> dict[str, float]:
    """`reward/<part>/mean` of a step's rollouts with a verdict, unweighted; empty if only the task counts, with weight 1."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.verdicts():
            for name, value in rollout.grade.parts:
                values.setdefault(name, []).append(value)
    return {f"reward/{name}/mean": math.fsum(of) / len(of) for name, of in values.items()}
