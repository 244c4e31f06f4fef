"""A run that begins with the forest of another (`curriculum.start_from`)."""

import logging
import tempfile

import ml_collections

from deepgrpo.config.forest_folder import find
from deepgrpo.config.resolved import run_folder
from deepgrpo.curriculum import forest_tools
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.data import readers
from deepgrpo.data.contamination import overlap

log = logging.getLogger(__name__)


def fill(pool: Forest, config: ml_collections.ConfigDict) -> None:
    """Fills the pool with the forest that `curriculum.start_from` names, without its history (`forest_tools.without_history`).

    A run that is resumed no longer needs that forest: its own checkpoint, which is restored next, takes its place.

    Raises:
      FileNotFoundError: the forest is gone, and this run has no checkpoint.
      ValueError: its problems are of sources that this run does not grade, or among those that it is judged by; or its states
        leave no room for a response; says what to do.
    """
    try:
        place = find(config.curriculum.start_from)
    except FileNotFoundError:
        if not any((run_folder(config) / "checkpoints").glob("[0-9]*")):
            raise
        return
    saved = forest_tools.without_history(forest_tools.read(str(place.folder)))
    check_room(saved, pool)
    check_problems(saved, config)
    with tempfile.TemporaryDirectory() as folder:
        forest_tools.write(saved, folder)
        pool.restore(folder)
    active = sum(node.active and node.parent is not None for node in saved.nodes())
    log.info("the run begins with the forest of %s: %d trees, %d active states", place.folder, len(saved.trees), active)


def check_room(saved: forest_tools.Saved, pool: Forest) -> None:
    if pool.bounds.max_model_len is None:
        return
    longest = pool.bounds.max_model_len - pool.bounds.min_remaining_tokens
    sizes = [len(node.ids) for node in saved.nodes() if node.parent is not None and len(node.ids) > longest]
    if sizes:
        raise ValueError(
            f"curriculum.start_from: {len(sizes)} states are longer than rollout.max_model_len - curriculum.min_remaining_tokens "
            f"= {longest} tokens, the longest has {max(sizes)}. Raise rollout.max_model_len, or take them out: "
            f"python -m deepgrpo.forest prune FOREST --longer-than={longest} --out=NEW"
        )


def check_problems(saved: forest_tools.Saved, config: ml_collections.ConfigDict) -> None:
    """Compares with the run's data sets, read once more: only a new run's first minutes pay for it."""
    data, problems = config.data, [tree.problem for tree in saved.trees.values()]
    held_out = [row for spec in (*data.validation, *data.selection) for row in _rows(spec, data.validation_limit)]
    graded = {row.data_source for row in held_out} | {row.data_source for spec in data.train for row in _rows(spec, data.limit)}
    if foreign := sorted({problem.data_source for problem in problems} - graded):
        raise ValueError(
            f"curriculum.start_from: its problems are of {', '.join(foreign)}, this run's data sets of "
            f"{', '.join(sorted(graded))}: nothing would grade them. Name a data set of that source in data.train, or choose "
            "another forest"
        )
    found = overlap([problem.question for problem in problems], [row.question for row in held_out]).found
    if found and not data.allow_overlap:
        held, tree = found[0]
        raise ValueError(
            f"curriculum.start_from: {len(found)} questions of data.validation or data.selection are in the forest, such as "
            f"{held_out[held].question[:200]!r} in tree {tree}: every score would be too good. Take such trees out "
            "(python -m deepgrpo.forest prune --drop-tree), or set --config.data.allow_overlap=true"
        )


def _rows(spec: str, limit: int) -> list[readers.Row]:
    rows = [row for row in readers.read(spec) if row.ground_truth is not None]
    return rows[:limit] if limit else rows
