"""Saved forests as values: read, write, merge, prune, compare. Nothing here changes what it is given.

States are identified by their token ids, never by handles: two runs number theirs independently.
"""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.config.folders import find, run_folder
from deepgrpo.curriculum.base import NEVER
from deepgrpo.curriculum.forest_index import Counters, Event, Node, Tree
from deepgrpo.curriculum.forest_state import NODE_FIELDS, TREE_FIELDS, SavedForest, read
from deepgrpo.data import dataset
from deepgrpo.data.contamination import overlap
from deepgrpo.types import Problem

log = logging.getLogger(__name__)

_NUMBERS = TREE_FIELDS[1:]  # of a tree, all but its problem
_CLOCKS = ("rollout_clock", "dispatch_clock", "sft_clock")
_LATER = (*_CLOCKS, "dispatch_tick", "last_updated_step", "last_success_step", "last_fail_step")  # how numbers are merged
_EARLIER = ("created_step",)  # a tree's others are added up
_COMPARED = NODE_FIELDS[3:]


def last_step(saved: SavedForest) -> int:
    """The newest step that left a trace in the forest; 0 for one that was never touched."""
    of_trees = (max(tree.created_step, tree.last_updated_step, tree.rollout_clock) for tree in saved.trees.values())
    of_nodes = (max(node.created_step, node.rollout_clock, node.dispatch_clock) for node in saved.nodes())
    return max(0, *of_trees, *of_nodes)


#### Merging


def merge(first: SavedForest, second: SavedForest) -> SavedForest:
    """The union by prompt and state; of `second`, only what `first` lacks gets new handles, behind those of `first`.

    A state that both have: is active if it is in either; its observations and SFT updates are added up; its last group is the
    later one (of two in the same step, the worse); its clocks are the later ones; parent, origin and created_step are of the
    record that was made earlier. A failure that waits in both, of the same step and with the same tokens, is one failure. Both
    forests' counters are added up, so the forests should be of different runs: what they share would count twice.

    But for handles and insertion order, the result does not depend on the order of the two.

    Raises:
      ValueError: the two have a prompt with different answers or sources; names it.
    """
    second = _renumbered(second, first.counters.next_node, first.counters.next_event)
    trees, before = {}, first.num_events() + second.num_events()
    for key in first.trees | second.trees:
        both = [forest.trees[key] for forest in (first, second) if key in forest.trees]
        trees[key] = both[0] if len(both) == 1 else _merged_tree(*both)
    counters, other = dataclasses.asdict(first.counters), dataclasses.asdict(second.counters)
    counters = {name: counters[name] + other[name] for name in counters}
    steps = [forest.counters.first_child_step for forest in (first, second)]
    counters |= {"first_child_step": min((step for step in steps if step != NEVER), default=NEVER)}
    merged = SavedForest(trees, Counters(**counters | {name: other[name] for name in ("next_node", "next_event")}))
    merged.counters.enqueued -= before - merged.num_events()
    return merged


def _renumbered(saved: SavedForest, nodes: int, events: int) -> SavedForest:
    def moved(node: Node) -> Node:
        return dataclasses.replace(
            node,
            id=node.id + nodes,
            parent=None if node.parent is None else node.parent + nodes,
            origin=node.origin and node.origin._replace(event=node.origin.event + events),
            waiting=[(step, event + events, node.id + nodes, ids) for step, event, _, ids in node.waiting],
        )

    counters = dataclasses.replace(
        saved.counters, next_node=saved.counters.next_node + nodes, next_event=saved.counters.next_event + events
    )
    return SavedForest(_each_node(saved, moved), counters)


def _each_node(saved: SavedForest, change: Callable[[Node], Node]) -> dict[bytes, Tree]:
    return {key: dataclasses.replace(tree, nodes=[change(node) for node in tree.nodes]) for key, tree in saved.trees.items()}


