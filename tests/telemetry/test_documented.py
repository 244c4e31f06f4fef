"""docs/metrics.md names what is written."""

import pathlib
import re

import numpy as np
import pytest

from deepgrpo.telemetry import dumps, statistics
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.curriculum.made import forest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


WILDCARDS = {"<p>": r"\w+", "<source>": r"[\w/]+", "@N": r"@\d+", "...": ".+"}


def expand(name: str) -> list[str]:
    """a/{b,c} -> a/b, a/c; innermost braces first."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if not braces:
        return [name]
    return [full for option in braces[1].split(",") for full in expand(name[: braces.start()] + option + name[braces.end() :])]


def documented() -> re.Pattern:
    """One expression of all the names in the first columns of the page's tables."""
    cells = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(), re.M)
    names = [full for cell in cells for name in re.findall(r"`([^`]+)`", cell) for full in expand(name)]
    parts = (re.split(r"(<\w+>|@N|\.\.\.)", name) for name in names)
    return re.compile("|".join("".join(as_expression(part) for part in name) for name in parts))


def as_expression(part: str) -> str:
    return WILDCARDS.get(part, r"\w+" if part.startswith("<") else re.escape(part))


def groups() -> list[Group]:
    problem = Problem(0, "task", as_ids([1]), "7", "?")
    rollouts = tuple(Rollout(Completion(as_ids([2]), np.zeros(1), "stop", 0), Grade(r, True, "right")) for r in (0.0, 1.0))
    return [Group(Prompt(as_ids([1, 3]), problem, 2, str(node), node), rollouts) for node in (None, 5)]


def emitted(of: str) -> dict[str, float]:
    if of == "statistics":
        return statistics.group_statistics(groups(), 0.0)
    if of == "validation":
        return statistics.validation_metrics(dumps.validation_records(groups(), 0, str))
    rows = pytest.importorskip("deepgrpo.learner.rows")
    made = rows.rows_from_groups(groups(), "group_mean")
    return rows.data_metrics(made, 8) | rows.filter_metrics(made, rows.keep_rows(made))


@pytest.mark.parametrize("of", ["statistics", "validation", "rows"])
def test_what_is_emitted_is_documented(of):
    known = documented()
    assert not [name for name in emitted(of) if not known.fullmatch(name)]


def test_forest_names_are_documented():
    known = documented()
    assert not [name for name in forest().metrics() if not known.fullmatch(name)]
