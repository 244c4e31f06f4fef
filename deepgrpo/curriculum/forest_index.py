"""The forest's data: trees (one per prompt), nodes (states), failures for the teacher, and the orders in which they are served.

`Index` keeps each tree's place in three orders (rollout, SFT, teacher). Whatever changes a tree or one of its nodes ends with
`_update`, which moves the tree to where it now belongs; the node that is served next is looked for among the tree's nodes. It
knows no rule and takes no lock: `forest.Forest` does both. Also here: read-only views (metrics, one node's surroundings).
"""

import collections
import dataclasses
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sortedcontainers import SortedList

from deepgrpo.curriculum.base import NEVER
from deepgrpo.types import Ids, Problem

MAX_CHILDREN, MAX_LINEAGE = 8, 32  # that dumps show of a node
DEEPEST = 5  # depth from which on metrics count states together
PERCENTILES = (50, 90)
ROLLOUT, SFT, TEACHER = range(3)  # the orders
DERIVED = ("in_flight", "busy", "dispatchable", "places")  # fields of a tree that follow from others


@dataclasses.dataclass
class Counters:
    """Cumulative; saved with the forest. At any time: enqueued = succeeded + duplicate + invalid + failed + cleared
    + stale_parent_inactive + dropped_capacity + nodes_refused + the failures in the forest."""

    next_node: int = 0
    next_event: int = 0
    enqueued: int = 0
    dispatched: int = 0
    succeeded: int = 0
    failed: int = 0
    stale_parent_inactive: int = 0
    stale: int = 0
    duplicate: int = 0
    invalid: int = 0
    sft_sampled: int = 0
    cleared: int = 0
    dropped_capacity: int = 0  # failures dropped or not taken because of a bound
    nodes_refused: int = 0  # corrections that a full tree refused
    mastered: int = 0  # states other than roots that retired
    mastered_visits: int = 0  # groups that these took
    mastered_unfailed: int = 0  # how many of them never had a failure
    mastered_steps: int = 0  # steps from their creation to their retirement
    reopened: int = 0  # roots that failed again after they had retired
    first_children: int = 0  # trees that got a state
    first_child_steps: int = 0  # steps that this took from the tree's creation
    first_child_step: int = NEVER  # of the forest's first state
    child_event_steps: int = 0  # steps from the failures to the states made of them
    transfer_trees: int = 0  # removed trees whose root was observed both before and after a state of the tree was mastered
    transfer_before: float = 0.0  # sums over these of the root's success rates
    transfer_after: float = 0.0


# One failed rollout for the teacher: (step that produced it, id, node that it started from, response_ids). Ids are a creation
# sequence and never reused; tuples order by (step, id), which is the order of a node's stack. A plain tuple, not a class: the
# garbage collector stops following tuples of numbers and arrays, so that a million waiting failures do not slow it down.
Event = tuple[int, int, int, Ids]