def _merged_tree(a: Tree, b: Tree) -> Tree:
    nodes = {node.ids.tobytes(): node for node in a.nodes}
    of_a, of_b = _ranks(a), _ranks(b)
    handles = {node.id: nodes[node.ids.tobytes()].id for node in b.nodes if node.ids.tobytes() in nodes}
    for node in b.nodes:
        known = nodes.get(node.ids.tobytes())
        node = dataclasses.replace(node, parent=handles.get(node.parent, node.parent))
        if known is not None:
            node = _merged_node(known, node, of_a[known.id] <= of_b[node.id])
        nodes[node.ids.tobytes()] = node
    numbers = {}
    for name in _NUMBERS:
        values = getattr(a, name), getattr(b, name)
        numbers[name] = max(values) if name in _LATER else min(values) if name in _EARLIER else sum(values)
    return dataclasses.replace(a, nodes=_parents_first(list(nodes.values())), problem=_problem(a, b), **numbers)


def _ranks(tree: Tree) -> dict[int, tuple]:
    """By handle, what finds the older of two records of one state: equal only if there is nothing to choose between them."""
    sizes = {node.id: len(node.ids) for node in tree.nodes}
    ranks = {}
    for node in tree.nodes:
        rank: tuple = (node.created_step,)
        if (origin := node.origin) is not None:
            ids = (origin.suffix_ids, origin.response_ids, origin.failed_suffix_ids)
            reward = float("-inf") if origin.reward is None else origin.reward
            rank += (sizes[node.parent], origin.event_step, *(part.tobytes() for part in ids), reward)
        ranks[node.id] = rank
    return ranks


def _merged_node(a: Node, b: Node, a_is_older: bool) -> Node:
    """`b.parent` is already a handle of the merged tree; the result has `a`'s handle."""
    older = a if a_is_older else b
    observed = [node for node in (a, b) if node.observations]
    last = max(
        observed, key=lambda node: (node.rollout_clock, -node.last_k_succ / node.last_k_total, node.last_k_total), default=a
    )
    changes = {name: max(getattr(a, name), getattr(b, name)) for name in _LATER if hasattr(a, name)}
    changes |= {name: getattr(last, name) for name in ("last_k_succ", "last_k_total", "mastered_in_a_row")}
    changes |= {name: getattr(a, name) + getattr(b, name) for name in ("observations", "sft_updates")}
    changes |= {name: getattr(older, name) for name in ("parent", "origin", "created_step")}
    return dataclasses.replace(a, active=a.active or b.active, waiting=_merged_events(a, b), **changes)


def _merged_events(a: Node, b: Node) -> list[Event]:
    """All of `a`'s, and of `b`'s those that `a` has not, or not as often."""
    known, further = Counter((step, ids.tobytes()) for step, _, _, ids in a.waiting), []
    for event in b.waiting:
        known[key := (event[0], event[3].tobytes())] -= 1
        further += [event] if known[key] < 0 else []
    return sorted([*a.waiting, *further], key=lambda event: event[:2])


def _parents_first(nodes: list[Node]) -> list[Node]:
    """In the order of handles, which are dealt out anew where a state would come before its parent."""
    handles = sorted(node.id for node in nodes)
    by_handle = {node.id: node for node in nodes}
    order: dict[int, None] = {}
    for handle in handles:
        path: list[int] = []
        while handle is not None and handle not in order:
            path.append(handle)
            handle = by_handle[handle].parent
        order |= dict.fromkeys(reversed(path))
    new = dict(zip(order, handles, strict=True))
    return [
        dataclasses.replace(
            by_handle[handle],
            id=new[handle],
            parent=new.get(by_handle[handle].parent),
            waiting=[(step, event, new[handle], ids) for step, event, _, ids in by_handle[handle].waiting],
        )
        for handle in order
    ]


def _problem(a: Tree, b: Tree) -> Problem:
    """The earlier tree's row of the data set, if both rows are graded alike."""
    for name in ("data_source", "ground_truth"):
        if getattr(a.problem, name) != getattr(b.problem, name):
            raise ValueError(
                f"the forests disagree on {name} of the prompt {a.problem.question[:200]!r}: {getattr(a.problem, name)!r} and "
                f"{getattr(b.problem, name)!r}. Take the tree out of the forest that is wrong (prune --drop-tree), then merge"
            )

    def rank(tree: Tree) -> tuple:
        row = [tree.problem.index, tree.problem.question, dict(tree.problem.extra)]
        return tree.created_step, json.dumps(row, sort_keys=True)

    return min((a, b), key=rank).problem


#### Pruning


