"""A snapshot of the forest: taken in short slices of the lock, written as plain NumPy and JSON files, never pickled.

Files (`np.load` and a text editor open them; equal content gives equal bytes):

    curriculum.json   pool type, format version, cumulative counters, the next handles, what became of states
    trees.npz         one row a tree, in insertion order; its `num_nodes` rows of nodes.npz are adjacent, the root first
    problems.json     the data set's row of each tree, but for its tokens: these are the root's `ids`
    nodes.npz         one row a node; `parent` is -1 for a root
    origins.npz       one row a node that is no root, in the order of nodes.npz: which failed rollout, and which correction of it,
                      made the node (`reward` is NaN if there was none)
    events.npz        one row a failed rollout: `id`, `node` that it started from, `step`, `response_ids`, `in_flight`

A column of token lists is stored as `<name>` (all ids, concatenated) and `<name>_offsets` (row i is [offsets[i], offsets[i+1])).
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import pathlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from deepgrpo.curriculum.forest_index import Index
from deepgrpo.curriculum.forest_records import Counters, Event, History, Node, Origin, Tree, tree_key
from deepgrpo.curriculum.header import NAME, as_saved, read_columns, read_header, saved_counts, write_header
from deepgrpo.types import Ids, Problem, as_ids

POOL, VERSION = "forest", 1
NO_IDS = as_ids([])
_SLICE = 2000  # trees, nodes and events copied under one hold of the lock: about 1 ms

_TREE_HISTORY = ("mastered", "before_succ", "before_total", "after_succ", "after_total")
_TREE_COLUMNS = (
    "created_step",
    "last_updated_step",
    "rollout_clock",
    "dispatch_clock",
    "dispatch_tick",
    "sft_clock",
    "num_nodes",
)
_TREE_COLUMNS += _TREE_HISTORY
_NODE_COLUMNS = (  # what can change after a node's creation
    "active",
    "observations",
    "last_k_succ",
    "last_k_total",
    "rollout_clock",
    "dispatch_clock",
    "dispatch_tick",
    "sft_clock",
    "last_success_step",
    "last_fail_step",
    "sft_updates",
    "mastered_in_a_row",
)
_YOUNGER = ("mastered_in_a_row", "dispatch_tick", *_TREE_HISTORY)  # columns that older snapshots lack: all 0 in them


@dataclasses.dataclass
class Rows:
    """Copied trees. Flat arrays and few lists: many small objects would set off the garbage collector inside the lock."""

    trees: array = dataclasses.field(default_factory=lambda: array("q"))  # len(_TREE_COLUMNS) numbers a tree
    problems: list[Problem] = dataclasses.field(default_factory=list)  # one a tree
    nodes: array = dataclasses.field(default_factory=lambda: array("q"))  # len(_NODE_COLUMNS) numbers a node
    node_records: list[Node] = dataclasses.field(default_factory=list)  # only their constant fields are read later
    waiting: list[Event] = dataclasses.field(default_factory=list)

    def add(self, tree: Tree) -> None:
        clocks = tree.rollout_clock, tree.dispatch_clock, tree.dispatch_tick, tree.sft_clock
        history = tree.mastered, tree.before_succ, tree.before_total, tree.after_succ, tree.after_total
        self.trees.extend((tree.created_step, tree.last_updated_step, *clocks, len(tree.nodes), *history))
        self.problems.append(tree.problem)
        for node in tree.nodes:
            counts = node.last_k_succ or 0, node.last_k_total or 0  # None iff there is no observation
            clocks = node.rollout_clock, node.dispatch_clock, node.dispatch_tick, node.sft_clock
            steps = node.last_success_step, node.last_fail_step
            self.nodes.extend(
                (node.active, node.observations, *counts, *clocks, *steps, node.sft_updates, node.mastered_in_a_row)
            )
            self.waiting += node.waiting
        self.node_records += tree.nodes

    def extend(self, other: "Rows") -> None:
        self.trees += other.trees
        self.problems += other.problems
        self.nodes += other.nodes
        self.node_records += other.node_records
        self.waiting += other.waiting


class Capture:
    """The forest as it is at this object's creation, copied slice by slice.

    All methods are called under the forest's lock. Before the first change to a tree that no slice has reached, the index has it
    copied (`keep`); younger trees are not part of the snapshot. Events in flight are few and immutable: they are listed at once.
    """

    def __init__(self, number: int, index: Index):
        self.number = number
        self.history = dataclasses.asdict(index.history)
        self.in_flight = [index.in_flight[i] for i in sorted(index.in_flight)]
        self._trees = list(index.trees.values())
        self._next = 0
        self._kept: dict[Tree, Rows] = {}

    def keep(self, tree: Tree) -> None:
        """Copies a tree ahead of its turn."""
        tree.captured = self.number
        self._kept[tree] = rows = Rows()
        rows.add(tree)

    def next_slice(self) -> Rows | None:
        """Copies further trees; None: all are copied."""
        if self._next == len(self._trees):
            return None
        rows, size = Rows(), 0
        while size < _SLICE and self._next < len(self._trees):
            tree = self._trees[self._next]
            self._next += 1
            if tree.captured == self.number:
                rows.extend(self._kept.pop(tree))
            else:
                tree.captured = self.number
                rows.add(tree)
            size += 1 + len(tree.nodes) + tree.num_events
        return rows


class Writer:
    """Turns slices into columns as they come, outside the lock, and writes the files at the end.

    Nothing lists all records at once: the collector would walk over such a new list in whichever thread it is set off, maybe one
    that holds the forest's lock.
    """

    def __init__(self):
        self._trees, self._nodes, self._origins, self._events = (_Table() for _ in range(4))
        self._problems: list[str] = []  # JSON rows, many to a string
        self._encode = json.JSONEncoder(separators=(",\n", ": ")).encode
        self.add(Rows())  # an empty forest has all columns, too

    def add(self, rows: Rows) -> None:
        self._trees.add_numbers(_TREE_COLUMNS, np.frombuffer(rows.trees, np.int64).reshape(-1, len(_TREE_COLUMNS)))
        self._nodes.add_numbers(_NODE_COLUMNS, np.frombuffer(rows.nodes, np.int64).reshape(-1, len(_NODE_COLUMNS)))
        self._add_nodes(rows.node_records)
        self.add_events(rows.waiting, in_flight=False)
        self._add_problems([_problem_row(problem) for problem in rows.problems])

    def _add_nodes(self, nodes: Sequence[Node]) -> None:
        table = self._nodes
        table.add("id", np.array([node.id for node in nodes], np.int64))
        table.add("parent", np.array([-1 if node.parent is None else node.parent for node in nodes], np.int64))
        table.add("created_step", np.array([node.created_step for node in nodes], np.int64))
        table.add_lists("ids", [node.ids for node in nodes])
        self._add_origins([node.origin for node in nodes if node.origin is not None])

    def _add_origins(self, origins: Sequence[Origin]) -> None:
        table = self._origins
        table.add("event", np.array([origin.event for origin in origins], np.int64))
        table.add("event_step", np.array([origin.event_step for origin in origins], np.int64))
        rewards = [math.nan if origin.reward is None else origin.reward for origin in origins]
        table.add("reward", np.array(rewards, np.float64))
        table.add_lists("response_ids", [origin.response_ids for origin in origins])
        table.add_lists("failed_suffix_ids", [origin.failed_suffix_ids for origin in origins])
        table.add_lists("suffix_ids", [origin.suffix_ids for origin in origins])

    def add_events(self, events: Sequence[Event], *, in_flight: bool) -> None:
        numbers = [event[:3] for event in events]
        self._events.add_numbers(("step", "id", "node"), np.array(numbers, np.int64).reshape(-1, 3))
        self._events.add("in_flight", np.full(len(events), in_flight))
        self._events.add_lists("response_ids", [event[3] for event in events])

    def _add_problems(self, rows: list[dict[str, Any]]) -> None:
        try:
            text = self._encode(rows)
        except (TypeError, ValueError) as error:
            raise ValueError(f"problems must be JSON-serialisable to be saved, but {_unserialisable(rows)} is not") from error
        if rows:
            self._problems.append(text[1:-1])

    def write(self, folder: str, counters: dict[str, int], history: dict[str, int]) -> None:
        path = pathlib.Path(folder)
        self._trees.save(path / "trees.npz")
        self._nodes.save(path / "nodes.npz")
        self._origins.save(path / "origins.npz")
        self._events.save(path / "events.npz")
        (path / "problems.json").write_text("[" + ",\n".join(self._problems) + "]\n", encoding="utf-8")
        write_header(folder, POOL, VERSION, {"counters": counters, "history": history})


class _Table:
    """Columns that grow by pieces."""

    def __init__(self):
        self._pieces: dict[str, list[np.ndarray]] = {}

    def add(self, name: str, piece: np.ndarray) -> None:
        self._pieces.setdefault(name, []).append(piece)

    def add_numbers(self, names: Sequence[str], rows: np.ndarray) -> None:
        for i, name in enumerate(names):
            self.add(name, rows[:, i])

    def add_lists(self, name: str, lists: Sequence[Ids]) -> None:
        self.add(name, np.concatenate(lists) if lists else np.zeros(0, np.int32))
        self.add(f"{name}_offsets", np.fromiter(map(len, lists), np.int64, len(lists)))  # lengths, until `save`

    def save(self, path: pathlib.Path) -> None:
        columns = {name: np.concatenate(pieces) for name, pieces in self._pieces.items()}
        for name in columns:
            if name.endswith("_offsets"):
                columns[name] = np.concatenate([[0], np.cumsum(columns[name])])
        np.savez(path, **columns)


def _problem_row(problem: Problem) -> dict[str, Any]:
    return {
        "index": problem.index,
        "data_source": problem.data_source,
        "ground_truth": problem.ground_truth,
        "question": problem.question,
        "extra": dict(problem.extra),
        "told": problem.told,
    }


def _unserialisable(rows: list[dict[str, Any]]) -> str:
    """Names the first row and field that JSON cannot hold."""
    for row in rows:
        for name, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                return f"{name}={value!r} of row {row['index']} of {row['data_source']!r}"
    raise AssertionError("every field can be encoded by itself")


def read(folder: str, index: Index) -> dict[str, int]:
    """Fills an empty index from a folder, with every event waiting; returns the counters and next handles.

    Raises:
      NotAsSaved: the folder's pool type or format version is another one, or a file is absent, damaged or unlike the others.
    """
    header = read_header(folder, POOL, VERSION)
    with _collector_paused(), as_saved(folder):
        _fill(index, pathlib.Path(folder))
    with as_saved(pathlib.Path(folder) / NAME):
        index.history = History(**header.get("history", {}))  # older snapshots have none
        known = dataclasses.asdict(Counters()) | {"next_node": 0, "next_event": 0}
        found = saved_counts(header["counters"], known)
        if max(index.nodes, default=-1) >= found["next_node"] or max(index.events, default=-1) >= found["next_event"]:
            raise ValueError("the next handles are in use")
    return found


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Millions of objects are made and none is garbage: the collector would walk over them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fill(index: Index, path: pathlib.Path) -> None:
    trees, events = _Columns(path / "trees.npz"), _Columns(path / "events.npz")
    nodes = _read_nodes(_Columns(path / "nodes.npz"), _read_origins(_Columns(path / "origins.npz")))
    with as_saved(path / "problems.json"):
        problems = json.loads((path / "problems.json").read_text(encoding="utf-8"))
        if len(problems) != len(trees["created_step"]):
            raise ValueError(f"{len(problems)} problems, but trees.npz has {len(trees['created_step'])} trees")
        for fields in problems:
            Problem(prompt_ids=NO_IDS, **fields)  # raises where a name is unknown or absent
    for problem, *numbers in zip(problems, *map(trees.ints, _TREE_COLUMNS), strict=True):
        row = dict(zip(_TREE_COLUMNS, numbers, strict=True))
        _add_tree(index, problem, row, list(itertools.islice(nodes, row.pop("num_nodes"))))
    if next(nodes, None) is not None:
        raise ValueError("nodes.npz has more nodes than the trees of trees.npz")
    rows = zip(*map(events.ints, ("step", "id", "node")), events.lists("response_ids"), strict=True)
    for event in sorted(rows, key=lambda event: event[1]):  # order of arrival
        node = index.nodes.get(event[2])
        if node is None or event[1] in index.events:
            raise ValueError(f"events.npz: event {event[1]} comes twice, or its node {event[2]} is in no tree")
        index.push(index.trees[node.tree], node, event)


def _add_tree(index: Index, row: dict[str, Any], numbers: dict[str, int], nodes: list[tuple[Node, dict[str, int]]]) -> None:
    """Adds a tree by the index's own transitions, which rebuild all orders and totals.

    Raises:
      ValueError: its nodes are no tree: a root, and states that each extend an earlier one, all different.
    """
    seen: dict[int, Node] = {}
    for node, _ in nodes:
        parent = seen.get(node.parent)
        known = 0 if parent is None else len(parent.ids)
        extends = parent is not None and len(node.ids) > known and np.array_equal(node.ids[:known], parent.ids)
        if node.id in index.nodes or node.id in seen or not (extends if seen else node.parent is None):
            raise ValueError(f"nodes.npz: node {node.id} comes twice, or does not extend its parent {node.parent}")
        seen[node.id] = node
    if len({node.ids.tobytes() for node, _ in nodes}) < max(len(nodes), 1) or tree_key(nodes[0][0].ids) in index.trees:
        raise ValueError("trees.npz: a tree without nodes, a state that comes twice in its tree, or two trees of one prompt")
    root_ids = nodes[0][0].ids
    tree = Tree(tree_key(root_ids), Problem(prompt_ids=root_ids, **row), [], **numbers)
    index.add_tree(tree)
    for node, counts in nodes:
        node.tree = tree.key
        index.add_node(tree, node)
        if node.observations:
            index.set_counts(tree, node, counts["last_k_succ"], counts["last_k_total"])
        index.add_sft_updates(tree, node, counts["sft_updates"])


def _read_nodes(nodes: "_Columns", origins: Iterator[Origin]) -> Iterator[tuple[Node, dict[str, int]]]:
    """Yields each node, still without its tree, and those of its counts that the index adds up."""
    counts = ("last_k_succ", "last_k_total", "sft_updates")
    changing = tuple(name for name in _NODE_COLUMNS if name not in counts)
    names = ("id", "parent", "created_step", *changing, *counts)
    for ids, *numbers in zip(nodes.lists("ids"), *map(nodes.ints, names), strict=True):
        row = dict(zip(names, numbers, strict=True))
        parent = None if row["parent"] < 0 else row["parent"]
        node = Node(row["id"], b"", parent, ids, row["created_step"], None if parent is None else next(origins))
        for name in changing:
            setattr(node, name, row[name])
        node.active = bool(row["active"])
        yield node, row


def _read_origins(columns: "_Columns") -> Iterator[Origin]:
    numbers = map(columns.ints, ("event", "event_step"))
    lists = map(columns.lists, ("response_ids", "failed_suffix_ids", "suffix_ids"))
    for *row, reward in zip(*numbers, *lists, columns.ints("reward"), strict=True):
        yield Origin(*row, None if math.isnan(reward) else reward)


class _Columns:
    """The columns of one npz file, in memory."""

    def __init__(self, path: pathlib.Path):
        self._arrays, self._path = read_columns(path), path

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            raise ValueError(f"{self._path.name} has no column {name}")
        return self._arrays[name]

    def ints(self, name: str) -> list[int]:
        if name in _YOUNGER and name not in self._arrays:
            return [0] * len(self["created_step"])
        return self[name].tolist()

    def lists(self, name: str) -> Iterator[Ids]:
        """A column of token lists, each as a buffer of its own: a view would keep the whole file in memory."""
        values, offsets = self[name], self[f"{name}_offsets"].tolist()
        for start, stop in itertools.pairwise(offsets):
            ids = values[start:stop].copy()
            ids.flags.writeable = False
            yield ids