class Origin(NamedTuple):
    """Where a node came from: the failed rollout and the teacher's correction of it. Kept for SFT rows and inspection."""

    event: int
    event_step: int
    response_ids: Ids  # int32[len], the student's whole failed response
    failed_suffix_ids: Ids  # int32[len], what the student wrote after the locked prefix
    suffix_ids: Ids  # int32[len], what the teacher wrote instead; not empty
    reward: float | None  # of the corrected answer


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One state. Everything above the blank line never changes after creation."""

    id: int  # creation sequence: never reused, breaks ties between siblings
    tree: bytes
    parent: int | None  # None: the root
    ids: Ids  # int32[len], prompt ids followed by the locked prefix
    created_step: int
    origin: Origin | None  # None: the root

    active: bool = True
    observations: int = 0
    last_k_succ: int | None = None
    last_k_total: int | None = None
    rollout_clock: int = NEVER  # stamped by sampling and by observation
    dispatch_clock: int = NEVER
    dispatch_tick: int = 0  # number of the last failure that the teacher was given, among all; 0 if the order is the reference's
    sft_clock: int = NEVER
    last_success_step: int = NEVER
    last_fail_step: int = NEVER
    sft_updates: int = 0
    mastered_in_a_row: int = 0  # newest observations in a row that succeeded as a whole
    depth: int = 0  # edges to the root; follows from the parents
    waiting: list[Event] = dataclasses.field(default_factory=list)  # ascending; the teacher is given the last

    @property
    def candidate(self) -> bool:
        """Whether it can be rolled out, and trained on by SFT."""
        return self.active and self.parent is not None

    def lru_key(self, clock: str) -> tuple[int, int, int, int]:
        """Ascending in order of service; `clock` is rollout, sft or dispatch."""
        tick = self.dispatch_tick if clock == "dispatch" else 0
        return getattr(self, f"{clock}_clock"), tick, self.created_step, self.id


@dataclasses.dataclass(slots=True, eq=False)
class Tree:
    """All states of one prompt. `nodes[0]` is the root; nodes are in creation order and are never removed one by one."""

    key: bytes
    problem: Problem  # its prompt_ids are the root's ids
    nodes: list[Node]
    created_step: int
    last_updated_step: int
    rollout_clock: int = NEVER
    dispatch_clock: int = NEVER
    dispatch_tick: int = 0  # as of a node
    sft_clock: int = NEVER
    mastered: int = 0  # states other than the root that retired
    before_succ: int = 0  # rollouts of the root before that, but for the group that made the tree: successes, all
    before_total: int = 0
    after_succ: int = 0  # and after it
    after_total: int = 0
    # What the index derives:
    in_flight: int = 0  # failures that are with the teacher
    busy: int = 0  # of these, the ones that are worked on
    dispatchable: int = 0  # waiting failures of active nodes
    places: tuple = (None, None, None)  # in the three orders

    def root_transfer(self) -> tuple[float, float] | None:
        """The root's success rates before and after a state of the tree was mastered, once there are both. The group that made
        the tree counts as neither: it is there because it failed, so its rate says nothing about the prompt."""
        if not (self.before_total and self.after_total):
            return None
        return self.before_succ / self.before_total, self.after_succ / self.after_total


class Index:
    """Trees, nodes and failures, with the orders that follow from them kept up to date at each transition."""

    def __init__(self, trees: Iterable[Tree] = (), most_in_flight: int = 0):
        """`trees` are taken over. `most_in_flight`: failures of a tree that are worked on at once; 0: any number."""
        self.most_in_flight = most_in_flight
        self.trees: dict[bytes, Tree] = {}
        self.nodes: dict[int, Node] = {}
        self.events: dict[int, Event] = {}
        self.in_flight: dict[int, Event] = {}
        self.resting: set[int] = set()  # failures in flight that nobody works on
        self.waiting = SortedList()  # ids of the failures that wait: by age
        self.orders = SortedList(), SortedList(), SortedList()
        self.removable: dict[bytes, None] = {}  # trees without an active node and without failures
        self.num_dispatchable = 0  # waiting failures of active nodes
        for tree in trees:
            self.trees[tree.key] = tree
            tree.in_flight, tree.busy, tree.dispatchable, tree.places = 0, 0, 0, (None, None, None)
            for node in tree.nodes:
                self._place(node)
                self.events |= {event[1]: event for event in node.waiting}
            self._update(tree)
        self.waiting.update(self.events)

    def __len__(self) -> int:
        return len(self.trees)

    def tree_of(self, node: Node) -> Tree:
        return self.trees[node.tree]

    def served_next(self, order: int) -> Iterable[Tree]:
        """Trees in the order of service; it must not change meanwhile."""
        return (self.trees[place[-1]] for place in self.orders[order])

    #### Transitions

    def add_tree(self, tree: Tree, root: Node) -> None:
        self.trees[tree.key] = tree
        self.add_node(tree, root)

    def add_node(self, tree: Tree, node: Node) -> None:
        tree.nodes.append(node)
        self._place(node)
        self._update(tree)

    def remove_tree(self, tree: Tree) -> None:
        """Removes a tree of `removable`; it has no active node and no failure, hence is in no order."""
        del self.trees[tree.key], self.removable[tree.key]
        for node in tree.nodes:
            del self.nodes[node.id]

    def change(self, tree: Tree, node: Node, **values: Any) -> None:
        """Sets attributes of a node, such as `active`, on which orders depend."""
        for name, value in values.items():
            setattr(node, name, value)
        self._update(tree)

    def stamp(self, tree: Tree, node: Node, clock: str, step: int, tick: int = 0) -> None:
        """Sets a clock (rollout, sft or dispatch) of a node and its tree."""
        for record in (node, tree):
            setattr(record, f"{clock}_clock", step)
            if clock == "dispatch":
                record.dispatch_tick = tick
        self._update(tree)

    def add_failures(self, node: Node, events: Sequence[Event]) -> None:
        for event in events:
            insort(node.waiting, event)
            self.events[event[1]] = event
            self.waiting.add(event[1])
        self._update(self.tree_of(node))

    def dispatch(self, tree: Tree, step: int, tick: int) -> tuple[Node, Event]:
        """Puts the newest failure of the tree's least recently served node in flight, and stamps the clocks of both."""
        node = min((node for node in tree.nodes if node.active and node.waiting), key=lambda node: node.lru_key("dispatch"))
        event = node.waiting.pop()
        self.waiting.remove(event[1])
        self.in_flight[event[1]] = event
        tree.in_flight += 1
        tree.busy += 1
        self.stamp(tree, node, "dispatch", step, tick)
        return node, event

    def requeue(self, event_id: int) -> None:
        """Undoes `dispatch` but for the clocks; no effect on a failure that is not in flight."""
        if (event := self.in_flight.get(event_id)) is not None:
            self._land(event)
            self.add_failures(self.nodes[event[2]], [event])

    def rest(self, event_id: int) -> None:
        """Notes that nobody works on a failure in flight for now."""
        if event_id in self.in_flight and event_id not in self.resting:
            tree = self.tree_of(self.nodes[self.in_flight[event_id][2]])
            self.resting.add(event_id)
            tree.busy -= 1
            self._update(tree)

    def discard(self, event: Event) -> None:
        """Forgets a failure, waiting or in flight."""
        node = self.nodes[event[2]]
        del self.events[event[1]]
        if event[1] in self.in_flight:
            self._land(event)
        else:
            del node.waiting[bisect_left(node.waiting, event)]
            self.waiting.remove(event[1])
        self._update(self.tree_of(node))

    def clear_events(self) -> tuple[int, int]:
        """Forgets all failures; returns how many were waiting and in flight."""
        counts = len(self.waiting), len(self.in_flight)
        for event in list(self.events.values()):
            self.discard(event)
        return counts

    def _land(self, event: Event) -> None:
        tree = self.tree_of(self.nodes[event[2]])
        del self.in_flight[event[1]]
        tree.in_flight -= 1
        tree.busy -= event[1] not in self.resting
        self.resting.discard(event[1])

    def _place(self, node: Node) -> None:
        self.nodes[node.id] = node
        if node.parent is not None:
            node.depth = self.nodes[node.parent].depth + 1

    def _update(self, tree: Tree) -> None:
        """Moves a tree to where it belongs in each order, and among the removable ones."""
        active = candidates = waiting = dispatchable = 0
        for node in tree.nodes:
            waiting += len(node.waiting)
            if node.active:
                active += 1
                candidates += node.parent is not None
                dispatchable += len(node.waiting)
        full = self.most_in_flight and tree.busy >= self.most_in_flight
        born = tree.created_step, tree.key
        places = (
            (tree.rollout_clock, *born) if candidates else None,
            (tree.sft_clock, *born) if candidates else None,
            (tree.dispatch_clock, tree.dispatch_tick, *born) if dispatchable and not full else None,
        )
        if places != tree.places:
            for order, old, new in zip(self.orders, tree.places, places, strict=True):
                if old != new:
                    if old is not None:
                        order.remove(old)
                    if new is not None:
                        order.add(new)
            tree.places = places
        self.num_dispatchable += dispatchable - tree.dispatchable
        tree.dispatchable = dispatchable
        if active or waiting or tree.in_flight:
            self.removable.pop(tree.key, None)
        else:
            self.removable[tree.key] = None