def prune(
    saved: SavedForest,
    *,
    retired: bool = False,
    stale: int | None = None,
    older_than: int | None = None,
    longer_than: int | None = None,
    max_nodes: int | None = None,
    drop_trees: Collection[int] = (),
) -> SavedForest:
    """What is left without the states that one of the criteria names. Ages are in steps before the forest's newest one.

    Children of a state that goes are hung up at its nearest ancestor that stays; its waiting failures go, counted as `cleared`.
    Roots stay, unless nothing is left in their tree that could be rolled out or sent to the teacher.

    Args:
      retired: states that are not active, and the waiting failures of a root that is not.
      stale: states last rolled out, or made, more than so many steps ago.
      older_than: states made, and failures produced, more than so many steps ago.
      longer_than: states of more tokens, prompt included.
      max_nodes: of a tree, root included, keep so many: active ones first, of these the youngest.
      drop_trees: whole trees, by their number in insertion order.

    Raises:
      ValueError: a bound is negative, `max_nodes` below 1, or there is no tree of such a number.
    """
    bounds = (("stale", stale, 0), ("older_than", older_than, 0), ("longer_than", longer_than, 1), ("max_nodes", max_nodes, 1))
    for name, value, least in bounds:
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    if unknown := [number for number in drop_trees if not 0 <= number < len(saved.trees)]:
        raise ValueError(f"no tree {unknown[0]}: the forest has {len(saved.trees)}, numbered from 0")
    now = last_step(saved)

    def stays(node: Node) -> bool:
        idle = now - max(node.rollout_clock, node.created_step)
        return not (
            (retired and not node.active)
            or (stale is not None and idle > stale)
            or (older_than is not None and now - node.created_step > older_than)
            or (longer_than is not None and len(node.ids) > longer_than)
        )

    def waits(node: Node, event: Event) -> bool:
        return not (retired and not node.active) and (older_than is None or now - event[0] <= older_than)

    trees = {}
    for number, (key, tree) in enumerate(saved.trees.items()):
        if number in drop_trees:
            continue
        kept = [node for node in tree.nodes[1:] if stays(node)]
        if max_nodes is not None:
            kept = sorted(kept, key=lambda node: (node.active, node.created_step, node.id), reverse=True)[: max_nodes - 1]
        pruned = _only(tree, {tree.nodes[0].id, *(node.id for node in kept)}, waits)
        if any(node.active or node.waiting for node in pruned.nodes):
            trees[key] = pruned
    left = SavedForest(trees, dataclasses.replace(saved.counters))
    left.counters.cleared += saved.num_events() - left.num_events()
    return left


def _only(tree: Tree, handles: set[int], waits: Callable[[Node, Event], bool]) -> Tree:
    parents = {node.id: node.parent for node in tree.nodes}
    nodes = []
    for node in tree.nodes:
        if node.id not in handles:
            continue
        parent = node.parent
        while parent is not None and parent not in handles:
            parent = parents[parent]
        nodes.append(dataclasses.replace(node, parent=parent, waiting=[event for event in node.waiting if waits(node, event)]))
    return dataclasses.replace(tree, nodes=nodes)


def reopened(saved: SavedForest) -> SavedForest:
    """All states active again: for a student that has not mastered what another has."""
    trees = _each_node(saved, lambda node: dataclasses.replace(node, active=True, mastered_in_a_row=0))
    return SavedForest(trees, saved.counters)


def without_history(saved: SavedForest) -> SavedForest:
    """The forest for the first step of another run: states, corrections and waiting failures, all of step 0.

    Clocks and counts of another student's steps would mislead the order of use and the reported success rates. What is retired
    stays retired.
    """

    def renewed(node: Node) -> Node:
        waiting = [(0, *event[1:]) for event in sorted(node.waiting, key=lambda event: event[1])]
        return Node(node.id, node.tree, node.parent, node.ids, 0, node.origin, active=node.active, waiting=waiting)

    renewed_nodes = _each_node(saved, renewed)
    trees = {key: Tree(key, tree.problem, tree.nodes, 0, 0) for key, tree in renewed_nodes.items()}
    counters = Counters(saved.counters.next_node, saved.counters.next_event, enqueued=saved.num_events())
    return SavedForest(trees, counters)


#### A run that begins with the forest of another


