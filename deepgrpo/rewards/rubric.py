"""How a run grades: the `rewards` section of its configuration, as the one value that reaches every grading worker."""

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterable

GRADERS = ("typed", "compat_fast", "compat_full")
EXTRACTS = ("default", "answer_tag", "answer_tag_lenient", "mark")

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Rubric:
    """Which grader, where it looks for the answer, and what else counts.

    grader: of mathematics and GSM8K: typed | compat_fast | compat_full (see `strict`).
    extract: where their answer stands: default (each source's own rule) | answer_tag | answer_tag_lenient (R1's template) | mark
      (GSM8K: only after ####).
    weight: of the task's own reward in the total.
    extra: further rewards, "NAME=WEIGHT" each; NAME is one of `weighted.REWARDS` or "package.module:function".
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
