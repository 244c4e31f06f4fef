"""The forest: a pool of hard states, one tree of verified prefixes a prompt.

A failed rollout becomes an event for the teacher. A verified correction of it adds a node: the state that the rollout started
from, plus the prefix that student and teacher share. Nodes are rolled out in turn (least recently used first) until all rollouts
of a group succeed. `Forest` holds the rules; data and orders are in `forest_index`, the files of a snapshot in `forest_state`,
and the curriculum that the training loop sees in `forest`.

Every public method is atomic under one lock, which is never held across long work: a snapshot takes it in slices. Nodes and
events are addressed by int handles, assigned in creation order from 0 and never reused; an unknown handle is a no-op.
"""

import dataclasses
import threading
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from deepgrpo.curriculum import forest_history, forest_inspect, forest_state
from deepgrpo.curriculum.base import Failure, State
from deepgrpo.curriculum.forest_index import Index
from deepgrpo.curriculum.forest_records import (
    NEVER,
    SEEN,
    Annotation,
    Bounds,
    Counters,
    Event,
    Node,
    Origin,
    SuffixEntry,
    Tree,
    check_cap,
    digest,
    own_ids,
    suffix_entry,
    tree_key,
)
from deepgrpo.types import Ids, Problem


class Forest:
    """The pool."""

    def __init__(self, **bounds: Any):
        """`bounds`: the fields of `forest_records.Bounds`."""
        self.bounds = Bounds(**bounds)
        self._lock = threading.Lock()
        self._state_lock = threading.Lock()  # one snapshot or restore at a time; taken before `_lock`
        self._index = self._new_index()
        self._counters = Counters()
        self._next_node = self._next_event = 0
        self._captures = 0  # number of the last snapshot

    def _new_index(self) -> Index:
        return Index(track_arrivals=self.bounds.max_events > 0, most_in_flight=self.bounds.most_in_flight)

    def __len__(self) -> int:
        """Number of trees."""
        return len(self._index.trees)

    # ---- observing groups

    def observe_root(
        self, problem: Problem, k_succ: int, k_total: int, step: int, failed: Sequence[Ids] | None
    ) -> dict[str, int]:
        """Takes in a group that started from a problem's prompt: `k_succ` of `k_total` rollouts succeeded.

        `failed` holds responses of the others, for the teacher. A prompt's first failure makes its tree, which keeps this
        `problem`; a failing root that had retired becomes active again. Returns what happened, counted.
        """
        seen = dict.fromkeys(SEEN, 0)
        if not len(problem.prompt_ids) or k_total <= 0:
            return seen
        key = tree_key(problem.prompt_ids)
        with self._lock:
            tree = self._index.trees.get(key)
            if tree is None:
                if not failed:
                    return seen
                tree = self._plant(key, problem, step)
                seen["tree_created"] = 1
            self._observe(tree, tree.nodes[0], k_succ, k_total, step, failed, seen, reactivate=True)
        return seen

    def observe_node(self, node: int, k_succ: int, k_total: int, step: int, failed: Sequence[Ids] | None) -> dict[str, int]:
        """Takes in a group that started from a node of the forest; a retired node ignores it."""
        seen = dict.fromkeys(SEEN, 0)
        with self._lock:
            found = self._index.nodes.get(node)
            if found is not None and k_total > 0:
                tree = self._index.trees[found.tree]
                self._observe(tree, found, k_succ, k_total, step, failed, seen, reactivate=False)
        return seen

    def _plant(self, key: bytes, problem: Problem, step: int) -> Tree:
        tree = Tree(key, problem, nodes=[], created_step=step, last_updated_step=step)
        self._index.add_tree(tree)
        self._index.add_node(tree, Node(self._new_node_id(), key, None, own_ids(problem.prompt_ids), step, origin=None))
        return tree

    def _observe(
        self,
        tree: Tree,
        node: Node,
        k_succ: int,
        k_total: int,
        step: int,
        failed: Sequence[Ids] | None,
        seen: dict[str, int],
        *,
        reactivate: bool,
    ) -> None:
        if not node.active and not reactivate:
            return
        index = self._index
        index.set_counts(tree, node, k_succ, k_total)
        index.stamp_rollout(tree, node, step, sampled=False)
        node.observations += 1
        tree.last_updated_step = step
        seen["observations_recorded"] = 1
        if k_succ > 0:
            node.last_success_step = step
        node.mastered_in_a_row = 0 if k_succ < k_total else node.mastered_in_a_row + 1
        forest_history.observed(index.history, tree, node, k_succ, k_total)
        if k_succ < k_total:
            node.last_fail_step = step
            if not node.active:
                index.set_active(tree, node, True)
                seen["node_reactivated"] = 1
                index.history.reopened += 1
            for response_ids in failed or ():
                self._enqueue(tree, node, response_ids, step)
                seen["events_added"] += 1
        elif node.active and (node.parent is None or node.mastered_in_a_row >= self.bounds.retire_after):
            index.set_active(tree, node, False)
            self._counters.deactivated += 1
            if node.parent is not None:
                forest_history.mastered(index.history, tree, node, step)
            seen["node_deactivated"] = 1
            seen["root_deactivated" if node.parent is None else "node_retired"] = 1
            if self.bounds.drop_retired_events:
                self._counters.dropped_retired += index.discard_waiting(node)

    def _enqueue(self, tree: Tree, node: Node, response_ids: Ids, step: int) -> None:
        index, counters = self._index, self._counters
        counters.enqueued += 1
        event = (step, self._next_event, node.id, own_ids(response_ids))
        self._next_event += 1
        if self._full(tree):
            counters.dropped_capacity += 1
            return
        index.push(tree, node, event)
        # Loops, not ifs: a forest restored under tighter bounds holds more than one event too many.
        while self.bounds.max_events_per_parent and len(node.waiting) > self.bounds.max_events_per_parent:
            index.discard(node.waiting[0])
            counters.dropped_capacity += 1
        while self.bounds.max_events and len(index.events) - len(index.in_flight) > self.bounds.max_events:
            index.discard(index.events[next(iter(index.arrivals))])
            counters.dropped_capacity += 1

    def _full(self, tree: Tree) -> bool:
        return bool(self.bounds.max_nodes_per_tree) and len(tree.nodes) >= self.bounds.max_nodes_per_tree

    # ---- rolling states out

    def ready(self) -> int:
        """Number of trees with a state to roll out, also those that were already sampled in this step."""
        with self._lock:
            return len(self._index.by_rollout)

    def sample_rollout(self, n: int, step: int) -> list[State]:
        """Returns up to `n` states, at most one a tree and none of a tree that was sampled in this very step, and stamps them.

        Least recently used trees first, and in each the least recently used node.
        """
        if n <= 0:
            return []
        with self._lock:
            index = self._index
            # Equality, not order: steps may go backwards, so the trees of this step are skipped wherever they stand.
            fresh = chain(index.by_rollout.range(stop=(step,)), index.by_rollout.range(start=(step + 1,)))
            states = []
            for _, _, key in list(islice(fresh, n)):
                tree = index.trees[key]
                node = index.nodes[tree.by_rollout[0][2]]
                index.stamp_rollout(tree, node, step, sampled=True)
                states.append(State(ids=node.ids, problem=tree.problem, node=node.id))
            return states

    def cleanup(self) -> int:
        """Removes the trees that have neither an active node nor an event; returns their number."""
        with self._lock:
            index = self._index
            keys = list(index.removable)
            for key in keys:
                index.remove_tree(index.trees[key])
            return len(keys)

    # ---- the teacher

    def pending(self) -> int:
        """Number of waiting events whose node is active."""
        with self._lock:
            return self._index.num_dispatchable

    def dispatch_teacher(self, max_items: int | None, step: int | None) -> list[Failure]:
        """Hands out up to `max_items` (None: all) events, at most one a tree; they are in flight until `teacher_result`.

        Least recently served trees first, in each the least recently served node, of that its newest event. A tree with
        `most_in_flight` events in flight waits until one of them is answered, put back or rests.
        """
        if max_items is not None and max_items <= 0:
            return []
        step = NEVER if step is None else step
        with self._lock:
            index = self._index
            failures = []
            for _, _, _, key in list(islice(index.by_dispatch, max_items)):
                tree = index.trees[key]
                node = index.nodes[tree.by_dispatch[0][-1]]
                self._counters.dispatched += 1
                tick = self._counters.dispatched if self.bounds.most_in_flight else 0
                failed_step, event, _, response_ids = index.launch(tree, node, step, tick)
                failures.append(Failure(event, tree.problem, node.ids, response_ids, failed_step))
            return failures

    def requeue(self, event: int) -> None:
        """Puts an event in flight back among the waiting ones: nothing was learned about it."""
        with self._lock:
            self._index.recall(event)

    def rest(self, event: int) -> None:
        """Notes that nobody works on an event in flight for now: it no longer counts among its tree's `most_in_flight`."""
        with self._lock:
            self._index.rest(event)

    def withdraw(self, event: int) -> bool:
        """Whether `teacher_result` could only find the event stale; if so, it is counted as that now."""
        with self._lock:
            found = self._index.events.get(event)
            return found is None or self._stale(found)

    def _stale(self, event: Event) -> bool:
        """Drops and counts an event whose node is retired."""
        if self._index.nodes[event[2]].active:
            return False
        self._index.discard(event)
        self._counters.stale_parent_inactive += 1
        self._counters.stale += 1
        return True

    def teacher_result(
        self, event: int, annotation: Annotation | None, step: int, *, success: bool = True
    ) -> tuple[str, int | None]:
        """Takes in the teacher's answer to an event, dispatched or not; returns (outcome, the child's handle or None).

        Outcomes, in the order of the checks: stale_unknown_event, stale_parent_inactive, failed (`success` is False or there
        is no annotation), invalid (not a strict extension of the parent's state, or too long), duplicate (the tree
        has that state), invalid (no teacher suffix), refused (the tree is full), child_created.
        """
        if annotation is not None:  # what cannot be taken in raises here, while the event is still known
            annotation = annotation.owned()
            child_digest = digest(annotation.state_ids)
        with self._lock:
            index, counters = self._index, self._counters
            answered = index.events.get(event)
            if answered is None:
                counters.stale += 1
                return "stale_unknown_event", None
            if self._stale(answered):
                return "stale_parent_inactive", None
            index.discard(answered)
            parent = index.nodes[answered[2]]
            tree = index.trees[parent.tree]
            if not success or annotation is None:
                counters.failed += 1
                return "failed", None
            if not self._extends(parent, annotation.state_ids):
                counters.invalid += 1
                return "invalid", None
            if child_digest in tree.digests:
                counters.duplicate += 1
                return "duplicate", None
            if annotation.suffix_ids is None or not len(annotation.suffix_ids):
                counters.invalid += 1
                return "invalid", None
            if self._full(tree):
                counters.nodes_refused += 1
                return "refused", None
            return "child_created", self._insert(tree, parent, answered, annotation, step)

    def _extends(self, parent: Node, state_ids: Ids) -> bool:
        known = len(parent.ids)
        if len(state_ids) <= known or not np.array_equal(state_ids[:known], parent.ids):
            return False
        return self.bounds.max_model_len is None or len(state_ids) + self.bounds.min_remaining_tokens <= self.bounds.max_model_len

    def _insert(self, tree: Tree, parent: Node, event: Event, annotation: Annotation, step: int) -> int:
        index, (event_step, event_id, _, response_ids) = self._index, event
        failed_suffix = own_ids(response_ids[:0]) if annotation.failed_suffix_ids is None else annotation.failed_suffix_ids
        origin = Origin(
            event=event_id,
            event_step=event_step,
            response_ids=response_ids,
            failed_suffix_ids=failed_suffix,
            suffix_ids=annotation.suffix_ids,
            reward=annotation.reward,
        )
        forest_history.grown(index.history, tree, event_step, step)
        child = Node(self._new_node_id(), tree.key, parent.id, annotation.state_ids, step, origin)
        index.add_node(tree, child)
        tree.last_updated_step = step
        self._counters.succeeded += 1
        if self._full(tree):  # no answer to the tree's other failures could be used: do not pay for them
            self._counters.dropped_capacity += sum(index.discard_waiting(node) for node in tree.nodes)
        return child.id

    def _new_node_id(self) -> int:
        self._next_node += 1
        return self._next_node - 1

    # ---- SFT on teacher suffixes

    def sample_sft(self, n: int, step: int, max_nodes_per_tree: int | None = None) -> list[SuffixEntry]:
        """Returns up to `n` entries, one a tree whatever the cap, by the SFT clocks, and stamps them.

        Raises:
          ValueError: the cap is given and not positive.
        """
        if n <= 0:
            return []
        check_cap(max_nodes_per_tree)
        with self._lock:
            index = self._index
            entries = []
            for _, _, key in list(islice(index.by_sft, n)):
                tree = index.trees[key]
                node = index.nodes[tree.by_sft[0][2]]
                index.stamp_sft(tree, node, step)
                entries.append(suffix_entry(tree, node))
            self._counters.sft_sampled += len(entries)
            return entries

    def mark_sft(self, nodes: Sequence[int], step: int) -> int:
        """Stamps the SFT clocks of those of `nodes` that are candidates; returns their number (repeats count)."""
        with self._lock:
            marked = 0
            for handle in nodes:
                if (node := self._sft_candidate(handle)) is not None:
                    self._index.stamp_sft(self._index.trees[node.tree], node, step)
                    marked += 1
            self._counters.sft_sampled += marked
            return marked

    def record_sft(self, node: int, step: int, count: int = 1) -> int:
        """Credits a candidate with `count` optimizer steps; returns the number credited."""
        with self._lock:
            found = self._sft_candidate(node)
            if found is None or count <= 0:
                return 0
            tree = self._index.trees[found.tree]
            self._index.add_sft_updates(tree, found, count)
            tree.last_updated_step = step
            return count

    def is_sft_trainable(self, node: int) -> bool:
        with self._lock:
            return self._sft_candidate(node) is not None

    def ready_counts(self, max_nodes_per_tree: int | None = None) -> dict[str, int]:
        """Returns `sft_trees`, `sft_nodes` (at most the cap counted a tree) and `rollout_trees`.

        Raises:
          ValueError: the cap is given and not positive.
        """
        check_cap(max_nodes_per_tree)
        with self._lock:
            index = self._index
            nodes = index.num_candidates
            if max_nodes_per_tree is not None:
                nodes = sum(min(size, max_nodes_per_tree) * trees for size, trees in index.candidates_histogram.items())
            return {"sft_trees": len(index.by_sft), "sft_nodes": nodes, "rollout_trees": len(index.by_rollout)}

    def freeze_sft_epoch(self, min_created_step: int, max_created_step: int) -> tuple[list[SuffixEntry], dict[str, int]]:
        """Ends an epoch: returns the candidates created in that window of steps (inclusive), and forgets all events.

        Entries are in the order of the SFT clocks, a tree's adjacent; clocks are not stamped. The second value counts `cleared`,
        `cleared_pending` and `cleared_in_flight` events; later answers to these are stale.
        """
        low, high = sorted((min_created_step, max_created_step))
        with self._lock:
            index = self._index
            entries = []
            for _, _, key in index.by_sft:
                tree = index.trees[key]
                entries += [suffix_entry(tree, index.nodes[i]) for _, created, i in tree.by_sft if low <= created <= high]
            pending, in_flight = index.clear_events()
            self._counters.cleared += pending + in_flight
        return entries, {"cleared": pending + in_flight, "cleared_pending": pending, "cleared_in_flight": in_flight}

    def _sft_candidate(self, handle: int) -> Node | None:
        node = self._index.nodes.get(handle)
        return node if node is not None and node.active and node.parent is not None else None

    # ---- looking in

    def continuation(self, node: int) -> tuple[Ids, float | None] | None:
        """The teacher's suffix of a node and the reward of the answer that it completes; None of a root or an unknown node."""
        with self._lock:
            found = self._index.nodes.get(node)
            return None if found is None or found.origin is None else (found.origin.suffix_ids, found.origin.reward)

    def find(self, prompt_ids: Sequence[int], state_ids: Sequence[int]) -> int | None:
        """Returns the handle of a state of a prompt's tree, or None."""
        with self._lock:
            return forest_inspect.find(self._index, np.asarray(prompt_ids, np.int32), np.asarray(state_ids, np.int32))

    def look_up(self, node: int) -> dict[str, Any]:
        """What dumps say of a node (`forest_inspect.look_up`); empty for an unknown one."""
        with self._lock:
            return forest_inspect.look_up(self._index, node)

    def event_ages(self, step: int) -> dict[str, float]:
        """How long the teacher's queue has waited at `step`."""
        with self._lock:
            return forest_history.event_ages(self._index, step)

    def debug_context(self, node: int, max_children: int = 8, max_lineage: int = 32) -> dict[str, Any]:
        """Describes a node and its place in the tree; empty for an unknown one (`forest_inspect.context`)."""
        with self._lock:
            return forest_inspect.context(self._index, node, max_children, max_lineage)

    def deeper_nodes(self, n: int) -> list[dict[str, Any]]:
        """Summaries of the `n` deepest nodes. Walks over all nodes: for dumps, not for every step."""
        with self._lock:
            return forest_inspect.deeper_nodes(self._index, n)

    def describe(self) -> list[dict[str, Any]]:
        """All trees, nodes and events as plain values. Walks over everything: for dumps and tests."""
        with self._lock:
            return forest_inspect.describe(self._index)

    def metrics(self) -> dict[str, float]:
        """Current sizes and cumulative counters, from live totals."""
        with self._lock:
            return forest_inspect.metrics(self._index, self._counters)

    # ---- persistence

    def state(self, folder: str) -> None:
        """Writes a consistent snapshot; other threads go on meanwhile (`forest_state` has the format)."""
        writer = forest_state.Writer()
        with self._state_lock:
            with self._lock:
                self._captures += 1
                counters = dataclasses.asdict(self._counters) | {"next_node": self._next_node, "next_event": self._next_event}
                capture = self._index.capture = forest_state.Capture(self._captures, self._index)
            try:
                writer.add_events(capture.in_flight, in_flight=True)
                while True:
                    with self._lock:
                        rows = capture.next_slice()
                    if rows is None:
                        break
                    writer.add(rows)
            finally:
                with self._lock:
                    self._index.capture = None
        writer.write(folder, counters, capture.history)

    def restore(self, folder: str) -> None:
        """Replaces the content by a snapshot's; its events in flight wait again.

        Raises:
          ValueError: the folder's pool type or format version is another one.
        """
        index = self._new_index()
        counters = forest_state.read(folder, index)
        next_node, next_event = counters.pop("next_node"), counters.pop("next_event")
        with self._state_lock, self._lock:
            self._index = index
            self._counters = Counters(**counters)
            self._next_node, self._next_event = next_node, next_event
