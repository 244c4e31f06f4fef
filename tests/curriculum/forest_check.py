"""Scans a forest and compares everything with its live indexes and totals, and the pool's invariants."""

from collections import Counter

import numpy as np

from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Node, Tree, digest, tree_key


def check(pool: Forest) -> None:
    index, counters = pool._index, pool._counters
    trees, nodes = list(index.trees.values()), list(index.nodes.values())
    assert sorted(node.id for tree in trees for node in tree.nodes) == sorted(index.nodes)
    for tree in trees:
        _check_tree(pool, tree)

    waiting = [event for node in nodes for event in node.waiting]
    assert sorted(event[1] for event in waiting) == sorted(index.events.keys() - index.in_flight.keys())
    assert index.in_flight.keys() <= index.events.keys()
    assert all(event[2] in index.nodes for event in index.events.values())

    candidates = {tree.key: [node for node in tree.nodes[1:] if node.active] for tree in trees}
    servable = [tree for tree in trees if any(node.active and node.waiting for node in tree.nodes)]
    assert list(index.by_rollout) == sorted(tree.order(tree.rollout_clock) for tree in trees if candidates[tree.key])
    assert list(index.by_sft) == sorted(tree.order(tree.sft_clock) for tree in trees if candidates[tree.key])
    most = pool.bounds.most_in_flight
    worked_on = Counter(index.nodes[e[2]].tree for e in index.in_flight.values() if e[1] not in index.resting)
    assert index.resting <= index.in_flight.keys() and all(tree.busy == worked_on[tree.key] for tree in trees)
    seats = {tree.key: (tree.dispatch_clock, tree.dispatch_tick, tree.created_step, tree.key) for tree in trees}
    assert list(index.by_dispatch) == sorted(seats[t.key] for t in servable if not most or worked_on[t.key] < most)
    assert index.removable.keys() == {tree.key for tree in trees if not tree.num_active and not tree.num_events}
    assert index.num_active == sum(node.active for node in nodes)
    assert index.num_candidates == sum(map(len, candidates.values()))
    assert index.num_dispatchable == sum(len(node.waiting) for node in nodes if node.active)
    servable_events = [event for node in nodes if node.active for event in node.waiting]
    assert index.dispatchable_steps == Counter(step for step, _, _, _ in servable_events)
    depths: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: node.id):  # parents come before their children
        depths[node.id] = 0 if node.parent is None else depths[node.parent] + 1
    assert index.depths == Counter(depths[node.id] for kept in candidates.values() for node in kept)
    assert index.candidates_histogram == Counter(len(c) for c in candidates.values() if c)
    assert index.sft_updates == sum(node.sft_updates for node in nodes)
    for kind in (False, True):
        observed = [node for node in nodes if (node.parent is not None) == kind and node.last_k_succ is not None]
        assert index.observed[kind] == len(observed)
        assert index.succeeded[kind] == sum(node.last_k_succ > 0 for node in observed)
    if index.arrivals is not None:
        assert sorted(index.arrivals) == sorted(event[1] for event in waiting)

    answered = counters.succeeded + counters.duplicate + counters.invalid + counters.failed + counters.stale_parent_inactive
    dropped = counters.cleared + counters.dropped_capacity + counters.dropped_retired + counters.nodes_refused
    assert counters.enqueued == answered + dropped + len(index.events)


def _check_tree(pool: Forest, tree: Tree) -> None:
    by_id = {node.id: node for node in tree.nodes}
    root = tree.nodes[0]
    assert tree.key == tree_key(root.ids) and root.parent is None and root.origin is None
    assert len({digest(node.ids) for node in tree.nodes}) == len(tree.nodes)
    assert tree.digests == {digest(node.ids): node.id for node in tree.nodes[1:]}
    assert [node.id for node in tree.nodes] == sorted(by_id)
    assert tree.num_active == sum(node.active for node in tree.nodes)
    in_flight = sum(event[2] in by_id for event in pool._index.in_flight.values())
    assert tree.num_events == sum(len(node.waiting) for node in tree.nodes) + in_flight

    def ordered(kept: list[Node], clock: str) -> list:
        return sorted((getattr(node, clock), node.created_step, node.id) for node in kept)

    assert tree.by_rollout == ordered([node for node in tree.nodes[1:] if node.active], "rollout_clock")
    assert tree.by_sft == ordered([node for node in tree.nodes[1:] if node.active], "sft_clock")
    assert tree.by_dispatch == sorted(node.turn() for node in tree.nodes if node.active and node.waiting)
    for node in tree.nodes:
        assert node.waiting == sorted(node.waiting)
        assert node.children == tuple(other.id for other in tree.nodes if other.parent == node.id)
    for node in tree.nodes[1:]:
        parent = by_id[node.parent]
        assert len(node.ids) > len(parent.ids) and np.array_equal(node.ids[: len(parent.ids)], parent.ids)
        assert len(node.origin.suffix_ids)
