"""The forest's indexes: every query of the rules in `forest_pool` is answered without a scan.

`Index` holds trees, nodes and events with the orders and totals that follow from them; each of its methods is one transition that
keeps all of these consistent. It knows no rule and takes no lock: `forest_pool.Forest` does both.
"""

import collections
from bisect import bisect_left, insort
from collections.abc import Sequence

from deepgrpo.curriculum.forest_order import SortedKeys
from deepgrpo.curriculum.forest_records import Event, History, Node, Order, Tree, digest


class Index:
    """Trees, nodes and events, with what follows from them kept up to date at each transition."""

    def __init__(self, *, track_arrivals: bool, most_in_flight: int = 0):
        """`most_in_flight`: events of a tree that are worked on at once; 0: any number."""
        self.most_in_flight = most_in_flight
        self.trees: dict[bytes, Tree] = {}
        self.nodes: dict[int, Node] = {}
        self.events: dict[int, Event] = {}
        self.in_flight: dict[int, Event] = {}
        self.by_rollout = SortedKeys()  # trees with a node in by_rollout, by rollout clock
        self.by_sft = SortedKeys()  # the same trees, by SFT clock
        self.resting: set[int] = set()  # events in flight that nobody works on
        self.by_dispatch = SortedKeys()  # seats of the trees with a node in by_dispatch, but for those with enough in flight
        self.removable: dict[bytes, None] = {}  # trees without an active node and without events
        # Waiting events by age, only where a bound on all events needs the oldest. An OrderedDict, because finding the first
        # key of a plain dict walks over all that were deleted before it.
        self.arrivals: collections.OrderedDict[int, None] | None = collections.OrderedDict() if track_arrivals else None
        self.num_active = 0
        self.num_candidates = 0  # active nodes except roots: what can be rolled out, and trained on by SFT
        self.num_dispatchable = 0  # waiting events of active nodes
        self.dispatchable_steps: collections.Counter[int] = collections.Counter()  # the same by the step of the failure
        self.depths: collections.Counter[int] = collections.Counter()  # candidates by depth
        self.candidates_histogram: collections.Counter[int] = collections.Counter()  # candidates of a tree -> number of trees
        self.observed = [0, 0]  # nodes with an observation: [roots, others]
        self.succeeded = [0, 0]  # of these, with a success in the last one
        self.sft_updates = 0  # sum over existing nodes
        self.history = History()
        self.capture = None  # a running snapshot (forest_state.Capture); it is shown a tree before the tree's first change

    def touch(self, tree: Tree) -> None:
        """To be called before anything of a tree, its nodes or its waiting events changes (copy on write)."""
        if self.capture is not None and tree.captured != self.capture.number:
            self.capture.keep(tree)

    # ---- trees and nodes

    def add_tree(self, tree: Tree) -> None:
        """Inserts a tree whose `nodes` is empty."""
        if self.capture is not None:
            tree.captured = self.capture.number  # younger than the snapshot: not part of it
        self.trees[tree.key] = tree

    def add_node(self, tree: Tree, node: Node) -> None:
        self.touch(tree)
        tree.nodes.append(node)
        self.nodes[node.id] = node
        if node.parent is not None:
            parent = self.nodes[node.parent]
            parent.children += (node.id,)
            node.depth = parent.depth + 1
            tree.digests[digest(node.ids)] = node.id
        if node.active:
            self._activate(tree, node)
        self._settle(tree)

    def remove_tree(self, tree: Tree) -> None:
        """Removes a tree of `removable`; it has no active node and no event, hence is in no order."""
        self.touch(tree)
        del self.trees[tree.key], self.removable[tree.key]
        for node in tree.nodes:
            del self.nodes[node.id]
            self.sft_updates -= node.sft_updates
            if node.last_k_succ is not None:
                self.observed[node.parent is not None] -= 1
                self.succeeded[node.parent is not None] -= node.last_k_succ > 0

    def set_active(self, tree: Tree, node: Node, active: bool) -> None:
        """Switches a node whose `active` is the opposite."""
        self.touch(tree)
        node.active = active
        if active:
            self._activate(tree, node)
        else:
            self._deactivate(tree, node)
        self._settle(tree)

    def set_counts(self, tree: Tree, node: Node, k_succ: int, k_total: int) -> None:
        self.touch(tree)
        kind = node.parent is not None
        if node.last_k_succ is None:
            self.observed[kind] += 1
        else:
            self.succeeded[kind] -= node.last_k_succ > 0
        self.succeeded[kind] += k_succ > 0
        node.last_k_succ, node.last_k_total = k_succ, k_total

    def add_sft_updates(self, tree: Tree, node: Node, count: int) -> None:
        self.touch(tree)
        node.sft_updates += count
        self.sft_updates += count

    # ---- clocks

    def stamp_rollout(self, tree: Tree, node: Node, step: int, *, sampled: bool) -> None:
        """Stamps the node's rollout clock and, if it was sampled, the tree's."""
        self.touch(tree)
        if node.active and node.parent is not None:
            _move(tree.by_rollout, node.order(node.rollout_clock), node.order(step))
        node.rollout_clock = step
        if sampled:
            _requeue(self.by_rollout, tree, tree.rollout_clock, step)
            tree.rollout_clock = step

    def stamp_sft(self, tree: Tree, node: Node, step: int) -> None:
        """Stamps the SFT clocks of a candidate and its tree."""
        self.touch(tree)
        _move(tree.by_sft, node.order(node.sft_clock), node.order(step))
        node.sft_clock = step
        _requeue(self.by_sft, tree, tree.sft_clock, step)
        tree.sft_clock = step

    # ---- events

    def push(self, tree: Tree, node: Node, event: Event) -> None:
        """Queues an event of `node`."""
        self.touch(tree)
        _, event_id, _, _ = event
        insort(node.waiting, event)
        self.events[event_id] = event
        tree.num_events += 1
        if self.arrivals is not None:
            self.arrivals[event_id] = None
        if node.active:
            self._count_dispatchable([event], +1)
            if len(node.waiting) == 1:
                self._offer(tree, node)
        self.removable.pop(tree.key, None)

    def launch(self, tree: Tree, node: Node, step: int, tick: int) -> Event:
        """Puts the newest waiting event of an active node in flight and stamps the dispatch clocks of node and tree."""
        self.touch(tree)
        self._withdraw(tree, node)
        event = node.waiting.pop()
        _, event_id, _, _ = event
        self.in_flight[event_id] = event
        tree.busy += 1
        self._count_dispatchable([event], -1)
        if self.arrivals is not None:
            del self.arrivals[event_id]
        node.dispatch_clock, node.dispatch_tick = tree.dispatch_clock, tree.dispatch_tick = step, tick
        if node.waiting:
            self._offer(tree, node)
        self._seat(tree)
        return event

    def recall(self, event_id: int) -> None:
        """Undoes `launch` but for the clocks; no effect on an event that is not in flight."""
        if event_id not in self.in_flight:
            return
        event = self.in_flight[event_id]
        node = self.nodes[event[2]]
        tree = self.trees[node.tree]
        self.touch(tree)
        self._land(tree, event_id)
        tree.num_events -= 1  # `push` counts it again
        self.push(tree, node, event)
        if self.arrivals is not None:
            self.arrivals.move_to_end(event_id, last=False)  # no younger than it was: it had been dispatched before

    def rest(self, event_id: int) -> None:
        """Notes that nobody works on an event in flight for now."""
        if event_id in self.in_flight and event_id not in self.resting:
            tree = self.trees[self.nodes[self.in_flight[event_id][2]].tree]
            self.resting.add(event_id)
            tree.busy -= 1
            self._seat(tree)

    def _land(self, tree: Tree, event_id: int) -> bool:
        """Takes an event out of those in flight; False if it is none."""
        if self.in_flight.pop(event_id, None) is None:
            return False
        if event_id in self.resting:
            self.resting.remove(event_id)
        else:
            tree.busy -= 1
            self._seat(tree)
        return True

    def discard(self, event: Event) -> None:
        """Forgets an event, waiting or in flight."""
        _, event_id, handle, _ = event
        node = self.nodes[handle]
        tree = self.trees[node.tree]
        self.touch(tree)
        del self.events[event_id]
        tree.num_events -= 1
        if not self._land(tree, event_id):
            del node.waiting[bisect_left(node.waiting, event)]
            if self.arrivals is not None:
                del self.arrivals[event_id]
            if node.active:
                self._count_dispatchable([event], -1)
                if not node.waiting:
                    self._withdraw(tree, node)
        self._settle(tree)

    def discard_waiting(self, node: Node) -> int:
        """Forgets all waiting events of a node; returns their number."""
        dropped = list(node.waiting)
        for event in dropped:
            self.discard(event)
        return len(dropped)

    def clear_events(self) -> tuple[int, int]:
        """Forgets all events; returns how many were waiting and in flight."""
        counts = len(self.events) - len(self.in_flight), len(self.in_flight)
        for _, _, handle, _ in self.events.values():
            node = self.nodes[handle]
            tree = self.trees[node.tree]
            self.touch(tree)
            node.waiting = []
            tree.by_dispatch, tree.seat = [], None
            tree.num_events = tree.busy = 0
            self._settle(tree)
        self.events, self.in_flight, self.resting = {}, {}, set()
        self.by_dispatch = SortedKeys()
        self.num_dispatchable = 0
        self.dispatchable_steps.clear()
        if self.arrivals is not None:
            self.arrivals.clear()
        return counts

    # ---- what follows

    def _activate(self, tree: Tree, node: Node) -> None:
        self.num_active += 1
        tree.num_active += 1
        if node.parent is not None:
            self._count_candidates(tree, node, +1)
            if not tree.by_rollout:
                self.by_rollout.add(tree.order(tree.rollout_clock))
                self.by_sft.add(tree.order(tree.sft_clock))
            insort(tree.by_rollout, node.order(node.rollout_clock))
            insort(tree.by_sft, node.order(node.sft_clock))
        if node.waiting:
            self._count_dispatchable(node.waiting, +1)
            self._offer(tree, node)

    def _deactivate(self, tree: Tree, node: Node) -> None:
        self.num_active -= 1
        tree.num_active -= 1
        if node.parent is not None:
            self._count_candidates(tree, node, -1)
            del tree.by_rollout[bisect_left(tree.by_rollout, node.order(node.rollout_clock))]
            del tree.by_sft[bisect_left(tree.by_sft, node.order(node.sft_clock))]
            if not tree.by_rollout:
                self.by_rollout.remove(tree.order(tree.rollout_clock))
                self.by_sft.remove(tree.order(tree.sft_clock))
        if node.waiting:
            self._count_dispatchable(node.waiting, -1)
            self._withdraw(tree, node)

    def _count_dispatchable(self, events: Sequence[Event], change: int) -> None:
        self.num_dispatchable += change * len(events)
        for step, _, _, _ in events:
            _add(self.dispatchable_steps, step, change)

    def _count_candidates(self, tree: Tree, node: Node, change: int) -> None:
        """Called before the tree's candidate lists change."""
        self.num_candidates += change
        _add(self.depths, node.depth, change)
        before, after = len(tree.by_rollout), len(tree.by_rollout) + change
        if before:
            _add(self.candidates_histogram, before, -1)
        if after:
            _add(self.candidates_histogram, after, +1)

    def _offer(self, tree: Tree, node: Node) -> None:
        insort(tree.by_dispatch, node.turn())
        self._seat(tree)

    def _withdraw(self, tree: Tree, node: Node) -> None:
        del tree.by_dispatch[bisect_left(tree.by_dispatch, node.turn())]
        self._seat(tree)

    def _seat(self, tree: Tree) -> None:
        """Moves a tree to where it belongs in the order of service."""
        full = self.most_in_flight and tree.busy >= self.most_in_flight
        seat = (tree.dispatch_clock, tree.dispatch_tick, tree.created_step, tree.key) if tree.by_dispatch and not full else None
        if seat != tree.seat:
            if tree.seat is not None:
                self.by_dispatch.remove(tree.seat)
            if seat is not None:
                self.by_dispatch.add(seat)
            tree.seat = seat

    def _settle(self, tree: Tree) -> None:
        if tree.num_active or tree.num_events:
            self.removable.pop(tree.key, None)
        else:
            self.removable[tree.key] = None


def _add(counts: collections.Counter[int], key: int, change: int) -> None:
    """Changes a count; keys with none are not kept."""
    counts[key] += change
    if not counts[key]:
        del counts[key]


def _move(orders: list[Order], old: Order, new: Order) -> None:
    if old != new:
        del orders[bisect_left(orders, old)]
        insort(orders, new)


def _requeue(orders: SortedKeys, tree: Tree, old_clock: int, clock: int) -> None:
    if old_clock != clock:
        orders.remove(tree.order(old_clock))
        orders.add(tree.order(clock))
