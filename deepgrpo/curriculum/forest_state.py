"""A snapshot of the forest: taken in short slices of the lock, written as plain NumPy and JSON files, never pickled.

Files (`np.load` and a text editor open them; equal content gives equal bytes):

    curriculum.json   pool type, format version, cumulative counters, the next handles
    trees.npz         one row a tree, in insertion order; its `num_nodes` rows of nodes.npz are adjacent, the root first
    nodes.npz         one row a node; `parent` is -1 for a root; `problem` is a row of problems; `origin_*` say which failed
                      rollout and which correction made the node (empty for a root; `origin_reward` is NaN if there is none)
    events.npz        one row a failed rollout: `id`, `node` that it started from, `step`, `problem`, `in_flight`
    problems.jsonl    one row a distinct problem: the data set's row, without its tokens
    problems.npz      its `prompt_ids`

A column of token lists is stored as `<name>` (all ids, concatenated) and `<name>_offsets` (row i is [offsets[i], offsets[i+1])).
"""

import dataclasses
import json
import math
import pathlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepgrpo.curriculum.forest_index import Index
from deepgrpo.curriculum.forest_records import Event, Node, Origin, Tree, tree_key
from deepgrpo.curriculum.header import read_header, write_header
from deepgrpo.types import Ids, Problem

POOL, VERSION = "forest", 1
_SLICE = 2000  # trees, nodes and events copied under one hold of the lock: 1-2 ms

_TREE_COLUMNS = ("created_step", "last_updated_step", "rollout_clock", "dispatch_clock", "sft_clock", "num_nodes")
_NODE_COLUMNS = (  # what can change after a node's creation
    "active",
    "observations",
    "last_k_succ",
    "last_k_total",
    "rollout_clock",
    "dispatch_clock",
    "sft_clock",
    "last_success_step",
    "last_fail_step",
    "sft_updates",
)


@dataclasses.dataclass
class _Rows:
    """Copied content. Flat arrays, because a million small tuples would set off the garbage collector inside the lock."""

    trees: array = dataclasses.field(default_factory=lambda: array("q"))  # len(_TREE_COLUMNS) numbers a tree
    nodes: array = dataclasses.field(default_factory=lambda: array("q"))  # len(_NODE_COLUMNS) numbers a node
    node_records: list[Node] = dataclasses.field(default_factory=list)  # only their constant fields are read later
    waiting: list[Event] = dataclasses.field(default_factory=list)

    def add(self, tree: Tree) -> None:
        clocks = tree.rollout_clock, tree.dispatch_clock, tree.sft_clock
        self.trees.extend((tree.created_step, tree.last_updated_step, *clocks, len(tree.nodes)))
        for node in tree.nodes:
            counts = node.last_k_succ or 0, node.last_k_total or 0  # None iff there is no observation
            clocks = node.rollout_clock, node.dispatch_clock, node.sft_clock
            steps = node.last_success_step, node.last_fail_step
            self.nodes.extend((node.active, node.observations, *counts, *clocks, *steps, node.sft_updates))
            self.waiting += node.waiting
        self.node_records += tree.nodes

    def extend(self, other: "_Rows") -> None:
        self.trees += other.trees
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
        self.rows = _Rows()
        self.in_flight = [index.in_flight[i] for i in sorted(index.in_flight)]
        self._trees = list(index.trees.values())
        self._next = 0
        self._kept: dict[Tree, _Rows] = {}

    @property
    def done(self) -> bool:
        return self._next == len(self._trees)

    def keep(self, tree: Tree) -> None:
        """Copies a tree ahead of its turn."""
        tree.captured = self.number
        self._kept[tree] = rows = _Rows()
        rows.add(tree)

    def advance(self) -> None:
        """Copies the next slice."""
        rows = self.rows
        size = 0
        while size < _SLICE and not self.done:
            tree = self._trees[self._next]
            self._next += 1
            if tree.captured == self.number:
                rows.extend(self._kept.pop(tree))
            else:
                tree.captured = self.number
                rows.add(tree)
            size += 1 + len(tree.nodes) + tree.num_events


