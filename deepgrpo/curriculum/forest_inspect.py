"""Read-only views of the forest's index as plain values: metrics, look-up, debug context, full listings."""

from typing import Any

from deepgrpo.curriculum import forest_history
from deepgrpo.curriculum.forest_index import Index
from deepgrpo.curriculum.forest_records import Counters, Event, Node, digest, tree_key
from deepgrpo.types import Ids

MAX_CHILDREN, MAX_LINEAGE = 8, 32  # that dumps show of a node


def metrics(index: Index, counters: Counters) -> dict[str, float]:
    """All sizes and counters by their published names; costs the same for any size of the forest."""
    trees, nodes = len(index.trees), len(index.nodes)
    in_flight = len(index.in_flight)
    waiting = len(index.events) - in_flight
    suffix_nodes = nodes - trees  # every node but a root has a teacher suffix
    values = {
        "forest/num_trees": trees,
        "forest/num_nodes": nodes,
        "forest/active_nodes": index.num_active,
        "forest/active_nonroot_nodes": index.num_candidates,
        "forest/teacher_suffix_nodes": suffix_nodes,
        "forest/deactivated_nodes": nodes - index.num_active,
        "forest/nodes_refused": counters.nodes_refused,
        "teacher/events_queued": waiting,
        "teacher/events_dispatchable": index.num_dispatchable,
        "teacher/events_in_flight": in_flight,
        "teacher/events_dispatched": counters.dispatched,
        "teacher/events_succeeded": counters.succeeded,
        "teacher/events_duplicate_dropped": counters.duplicate,
        "teacher/events_invalid": counters.invalid,
        "teacher/events_stale_parent_inactive": counters.stale_parent_inactive,
        "teacher/events_failed": counters.failed,
        "teacher/events_stale": counters.stale,
        "teacher/events_cleared": counters.cleared,
        "teacher/events_dropped_capacity": counters.dropped_capacity,
        "teacher/events_dropped_retired": counters.dropped_retired,
        "sft/eligible_trees": len(index.by_sft),
        "sft/eligible_nodes": index.num_candidates,
        "sft/sampled_nodes": counters.sft_sampled,
        "sft/recorded_node_updates": index.sft_updates,
        "sft/optimizer_steps": 0,  # the training loop overwrites it
        "root_any_success_rate": index.succeeded[0] / max(index.observed[0], 1),
        "prefix_any_success_rate": index.succeeded[1] / max(index.observed[1], 1),
        "forest_pool/trees": trees,
        "forest_pool/num_trees": trees,
        "forest_pool/active_trees": len(index.by_rollout),
        "forest_pool/active_nodes": index.num_active,
        "forest_pool/total_nodes": nodes,
        "forest_pool/observed_root_nodes": index.observed[0],
        "forest_pool/observed_nonroot_nodes": index.observed[1],
        "forest_pool/pending_events": len(index.events),
        "forest_pool/suffix_sft_nodes": suffix_nodes,
        "forest_pool/suffix_sft_candidate_nodes": index.num_candidates,
        "forest_pool/suffix_sft_updates_total": index.sft_updates,
        "forest_pool/suffix_sft_sampled_cumulative": counters.sft_sampled,
        "forest_pool/rollout_retired_nodes": nodes - index.num_active,
        "forest_pool/events_enqueued": counters.enqueued,
        "forest_pool/events_dispatched": counters.dispatched,
        "forest_pool/teacher_successes": counters.succeeded,
        "forest_pool/teacher_failed": counters.failed,
        "forest_pool/teacher_stale": counters.stale,
        "forest_pool/teacher_cleared": counters.cleared,
        "forest_pool/duplicate_child": counters.duplicate,
        "forest_pool/invalid_child": counters.invalid,
    }
    return values | forest_history.metrics(index)


def find(index: Index, prompt_ids: Ids, state_ids: Ids) -> int | None:
    tree = index.trees.get(tree_key(prompt_ids))
    if tree is None:
        return None
    if tree_key(state_ids) == tree.key:
        return tree.nodes[0].id
    return tree.digests.get(digest(state_ids))


def summary(node: Node) -> dict[str, Any]:
    """A node without its ids: flags, lengths, clocks, counts, and the success rate of its last observation (None if unknown)."""
    return {
        "node": node.id,
        "parent": node.parent,
        "children": list(node.children),
        "active": node.active,
        "length": len(node.ids),
        "created_step": node.created_step,
        "observations": node.observations,
        "last_k_succ": node.last_k_succ,
        "last_k_total": node.last_k_total,
        "success_rate": node.last_k_succ / node.last_k_total if node.last_k_total else None,
        "last_rollout_step": node.rollout_clock,
        "last_success_step": node.last_success_step,
        "last_fail_step": node.last_fail_step,
        "last_dispatch_step": node.dispatch_clock,
        "last_sft_step": node.sft_clock,
        "sft_updates": node.sft_updates,
        "waiting_events": len(node.waiting),
    }