#### Views


def metrics(index: Index, counters: Counters) -> dict[str, float]:
    """All sizes and counters by their published names; walks once over the nodes."""
    c, trees, nodes = counters, len(index.trees), len(index.nodes)
    active = updates = 0
    observed, succeeded, depths = [0, 0], [0, 0], collections.Counter()
    for node in index.nodes.values():
        kind = node.parent is not None
        active += node.active
        updates += node.sft_updates
        depths[node.depth] += node.active and kind
        observed[kind] += node.observations > 0
        succeeded[kind] += (node.last_k_succ or 0) > 0
    candidates = depths.total()
    values = {  # each by all its published names
        "forest/num_trees forest_pool/trees forest_pool/num_trees": trees,
        "forest/num_nodes forest_pool/total_nodes": nodes,
        "forest/active_nodes forest_pool/active_nodes": active,
        "forest/active_nonroot_nodes sft/eligible_nodes forest_pool/suffix_sft_candidate_nodes": candidates,
        "forest/teacher_suffix_nodes forest_pool/suffix_sft_nodes": nodes - trees,  # all but the roots have a teacher suffix
        "forest/deactivated_nodes forest_pool/rollout_retired_nodes": nodes - active,
        "forest/nodes_refused": c.nodes_refused,
        "teacher/events_queued": len(index.waiting),
        "teacher/events_dispatchable": index.num_dispatchable,
        "teacher/events_in_flight": len(index.in_flight),
        "teacher/events_dispatched forest_pool/events_dispatched": c.dispatched,
        "teacher/events_succeeded forest_pool/teacher_successes": c.succeeded,
        "teacher/events_duplicate_dropped forest_pool/duplicate_child": c.duplicate,
        "teacher/events_invalid forest_pool/invalid_child": c.invalid,
        "teacher/events_stale_parent_inactive": c.stale_parent_inactive,
        "teacher/events_failed forest_pool/teacher_failed": c.failed,
        "teacher/events_stale forest_pool/teacher_stale": c.stale,
        "teacher/events_cleared forest_pool/teacher_cleared": c.cleared,
        "teacher/events_dropped_capacity": c.dropped_capacity,
        "sft/eligible_trees forest_pool/active_trees": len(index.orders[SFT]),
        "sft/sampled_nodes forest_pool/suffix_sft_sampled_cumulative": c.sft_sampled,
        "sft/recorded_node_updates forest_pool/suffix_sft_updates_total": updates,
        "sft/optimizer_steps": 0,  # the training loop overwrites it
        "root_any_success_rate": succeeded[0] / max(observed[0], 1),
        "prefix_any_success_rate": succeeded[1] / max(observed[1], 1),
        "forest_pool/observed_root_nodes": observed[0],
        "forest_pool/observed_nonroot_nodes": observed[1],
        "forest_pool/pending_events": len(index.events),
        "forest_pool/events_enqueued": c.enqueued,
    }
    return {name: value for names, value in values.items() for name in names.split()} | _history(index, c, +depths)