class _Problems:
    """Numbers distinct problems in order of first use; equality is of content, so that a restored forest numbers them alike."""

    def __init__(self):
        self.lines: list[str] = []
        self.prompt_ids: list[Ids] = []
        self._by_identity: dict[int, int] = {}
        self._by_content: dict[tuple[str, bytes], int] = {}
        self._encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode

    def numbers(self, problems: Sequence[Problem]) -> np.ndarray:
        """int32[len]; the problems must stay alive while this object is used."""
        known = self._by_identity
        for problem in problems:
            if id(problem) not in known:
                known[id(problem)] = self._number(problem)
        return np.fromiter((known[id(problem)] for problem in problems), np.int32, len(problems))

    def _number(self, problem: Problem) -> int:
        try:
            line = self._encode(
                {
                    "index": problem.index,
                    "data_source": problem.data_source,
                    "ground_truth": problem.ground_truth,
                    "question": problem.question,
                    "extra": dict(problem.extra),
                }
            )
        except TypeError as error:
            raise ValueError(
                f"problem {problem.index} of {problem.data_source!r} cannot be saved: not JSON-serialisable ({error})"
            ) from error
        content = line, problem.prompt_ids.tobytes()
        number = self._by_content.get(content)
        if number is None:
            number = self._by_content[content] = len(self.lines)
            self.lines.append(line)
            self.prompt_ids.append(problem.prompt_ids)
        return number


def write(folder: str, capture: Capture, counters: dict[str, int]) -> None:
    """Writes a finished capture; needs no lock."""
    path, rows, problems = pathlib.Path(folder), capture.rows, _Problems()
    trees = np.frombuffer(rows.trees, np.int64).reshape(-1, len(_TREE_COLUMNS))
    np.savez(path / "trees.npz", **{name: trees[:, i] for i, name in enumerate(_TREE_COLUMNS)})
    np.savez(path / "nodes.npz", **_node_columns(rows, problems))
    np.savez(path / "events.npz", **_event_columns(rows.waiting, capture.in_flight, problems))
    np.savez(path / "problems.npz", **_ragged("prompt_ids", problems.prompt_ids))
    (path / "problems.jsonl").write_text("".join(line + "\n" for line in problems.lines), encoding="utf-8")
    write_header(folder, POOL, VERSION, {"counters": counters})


def _node_columns(rows: _Rows, problems: _Problems) -> dict[str, np.ndarray]:
    records = rows.node_records
    changing = np.frombuffer(rows.nodes, np.int64).reshape(-1, len(_NODE_COLUMNS))
    nothing = Origin(-1, -1, *[np.zeros(0, np.int32)] * 3, reward=None)
    origins = [node.origin or nothing for node in records]
    return {
        "id": _ints([node.id for node in records]),
        "parent": _ints([-1 if node.parent is None else node.parent for node in records]),
        "created_step": _ints([node.created_step for node in records]),
        "problem": problems.numbers([node.problem for node in records]),
        **{name: changing[:, i] for i, name in enumerate(_NODE_COLUMNS)},
        "origin_event": _ints([origin.event for origin in origins]),
        "origin_step": _ints([origin.event_step for origin in origins]),
        "origin_reward": np.array([math.nan if origin.reward is None else origin.reward for origin in origins], np.float64),
        **_ragged("ids", [node.ids for node in records]),
        **_ragged("origin_response_ids", [origin.response_ids for origin in origins]),
        **_ragged("origin_failed_suffix_ids", [origin.failed_suffix_ids for origin in origins]),
        **_ragged("origin_suffix_ids", [origin.suffix_ids for origin in origins]),
    }


def _event_columns(waiting: list[Event], in_flight: list[Event], problems: _Problems) -> dict[str, np.ndarray]:
    events = waiting + in_flight
    steps, ids, nodes, event_problems, responses = zip(*events, strict=True) if events else ((),) * 5
    return {
        "id": _ints(ids),
        "node": _ints(nodes),
        "step": _ints(steps),
        "problem": problems.numbers(event_problems),
        "in_flight": np.arange(len(events)) >= len(waiting),
        **_ragged("response_ids", responses),
    }


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _ragged(name: str, lists: Sequence[Ids]) -> dict[str, np.ndarray]:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=offsets[1:])
    return {name: np.concatenate(lists) if len(lists) else np.zeros(0, np.int32), f"{name}_offsets": offsets}