def _lineage(index: Index, node: Node) -> list[Node]:
    """The nodes from the root to `node`."""
    path = [node]
    while path[-1].parent is not None:
        path.append(index.nodes[path[-1].parent])
    return path[::-1]


def context(index: Index, handle: int, max_children: int, max_lineage: int) -> dict[str, Any]:
    """Depths, descendants, the last `max_lineage` nodes from the root to the node, and its first `max_children` children.

    Lineage and children are summaries, with the number cut in `lineage_truncated` and `children_truncated`; depths are in edges
    unless named otherwise. An unknown node gives an empty dict.
    """
    node = index.nodes.get(handle)
    if node is None:
        return {}
    path = _lineage(index, node)
    depth = len(path) - 1
    descendants, deepest, stack = 0, depth, [(child, depth + 1) for child in node.children]
    while stack:
        child, at = stack.pop()
        descendants, deepest = descendants + 1, max(deepest, at)
        stack += [(grandchild, at + 1) for grandchild in index.nodes[child].children]
    first = max(len(path) - max_lineage, 0)
    shown = node.children[:max_children]
    return {
        "depth_edges": depth,
        "depth_tokens": len(node.ids) - len(path[0].ids),
        "descendants": descendants,
        "deepest_depth": deepest,
        "lineage": [summary(n) for n in path[first:]],
        "lineage_truncated": first,
        "children": [summary(index.nodes[child]) for child in shown],
        "children_truncated": len(node.children) - len(shown),
    }


def look_up(index: Index, handle: int) -> dict[str, Any]:
    """What dumps say of a node: `summary` and `context`, and further

    tree: handle of the root. problem: the tree's. ids: int32[len]. suffix_ids, failed_suffix_ids, response_ids: int32[len] each,
    and reward, of its origin (of a root None). root_success_rate: of the root's last observation, None if there is none.
    """
    node = index.nodes.get(handle)
    if node is None:
        return {}
    tree, origin = index.trees[node.tree], node.origin
    root, names = tree.nodes[0], ("suffix_ids", "failed_suffix_ids", "response_ids", "reward")
    return {
        **summary(node),
        **context(index, handle, MAX_CHILDREN, MAX_LINEAGE),
        **{name: origin and getattr(origin, name) for name in names},
        "tree": root.id,
        "problem": tree.problem,
        "ids": node.ids,
        "root_success_rate": summary(root)["success_rate"],
    }


def deeper_nodes(index: Index, n: int) -> list[dict[str, Any]]:
    """The first `n` nodes other than roots by depth, then number of children, then observations, each descending."""
    ranked = [
        (len(_lineage(index, node)) - 1, len(node.children), node.observations, node)
        for tree in index.trees.values()
        for node in tree.nodes[1:]
    ]
    ranked.sort(key=lambda row: row[:3], reverse=True)  # stable: ties stay in insertion order
    return [summary(node) | {"depth_edges": depth} for depth, _, _, node in ranked[: max(n, 0)]]


def describe(index: Index) -> list[dict[str, Any]]:
    """Trees in insertion order, each with its nodes in creation order and its events in order of arrival."""
    in_flight: dict[bytes, list[Event]] = {}
    for event in index.in_flight.values():
        in_flight.setdefault(index.nodes[event[2]].tree, []).append(event)
    listing = []
    for tree in index.trees.values():
        events = [event for node in tree.nodes for event in node.waiting] + in_flight.get(tree.key, [])
        listing.append(
            {
                "problem": tree.problem,
                "created_step": tree.created_step,
                "last_updated_step": tree.last_updated_step,
                "last_rollout_sampled_step": tree.rollout_clock,
                "last_dispatch_step": tree.dispatch_clock,
                "last_sft_sampled_step": tree.sft_clock,
                "nodes": [summary(node) | {"ids": node.ids, "origin": node.origin} for node in tree.nodes],
                "events": [
                    {
                        "event": event_id,
                        "node": node,
                        "created_step": step,
                        "in_flight": event_id in index.in_flight,
                        "response_ids": response_ids,
                    }
                    for step, event_id, node, response_ids in sorted(events, key=lambda event: event[1])
                ],
            }
        )
    return listing