def forest_to_start_from(config: ml_collections.ConfigDict) -> SavedForest | None:
    """The forest that `curriculum.start_from` names, without its history (`without_history`).

    A run that is resumed no longer needs that forest: its own checkpoint, which is restored next, takes its place. None if the
    forest is gone by then.

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
        return None
    saved = without_history(read(str(place.folder)))
    check_room(saved, config.rollout.max_model_len - config.curriculum.min_remaining_tokens)
    check_problems(saved, config)
    active = sum(node.candidate for node in saved.nodes())
    log.info("the run begins with the forest of %s: %d trees, %d active states", place.folder, len(saved.trees), active)
    return saved


def check_room(saved: SavedForest, longest: int) -> None:
    sizes = [len(node.ids) for node in saved.nodes() if node.parent is not None and len(node.ids) > longest]
    if sizes:
        raise ValueError(
            f"curriculum.start_from: {len(sizes)} states are longer than rollout.max_model_len - curriculum.min_remaining_tokens "
            f"= {longest} tokens, the longest has {max(sizes)}. Raise rollout.max_model_len, or take them out: "
            f"python -m deepgrpo.forest prune FOREST --longer-than={longest} --out=NEW"
        )


def check_problems(saved: SavedForest, config: ml_collections.ConfigDict) -> None:
    """Compares with the run's data sets, read once more: only a new run's first minutes pay for it."""
    data, problems = config.data, [tree.problem for tree in saved.trees.values()]
    held_out = [row for spec in (*data.validation, *data.selection) for row in _rows(spec, data.validation_limit)]
    graded = {row.data_source for row in held_out} | {row.data_source for spec in data.train for row in _rows(spec)}
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


def _rows(spec: str, limit: int = 0) -> list[dataset.Row]:
    rows = [row for row in dataset.read(spec) if row.ground_truth is not None]
    return rows[:limit] if limit else rows


#### Comparing


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two forests. what: one of `DIFFERENCES`. fields: of a changed state, {name: (first, second)}."""

    what: str
    tree: Tree
    node: Node
    fields: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)


DIFFERENCES = {  # what a change is, and how the summary calls their number
    "tree added": "trees added",
    "tree removed": "trees removed",
    "state added": "states added in common trees",
    "state removed": "states removed from common trees",
    "state changed": "states changed",
}


def diff(first: SavedForest, second: SavedForest) -> tuple[list[Change], dict[str, int]]:
    """Compares by prompt and state; handles and insertion order don't count. Returns the changes, and how many there are of each
    kind and of waiting failures."""
    changes = []
    for what, one, other in (("tree added", second, first), ("tree removed", first, second)):
        changes += [Change(what, tree, tree.nodes[0]) for key, tree in one.trees.items() if key not in other.trees]
    common = [key for key in second.trees if key in first.trees]
    sizes = [{node.id: len(node.ids) for node in saved.nodes()} for saved in (first, second)]
    of_first, of_second = (
        {(key, node.ids.tobytes()): (saved.trees[key], node) for key in common for node in saved.trees[key].nodes}
        for saved in (first, second)
    )
    for what, one, other in (("state added", of_second, of_first), ("state removed", of_first, of_second)):
        changes += [Change(what, *found) for state, found in one.items() if state not in other]
    for state, found in of_second.items():
        if state in of_first and (fields := _changes(of_first[state][1], found[1], *sizes)):
            changes.append(Change("state changed", *found, fields))
    before, after = (
        Counter((node.ids.tobytes(), step, ids.tobytes()) for node in saved.nodes() for step, _, _, ids in node.waiting)
        for saved in (first, second)
    )
    counts = Counter(change.what for change in changes)
    numbers = {name: counts[what] for what, name in DIFFERENCES.items()}
    numbers |= {"waiting failures gone": (before - after).total(), "waiting failures new": (after - before).total()}
    return changes, numbers


def _changes(a: Node, b: Node, sizes_a: dict[int, int], sizes_b: dict[int, int]) -> dict[str, tuple[Any, Any]]:
    fields = {name: (getattr(a, name), getattr(b, name)) for name in _COMPARED}
    if a.origin is not None and b.origin is not None:
        fields["parent_length"] = sizes_a[a.parent], sizes_b[b.parent]
        fields["reward"] = a.origin.reward, b.origin.reward
        for name in ("suffix_ids", "response_ids"):
            old, new = getattr(a.origin, name), getattr(b.origin, name)
            if not np.array_equal(old, new):
                fields[name] = old.tolist(), new.tolist()
    return {name: values for name, values in fields.items() if values[0] != values[1]}