def read(folder: str, index: Index) -> dict[str, int]:
    """Fills an empty index from a folder, with every event waiting; returns the counters and next handles.

    Raises:
      ValueError: the folder's pool type or format version is another one.
    """
    header = read_header(folder, POOL, VERSION)
    path = pathlib.Path(folder)
    problems = _read_problems(path)
    trees, nodes, events = (_Columns(path / f"{name}.npz") for name in ("trees", "nodes", "events"))
    parent, observations, updates = nodes.ints("parent"), nodes.ints("observations"), nodes.ints("sft_updates")
    k_succ, k_total = nodes.ints("last_k_succ"), nodes.ints("last_k_total")
    make_node = _node_reader(nodes, problems)
    row = 0
    for created, updated, rollout, dispatch, sft, size in zip(*map(trees.ints, _TREE_COLUMNS), strict=True):
        key = tree_key(nodes.ids("ids", row))
        tree = Tree(key, [], created, updated, rollout, dispatch, sft)
        index.add_tree(tree)
        for i in range(row, row + size):
            node = make_node(i, key, None if parent[i] < 0 else parent[i])
            index.add_node(tree, node)
            if observations[i]:
                index.set_counts(tree, node, k_succ[i], k_total[i])
            index.add_sft_updates(tree, node, updates[i])
        row += size
    for i in np.argsort(events["id"], kind="stable").tolist():  # order of arrival
        node = index.nodes[int(events["node"][i])]
        event = Event(
            int(events["step"][i]), int(events["id"][i]), node.id, problems[events["problem"][i]], events.ids("response_ids", i)
        )
        index.push(index.trees[node.tree], node, event)
    return header["counters"]


def _node_reader(nodes: "_Columns", problems: list[Problem]) -> Callable[[int, bytes, int | None], Node]:
    """Returns a function that makes the node of a row, but for the counts that the index adds up."""
    names = ("id", "created_step", "problem", "active", "observations", "rollout_clock", "dispatch_clock", "sft_clock")
    names += ("last_success_step", "last_fail_step", "origin_event", "origin_step")
    columns = [nodes.ints(name) for name in names]
    rewards = nodes["origin_reward"].tolist()

    def make(i: int, key: bytes, parent: int | None) -> Node:
        handle, created, problem, active, observations, rollout, dispatch, sft, success, fail, event, step = (
            column[i] for column in columns
        )
        origin = None
        if parent is not None:
            lists = (nodes.ids(f"origin_{name}", i) for name in ("response_ids", "failed_suffix_ids", "suffix_ids"))
            origin = Origin(event, step, *lists, reward=None if math.isnan(rewards[i]) else rewards[i])
        return Node(
            id=handle,
            tree=key,
            parent=parent,
            ids=nodes.ids("ids", i),
            problem=problems[problem],
            created_step=created,
            origin=origin,
            active=bool(active),
            observations=observations,
            rollout_clock=rollout,
            dispatch_clock=dispatch,
            sft_clock=sft,
            last_success_step=success,
            last_fail_step=fail,
        )

    return make


class _Columns:
    """The columns of one npz file, in memory."""

    def __init__(self, path: pathlib.Path):
        with np.load(path, allow_pickle=False) as arrays:
            self._arrays: dict[str, np.ndarray] = dict(arrays.items())

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def ints(self, name: str) -> list[int]:
        return self._arrays[name].tolist()

    def ids(self, name: str, row: int) -> Ids:
        """Row `row` of a column of token lists, as a buffer of its own: a view would keep the whole file in memory."""
        offsets = self._arrays[f"{name}_offsets"]
        ids = self._arrays[name][offsets[row] : offsets[row + 1]].copy()
        ids.flags.writeable = False
        return ids


def _read_problems(path: pathlib.Path) -> list[Problem]:
    columns = _Columns(path / "problems.npz")
    with open(path / "problems.jsonl", encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [Problem(prompt_ids=columns.ids("prompt_ids", i), **row) for i, row in enumerate(rows)]