def _history(index: Index, c: Counters, depths: collections.Counter[int]) -> dict[str, float]:
    """Depths of the active states, and what came of all states so far; what has no value yet is left out."""
    values = {f"forest_depth/{depth}": depths[depth] for depth in range(1, DEEPEST)}
    values[f"forest_depth/from_{DEEPEST}"] = sum(n for depth, n in depths.items() if depth >= DEEPEST)
    if depths:
        values["forest_depth/mean"] = sum(depth * n for depth, n in depths.items()) / depths.total()
        values["forest_depth/max"] = max(depths)
    values |= {"mastery/nodes": c.mastered, "mastery/reopened_roots": c.reopened}
    if c.mastered:
        values["mastery/visits_mean"] = c.mastered_visits / c.mastered
        values["mastery/steps_mean"] = c.mastered_steps / c.mastered
        values["mastery/unfailed_share"] = c.mastered_unfailed / c.mastered
    if c.first_children:
        values["mastery/first_node_step"] = c.first_child_step
        values["mastery/first_node_wait_mean"] = c.first_child_steps / c.first_children
        values["mastery/node_event_age_mean"] = c.child_event_steps / c.succeeded
    rates = [rates for tree in index.trees.values() if (rates := tree.root_transfer()) is not None]
    values["transfer/trees"] = n = c.transfer_trees + len(rates)
    if n:
        before = (c.transfer_before + sum(rate for rate, _ in rates)) / n
        after = (c.transfer_after + sum(rate for _, rate in rates)) / n
        values |= {"transfer/root_success_before": before, "transfer/root_success_after": after, "transfer/gain": after - before}
    return values


