"""A saved forest: the tables of a snapshot, and the trees that they give back. `saved` has the format of the files:

curriculum.json   pool type, format version, cumulative counters
trees             one row per tree, in insertion order; its `num_nodes` rows of nodes are adjacent, the root first
nodes             one row per node; of a root, `parent` is -1 and what describes its origin is empty
events            one row per failed rollout: `id`, `node` that it started from, `step`, `response_ids`
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepgrpo.curriculum.base import tree_key
from deepgrpo.curriculum.forest_index import DERIVED, Counters, Event, Node, Origin, Tree
from deepgrpo.curriculum.saved import Saved, fields_of, read_header, read_saved, write_header, write_saved
from deepgrpo.types import Ids, as_ids

POOL, VERSION = "forest", 2
NO_IDS = as_ids([])
NO_ORIGIN = Origin(-1, -1, NO_IDS, NO_IDS, NO_IDS, None)  # of a root


OF_TREE = fields_of(Tree, "key", "nodes", *DERIVED)  # what nothing else implies
OF_NODE = fields_of(Node, "tree", "origin", "depth", "waiting")
TreeRow = NamedTuple("TreeRow", [*OF_TREE, ("num_nodes", int)])
NodeRow = NamedTuple("NodeRow", [*OF_NODE, *Origin.__annotations__.items()])


class EventRow(NamedTuple):
    step: int
    id: int
    node: int
    response_ids: Ids


RECORDS = {"trees": TreeRow, "nodes": NodeRow, "events": EventRow}
TREE_FIELDS, NODE_FIELDS = ([name for name, _ in fields] for fields in (OF_TREE, OF_NODE))
_of_tree, _of_node = operator.attrgetter(*TREE_FIELDS), operator.attrgetter(*NODE_FIELDS)


@dataclasses.dataclass(frozen=True)
class SavedForest:
    """A forest in memory, without an index; all its events wait. trees: by key, in insertion order."""

    trees: dict[bytes, Tree]
    counters: Counters = dataclasses.field(default_factory=Counters)

    def nodes(self) -> Iterable[Node]:
        return itertools.chain.from_iterable(tree.nodes for tree in self.trees.values())

    def num_events(self) -> int:
        return sum(len(node.waiting) for node in self.nodes())


def tables(trees: Iterable[Tree], in_flight: Sequence[Event] = ()) -> dict[str, Saved]:
    """Copies all that changes; token ids are immutable and stay shared."""
    tree_rows, node_rows, events = [], [], list(in_flight)
    for tree in trees:
        tree_rows.append((*_of_tree(tree), len(tree.nodes)))
        for node in tree.nodes:
            node_rows.append(_of_node(node) + (node.origin or NO_ORIGIN))
            events += node.waiting
    return {"trees": Saved(tree_rows), "nodes": Saved(node_rows), "events": Saved(events)}


def forest(saved: Mapping[str, Saved], fields: Mapping[str, Any]) -> SavedForest:
    """Gives back the trees of the tables.

    Raises:
      ValueError: they are no forest: a tree has a root, and states that each extend an earlier one, all different; every event
        has a node; the counters are those of `Counters`.
    """
    counters = fields["counters"]
    known = dataclasses.asdict(Counters())
    if counters.keys() != known.keys() or not all(type(counters[name]) is type(value) for name, value in known.items()):
        raise ValueError(f"counters {counters}, expected {known}")
    trees: dict[bytes, Tree] = {}
    nodes: dict[int, Node] = {}
    rows = iter(saved["nodes"].rows)
    for row in saved["trees"].rows:
        of_tree = [_node(node) for node in itertools.islice(rows, row.num_nodes)]
        tree = _tree(row, of_tree)
        if tree.key in trees or not nodes.keys().isdisjoint(node.id for node in of_tree):
            raise ValueError("nodes.npz: a node comes twice, or two trees have one prompt")
        trees[tree.key] = tree
        nodes |= {node.id: node for node in of_tree}
    if next(rows, None) is not None:
        raise ValueError("nodes.npz has more nodes than the trees of trees.npz")
    seen: set[int] = set()
    for event in sorted(saved["events"].rows, key=lambda event: event[:2]):
        if event.node not in nodes or event.id in seen:
            raise ValueError(f"events.npz: event {event.id} comes twice, or its node {event.node} is in no tree")
        seen.add(event.id)
        nodes[event.node].waiting.append(tuple(event))
    if max(nodes, default=-1) >= counters["next_node"] or max(seen, default=-1) >= counters["next_event"]:
        raise ValueError("curriculum.json: the next handle is in use")
    return SavedForest(trees, Counters(**counters))


def _node(row: NodeRow) -> Node:
    """The node, still without its tree."""
    origin = None if row.parent is None else Origin(*row[len(NODE_FIELDS) :])
    return Node(tree=b"", origin=origin, **dict(zip(NODE_FIELDS, row, strict=False)))


def _tree(row: TreeRow, nodes: list[Node]) -> Tree:
    by_id: dict[int, Node] = {}
    for node in nodes:
        parent = by_id.get(node.parent)
        known = 0 if parent is None else len(parent.ids)
        extends = parent is not None and len(node.ids) > known and np.array_equal(node.ids[:known], parent.ids)
        if node.id in by_id or not (extends if by_id else node.parent is None):
            raise ValueError(f"nodes.npz: node {node.id} comes twice, or does not extend its parent {node.parent}")
        by_id[node.id] = node
        node.tree = tree_key(nodes[0].ids)
    if not nodes or len({node.ids.tobytes() for node in nodes}) < len(nodes):
        raise ValueError("nodes.npz: a tree without nodes, or a state that comes twice in its tree")
    fields = dict(zip(TREE_FIELDS, row, strict=False)) | {"problem": dataclasses.replace(row.problem, prompt_ids=nodes[0].ids)}
    return Tree(key=nodes[0].tree, nodes=nodes, **fields)


def read(folder: str) -> SavedForest:
    """Reads a folder that `Forest.state` or `write` has filled.

    Raises:
      NotAsSaved: a file is damaged, or the folder's pool type or format version is another one.
    """
    header = read_header(folder, POOL, VERSION)
    return forest({name: read_saved(folder, name, record) for name, record in RECORDS.items()}, header)


def write(saved: SavedForest, folder: str) -> None:
    """Fills an existing, empty folder, from which `Forest.restore` and `read` give the same forest."""
    for name, table in tables(saved.trees.values()).items():
        write_saved(folder, name, RECORDS[name], table)
    write_header(folder, POOL, VERSION, {"counters": dataclasses.asdict(saved.counters)})
