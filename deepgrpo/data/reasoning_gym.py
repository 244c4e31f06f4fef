"""Questions of the reasoning-gym package, an optional requirement: "reasoning_gym:NAME:SPLIT:COUNT" and, after a further colon,
options of the generator, "min_terms=2,max_terms=6".

A question is a function of generator, options, split and place, so the grader makes it again (rewards/reasoning_gym.py).
"""

import ast
import functools
from collections.abc import Mapping
from typing import Any

from deepgrpo.data.cells import DataError

NAME = "reasoning_gym"  # its data_source
INSTALL = "pip install reasoning-gym==0.1.25"
SEEDS = {"train": 1, "heldout": 2}
# Generators whose stored answer is not the only right one, so that their own grader gives it less than 1.
UNANSWERABLE = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")


@functools.lru_cache(maxsize=32)
def generator(name: str, split: str, count: int, options: str) -> Any:
    """The data set of reasoning-gym, made once a process.

    Raises:
      DataError: the package is absent, there is no such generator, or it does not take the options.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(f"data: {NAME} cannot be imported ({error})", INSTALL) from error
    if name in UNANSWERABLE:
        raise DataError(f"data: {NAME}:{name} has several right answers and stores one", "take another generator")
    try:
        return reasoning_gym.create_dataset(name, seed=SEEDS[split], size=count, **parsed(options))
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        what = f"data: {NAME}:{name}: {type(error).__name__}: {error}"
        raise DataError(what, "correct the generator's name or its options") from error


def parsed(options: str) -> dict[str, Any]:
    """ "a=1,b=x" as a mapping; values are Python literals, else text."""
    found = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def problems(argument: str) -> list[Mapping[str, Any]]:
    """Rows of `NAME:SPLIT:COUNT` or `NAME:SPLIT:COUNT:OPTIONS`, with `extra` that names the question for the grader.

    Raises:
      DataError: see `generator`; or the argument is malformed.
    """
    name, split, count, options = [*argument.split(":", 3), "", "", "", ""][:4]
    if split not in SEEDS or not count.isdigit() or not int(count):
        raise DataError(f"data: {NAME}:{argument} is no data set", f"expected {NAME}:GENERATOR:train|heldout:COUNT[:OPTIONS]")
    made, rows = generator(name, split, int(count), options), []
    for item in range(int(count)):
        entry = made[item]
        extra = {"generator": name, "split": split, "count": int(count), "options": options, "item": item}
        rows.append({"question": entry["question"], "answer": str(entry["answer"]), "data_source": NAME, "extra": extra})
    return rows