def event_ages(index: Index, step: int) -> dict[str, float]:
    """Steps that the failures have waited which the teacher could be given now; empty without any."""
    ages = sorted(step - event[0] for node in index.nodes.values() if node.active for event in node.waiting)
    if not ages:
        return {}
    values = {"mean": sum(ages) / len(ages), "max": ages[-1]}
    values |= {f"p{percent}": ages[math.ceil(percent / 100 * len(ages)) - 1] for percent in PERCENTILES}
    return {f"teacher/event_age_{name}": float(value) for name, value in values.items()}


def same_ids(a: Ids, b: Ids) -> bool:
    return len(a) == len(b) and np.array_equal(a, b)


def summary(node: Node, tree: Tree) -> dict[str, Any]:
    """A node without its ids: flags, lengths, clocks, counts, and the success rate of its last observation (None if unknown)."""
    names = ("parent", "active", "created_step", "observations", "last_k_succ", "last_k_total", "last_success_step")
    return {
        "node": node.id,
        **{name: getattr(node, name) for name in (*names, "last_fail_step", "sft_updates")},
        "children": [child.id for child in tree.nodes if child.parent == node.id],
        "length": len(node.ids),
        "success_rate": node.last_k_succ / node.last_k_total if node.last_k_total else None,
        "last_rollout_step": node.rollout_clock,
        "last_dispatch_step": node.dispatch_clock,
        "last_sft_step": node.sft_clock,
        "waiting_events": len(node.waiting),
    }


def context(tree: Tree, node: Node, max_children: int = MAX_CHILDREN, max_lineage: int = MAX_LINEAGE) -> dict[str, Any]:
    """Depths, descendants, the last `max_lineage` nodes from the root to the node, and its first `max_children` children.

    Lineage and children are summaries, with the number cut in `lineage_truncated` and `children_truncated`; depths are in edges
    unless named otherwise.
    """
    by_id = {other.id: other for other in tree.nodes}
    path = [node]
    while path[-1].parent is not None:
        path.append(by_id[path[-1].parent])
    path.reverse()
    below = {node.id: node.depth}  # depths of the node and its descendants; parents come before their children
    for other in tree.nodes:
        if other.parent in below:
            below[other.id] = other.depth
    children = [other for other in tree.nodes if other.parent == node.id]
    first = max(len(path) - max_lineage, 0)
    return {
        "depth_edges": node.depth,
        "depth_tokens": len(node.ids) - len(tree.nodes[0].ids),
        "descendants": len(below) - 1,
        "deepest_depth": max(below.values()),
        "lineage": [summary(other, tree) for other in path[first:]],
        "lineage_truncated": first,
        "children": [summary(child, tree) for child in children[:max_children]],
        "children_truncated": max(len(children) - max_children, 0),
    }


def look_up(tree: Tree, node: Node) -> Mapping[str, Any]:
    """What dumps say of a node: `summary` and `context`, and further

    tree: handle of the root. problem: the tree's. ids: int32[len]. suffix_ids, failed_suffix_ids, response_ids: int32[len] each,
    and reward, of its origin (of a root None). root_success_rate: of the root's last observation, None if there is none.
    """
    root, names = tree.nodes[0], ("suffix_ids", "failed_suffix_ids", "response_ids", "reward")
    return {
        **summary(node, tree),
        **context(tree, node),
        **{name: node.origin and getattr(node.origin, name) for name in names},
        "tree": root.id,
        "problem": tree.problem,
        "ids": node.ids,
        "root_success_rate": summary(root, tree)["success_rate"],
    }


def deepest(index: Index, n: int) -> list[Node]:
    """The first `n` nodes other than roots by depth, then number of children, then observations, each descending."""
    children = collections.Counter(node.parent for node in index.nodes.values())
    states = [node for tree in index.trees.values() for node in tree.nodes[1:]]
    states.sort(key=lambda node: (node.depth, children[node.id], node.observations), reverse=True)  # ties: insertion order
    return states[: max(n, 0)]
