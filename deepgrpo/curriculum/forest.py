"""The forest, the method's default: a pool of hard states, one tree of verified prefixes per prompt.

A failed rollout becomes an event for the teacher. A verified correction of it adds a node: the state that the rollout started
from, plus the prefix that student and teacher share. Nodes are rolled out in turn (least recently used first) until all rollouts
of a group succeed. `Forest` holds the rules; data and orders are in `forest_index`, the files of a snapshot in `forest_state`.

Every public method is atomic under one lock; group by group, `observe` is: between two of a step's groups the teacher's thread
may be served. Nodes and events are addressed by int handles, assigned in creation order from 0 and never reused; an unknown
handle is a no-op.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.config.folders import vocabulary_of_model, write_vocabulary
from deepgrpo.curriculum import base, forest_index, forest_state
from deepgrpo.curriculum.base import NEVER, Correction, Curriculum, Failure, Judged, State
from deepgrpo.curriculum.forest_index import ROLLOUT, SFT, TEACHER, Counters, Event, Index, Node, Origin, Tree, same_ids
from deepgrpo.types import REPLAY_MISMATCH, Group, Ids, Problem

MOST_IN_FLIGHT = 2  # failures of a tree that the teacher works on at once: a first answer may well serve its siblings

# What an observation counts; `root_deactivated` and `node_retired` split `node_deactivated`.
SEEN = ("tree_created", "root_deactivated", "node_deactivated", "node_reactivated", "node_retired", "events_added")
SEEN += ("observations_recorded",)
OUTCOMES = {"child_created": "succeeded", "refused": "nodes_refused"}  # outcome: its counter, where the names differ


@dataclasses.dataclass(frozen=True, eq=False)
class SuffixEntry:
    """A node that SFT on teacher tokens can train on: prompt `state_ids`, response `suffix_ids`. tree: the root's handle."""

    node: int
    tree: int
    problem: Problem
    created_step: int
    state_ids: Ids
    suffix_ids: Ids
    reward: float | None


class Forest(Curriculum):
    """`base.Curriculum`. With `strict_reference` it behaves as the reference, which has no bounds: a bound of 0 is none.

    `curriculum.retire_after` groups in a row must succeed as a whole before a state retires; a root retires with the first.
    """

    name, version = forest_state.POOL, forest_state.VERSION
    by_ratio = keeps_suffixes = knows_age = asks_teacher = True
    keys = ("rollout_n", "retire_after")
    records = forest_state.RECORDS
    max_events_per_state, max_events = base.MAX_EVENTS_PER_STATE, base.MAX_EVENTS
    max_nodes = 64  # of a tree, root included; a full tree refuses children and takes no events

    def __init__(self, config: ml_collections.ConfigDict):
        """Not empty if `curriculum.start_from` names a forest."""
        super().__init__(config)
        # Trees, and states in a tree, are served in turn; by the reference any number, the oldest first within a step.
        self.most_in_flight = 0 if self.strict else MOST_IN_FLIGHT
        if self.strict:
            self.max_events_per_state = self.max_events = self.max_nodes = 0
        self.index, self.counters = Index(most_in_flight=self.most_in_flight), Counters()
        self._cleaned_before_sampling = 0
        self._vocabulary = vocabulary_of_model(config.model.path) if config.model.path else None
        if self.section.start_from:
            from deepgrpo.curriculum.forest_tools import forest_to_start_from  # it reads data sets, which only a new run pays for

            if (start := forest_to_start_from(config)) is not None:
                self._take(start)

    def __len__(self) -> int:
        """Number of trees."""
        return len(self.index)

    #### Observing groups

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Feeds a step's groups: injected ones to their nodes, dataset ones, merged by prompt, to the roots; then cleans up.

        Of the returned counts, `observations_recorded`, `events_added` and `nodes_retired` are of injected groups only.
        Rollouts without a verdict count neither as success nor as failure; a group with too few verdicts (`Group.judged`) and no
        failure is left out and counted: nothing is mastered on what is not known.
        """
        base.check_step(step)
        self._retire_lost(groups)
        judged = self.judged(groups, failing=True)
        nodes, roots = collections.Counter(), collections.Counter()
        for group, k_succ, k_total in judged:
            if group.prompt.injected:
                nodes.update(self.observe_node(group.prompt.node, k_succ, k_total, step, self._responses(group)))
        merged = self._root_groups(judged)
        for problem, k_succ, k_total, failed in merged:
            roots.update(self.observe_root(problem, k_succ, k_total, step, failed))
        failing = sum(k_succ < k_total for _, k_succ, k_total, _ in merged)
        seen = {
            "observations_recorded": nodes["observations_recorded"],
            "events_added": nodes["events_added"],
            "nodes_retired": nodes["node_retired"],
            "root_groups_seen": len(merged),
            "root_fail_groups": failing,
            "root_success_groups": len(merged) - failing,
            "root_events_added": roots["events_added"],
            "root_trees_created": roots["tree_created"],
            "root_nodes_deactivated": roots["root_deactivated"],
            "trees_cleaned": self.cleanup(),
            "groups_without_verdict": len(groups) - len(judged),
        }
        metrics = base.named("forest_pool", {f"{name}_this_step": value for name, value in seen.items()})
        metrics["forest_pool/trees_cleaned_pre_sample"] = float(self._cleaned_before_sampling)
        return metrics | self.event_ages(step) | base.injection_metrics(groups, judged)

    def _retire_lost(self, groups: Sequence[Group]) -> None:
        """Retires the states that their environment could not be brought back to."""
        lost = [g.prompt.node for g in groups if g.prompt.injected and any(r.grade.reason == REPLAY_MISMATCH for r in g.rollouts)]
        with self.lock:
            for node in filter(None, map(self.index.nodes.get, lost)):
                self.index.change(self.index.tree_of(node), node, active=False)

    def _responses(self, group: Group) -> list[Ids]:
        return [rollout.completion.marked_ids for rollout in self.to_teacher(group)]

    def _root_groups(self, judged: Sequence[Judged]) -> list[list[Any]]:
        """Merges the dataset groups by their prompt, in order of first appearance: [problem, k_succ, k_total, responses for the
        teacher]; the problem is that of the first group that failed, if one did."""
        merged: dict[bytes, list[Any]] = {}
        for group, k_succ, k_total in judged:
            if not group.prompt.injected:
                problem, failed = group.prompt.problem, self._responses(group)
                root = merged.setdefault(base.tree_key(problem.prompt_ids), [problem, 0, 0, []])
                if failed and not root[3]:
                    root[0] = problem
                root[1:] = root[1] + k_succ, root[2] + k_total, root[3] + failed
        return list(merged.values())

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
        key = base.tree_key(problem.prompt_ids)
        with self.lock:
            tree = self.index.trees.get(key)
            if tree is None:
                if not failed:
                    return seen
                tree = Tree(key, problem, nodes=[], created_step=step, last_updated_step=step)
                root = Node(self._new_node_id(), key, None, base.frozen_ids(problem.prompt_ids), step, origin=None)
                self.index.add_tree(tree, root)
                seen["tree_created"] = 1
            self._observe(tree, tree.nodes[0], k_succ, k_total, step, failed, seen)
        return seen

    def observe_node(self, node: int, k_succ: int, k_total: int, step: int, failed: Sequence[Ids] | None) -> dict[str, int]:
        """Takes in a group that started from a node of the forest; a retired node ignores it."""
        seen = dict.fromkeys(SEEN, 0)
        with self.lock:
            found = self.index.nodes.get(node)
            if found is not None and found.active and k_total > 0:
                self._observe(self.index.tree_of(found), found, k_succ, k_total, step, failed, seen)
        return seen

    def _observe(
        self, tree: Tree, node: Node, k_succ: int, k_total: int, step: int, failed: Sequence[Ids] | None, seen: dict[str, int]
    ) -> None:
        index, counters, whole = self.index, self.counters, k_succ >= k_total
        node.last_k_succ, node.last_k_total = k_succ, k_total
        node.observations += 1
        node.mastered_in_a_row = node.mastered_in_a_row + 1 if whole else 0
        tree.last_updated_step = step
        if k_succ > 0:
            node.last_success_step = step
        if not whole:
            node.last_fail_step = step
        seen["observations_recorded"] = 1
        if node.parent is None and node.observations > 1:  # the group that made the tree counts as neither
            when = "after" if tree.mastered else "before"
            for name, count in (("succ", k_succ), ("total", k_total)):
                setattr(tree, f"{when}_{name}", getattr(tree, f"{when}_{name}") + count)
        retires = whole and node.active and (node.parent is None or node.mastered_in_a_row >= self.section.retire_after)
        seen["node_reactivated"] = int(not whole and not node.active)
        counters.reopened += seen["node_reactivated"]
        index.change(tree, node, rollout_clock=step, active=(node.active or not whole) and not retires)
        if retires:
            seen["node_deactivated"] = 1
            seen["root_deactivated" if node.parent is None else "node_retired"] = 1
            if node.parent is not None:
                tree.mastered += 1
                counters.mastered += 1
                counters.mastered_visits += node.observations
                counters.mastered_unfailed += node.observations == node.mastered_in_a_row
                counters.mastered_steps += step - node.created_step
        if not whole:
            seen["events_added"] = len(failed or ())
            self._enqueue(tree, node, failed or (), step)

    def _enqueue(self, tree: Tree, node: Node, failed: Sequence[Ids], step: int) -> None:
        index, counters = self.index, self.counters
        first = counters.next_event
        counters.next_event += len(failed)
        counters.enqueued += len(failed)
        if self._full(tree):
            counters.dropped_capacity += len(failed)
            return
        index.add_failures(node, [(step, first + i, node.id, base.frozen_ids(ids)) for i, ids in enumerate(failed)])
        # Loops, not ifs: a forest restored under tighter bounds holds more than one event too many.
        while self.max_events_per_state and len(node.waiting) > self.max_events_per_state:
            index.discard(node.waiting[0])
            counters.dropped_capacity += 1
        while self.max_events and len(index.waiting) > self.max_events:
            index.discard(index.events[index.waiting[0]])
            counters.dropped_capacity += 1

    def _full(self, tree: Tree) -> bool:
        return bool(self.max_nodes) and len(tree.nodes) >= self.max_nodes

    def _new_node_id(self) -> int:
        self.counters.next_node += 1
        return self.counters.next_node - 1

    #### Rolling states out

    def ready(self) -> int:
        """Number of trees with a state to roll out, also those that were already sampled in this step."""
        with self.lock:
            return len(self.index.orders[ROLLOUT])

    def sample(self, n: int, step: int) -> list[State]:
        """Removes exhausted trees, then returns at most `n` states, one of a tree."""
        base.check_step(step)
        self._cleaned_before_sampling = self.cleanup()
        return self.sample_rollout(n, step)

    def sample_rollout(self, n: int, step: int) -> list[State]:
        """Returns up to `n` states, at most one of a tree and none of a tree that was sampled in this very step, and stamps them.

        Least recently used trees first, and in each the least recently used node.
        """
        with self.lock:
            order = self.index.orders[ROLLOUT]
            # Equality, not order: steps may go backwards, so the trees of this step are skipped wherever they stand.
            fresh = chain(order.irange(None, (step,)), order.irange((step + 1,), None))
            states = []
            for *_, key in list(islice(fresh, max(n, 0))):
                tree, node = self._serve(self.index.trees[key], "rollout", step)
                states.append(State(ids=node.ids, problem=tree.problem, node=node.id))
            return states

    def _serve(self, tree: Tree, clock: str, step: int) -> tuple[Tree, Node]:
        """Stamps the tree's least recently used candidate, and returns both."""
        node = min((node for node in tree.nodes if node.candidate), key=lambda node: node.lru_key(clock))
        self.index.stamp(tree, node, clock, step)
        return tree, node

    def cleanup(self) -> int:
        """Removes the trees that have neither an active node nor an event; returns their number."""
        with self.lock:
            keys = list(self.index.removable)
            for key in keys:
                tree = self.index.trees[key]
                if (rates := tree.root_transfer()) is not None:  # the tree is gone, but still counts
                    self.counters.transfer_trees += 1
                    self.counters.transfer_before += rates[0]
                    self.counters.transfer_after += rates[1]
                self.index.remove_tree(tree)
            return len(keys)

    #### The teacher

    def pending(self) -> int:
        """Number of waiting events whose node is active."""
        with self.lock:
            return self.index.num_dispatchable

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        """Hands out up to `max_items` events, at most one of a tree.

        Least recently served trees first, in each the least recently served node, of that its newest event. A tree with
        `most_in_flight` events in flight waits until one of them is answered, put back or rests.
        """
        with self.lock:
            failures = []
            for tree in list(islice(self.index.served_next(TEACHER), max(max_items, 0))):
                self.counters.dispatched += 1
                node, event = self.index.dispatch(tree, step, self.counters.dispatched if self.most_in_flight else 0)
                failures.append(Failure(event[1], tree.problem, node.ids, event[3], event[0]))
            return failures

    def requeue(self, failure: Failure) -> None:
        with self.lock:
            self.index.requeue(failure.failure_id)

    def rest(self, failure: Failure) -> None:
        with self.lock:
            self.index.rest(failure.failure_id)

    def withdraw(self, failure: Failure) -> bool:
        with self.lock:
            event = self.index.events.get(failure.failure_id)
            return event is None or self._stale(event)

    def _stale(self, event: Event) -> bool:
        """Drops and counts an event whose node is retired."""
        if self.index.nodes[event[2]].active:
            return False
        self.index.discard(event)
        self.counters.stale_parent_inactive += 1
        self.counters.stale += 1
        return True

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Takes in the teacher's answer to an event, dispatched or not.

        Outcomes, in the order of the checks: stale_unknown_event, stale_parent_inactive, failed (no correction), invalid (not a
        strict extension of the parent's state, or too long), duplicate (the tree has that state), invalid (no teacher suffix),
        refused (the tree is full), child_created.
        """
        state_ids, origin = None, None
        if correction is not None:  # what cannot be taken in raises here, while the event is still known
            state_ids = base.frozen_ids(np.concatenate([failure.state_ids, correction.prefix_ids]))
            texts = correction.failed_suffix_ids, correction.suffix_ids
            suffixes = (base.frozen_ids(() if ids is None else ids) for ids in texts)
            origin = Origin(failure.failure_id, failure.step, failure.response_ids, *suffixes, correction.reward)
        with self.lock:
            event = self.index.events.get(failure.failure_id)
            if event is None:
                self.counters.stale += 1
                return "stale_unknown_event"
            if self._stale(event):
                return "stale_parent_inactive"
            self.index.discard(event)
            parent = self.index.nodes[event[2]]
            tree = self.index.tree_of(parent)
            outcome = self._fault(tree, parent, state_ids, origin)
            if outcome is None:
                outcome = "child_created"
                self._grow(tree, parent, state_ids, origin._replace(event_step=event[0], response_ids=event[3]), step)
            counter = OUTCOMES.get(outcome, outcome)
            setattr(self.counters, counter, getattr(self.counters, counter) + 1)
            return outcome

    def _fault(self, tree: Tree, parent: Node, state_ids: Ids | None, origin: Origin | None) -> str | None:
        """Why a correction cannot become a child; None if it can."""
        if state_ids is None:
            return "failed"
        known = len(parent.ids)
        extends = len(state_ids) > known and np.array_equal(state_ids[:known], parent.ids)
        if not extends or len(state_ids) > self.max_state_len:
            return "invalid"
        if any(same_ids(node.ids, state_ids) for node in tree.nodes):
            return "duplicate"
        if not len(origin.suffix_ids):
            return "invalid"
        return "refused" if self._full(tree) else None

    def _grow(self, tree: Tree, parent: Node, state_ids: Ids, origin: Origin, step: int) -> None:
        counters = self.counters
        counters.child_event_steps += step - origin.event_step
        if len(tree.nodes) == 1:
            counters.first_children += 1
            counters.first_child_steps += step - tree.created_step
        if counters.first_child_step == NEVER:
            counters.first_child_step = step
        self.index.add_node(tree, Node(self._new_node_id(), tree.key, parent.id, state_ids, step, origin))
        tree.last_updated_step = step
        if self._full(tree):  # no answer to the tree's other failures could be used: do not pay for them
            for event in [event for node in tree.nodes for event in node.waiting]:
                self.index.discard(event)
                counters.dropped_capacity += 1

    #### SFT on teacher suffixes

    def sample_sft(self, n: int, step: int) -> list[SuffixEntry]:
        """Returns up to `n` entries, one of a tree, by the SFT clocks, and stamps them."""
        with self.lock:
            trees = list(islice(self.index.served_next(SFT), max(n, 0)))
            entries = [_suffix_entry(*self._serve(tree, "sft", step)) for tree in trees]
            self.counters.sft_sampled += len(entries)
            return entries

    def mark_sft(self, nodes: Sequence[int], step: int) -> int:
        """Stamps the SFT clocks of those of `nodes` that are candidates; returns their number (repeats count)."""
        with self.lock:
            marked = [node for handle in nodes if (node := self._sft_candidate(handle)) is not None]
            for node in marked:
                self.index.stamp(self.index.tree_of(node), node, "sft", step)
            self.counters.sft_sampled += len(marked)
            return len(marked)

    def record_sft(self, node: int, step: int, count: int = 1) -> int:
        """Credits a candidate with `count` optimizer steps; returns the number credited."""
        with self.lock:
            found = self._sft_candidate(node)
            if found is None or count <= 0:
                return 0
            found.sft_updates += count
            self.index.tree_of(found).last_updated_step = step
            return count

    def is_sft_trainable(self, node: int) -> bool:
        with self.lock:
            return self._sft_candidate(node) is not None

    def ready_counts(self, max_nodes_per_tree: int | None = None) -> dict[str, int]:
        """Returns `sft_trees`, `sft_nodes` (at most the cap counted of a tree, which must be positive) and `rollout_trees`."""
        if max_nodes_per_tree is not None and max_nodes_per_tree <= 0:
            raise ValueError(f"max_nodes_per_tree must be positive or None, got {max_nodes_per_tree}")
        with self.lock:
            sizes = [sum(node.candidate for node in tree.nodes) for tree in self.index.served_next(SFT)]
            nodes = sum(size if max_nodes_per_tree is None else min(size, max_nodes_per_tree) for size in sizes)
            return {"sft_trees": len(sizes), "sft_nodes": nodes, "rollout_trees": len(self.index.orders[ROLLOUT])}

    def freeze_sft_epoch(self, min_created_step: int, max_created_step: int) -> tuple[list[SuffixEntry], dict[str, int]]:
        """Ends an epoch: returns the candidates created in that window of steps (inclusive), and forgets all events.

        Entries are in the order of the SFT clocks, a tree's adjacent; clocks are not stamped. The second value counts `cleared`,
        `cleared_pending` and `cleared_in_flight` events; later answers to these are stale.
        """
        low, high = sorted((min_created_step, max_created_step))
        with self.lock:
            entries = []
            for tree in self.index.served_next(SFT):
                nodes = [node for node in tree.nodes if node.candidate and low <= node.created_step <= high]
                entries += [_suffix_entry(tree, node) for node in sorted(nodes, key=lambda node: node.lru_key("sft"))]
            pending, in_flight = self.index.clear_events()
            self.counters.cleared += pending + in_flight
        return entries, {"cleared": pending + in_flight, "cleared_pending": pending, "cleared_in_flight": in_flight}

    def _sft_candidate(self, handle: int) -> Node | None:
        node = self.index.nodes.get(handle)
        return node if node is not None and node.candidate else None

    #### Looking in

    def continuation(self, node: int) -> tuple[Ids, float | None] | None:
        with self.lock:
            found = self.index.nodes.get(node)
            return None if found is None or found.origin is None else (found.origin.suffix_ids, found.origin.reward)

    def find(self, prompt_ids: Sequence[int], state_ids: Sequence[int]) -> int | None:
        """Returns the handle of a state of a prompt's tree, or None."""
        with self.lock:
            tree = self.index.trees.get(base.tree_key(np.asarray(prompt_ids, np.int32)))
            nodes = [] if tree is None else tree.nodes
            return next((node.id for node in nodes if same_ids(node.ids, np.asarray(state_ids, np.int32))), None)

    def look_up(self, node: int) -> Mapping[str, Any]:
        """What dumps say of a node (`forest_index.look_up`); empty for an unknown one."""
        with self.lock:
            found = self.index.nodes.get(node)
            return {} if found is None else forest_index.look_up(self.index.tree_of(found), found)

    def event_ages(self, step: int) -> dict[str, float]:
        """How long the teacher's queue has waited at `step`."""
        with self.lock:
            return forest_index.event_ages(self.index, step)

    def deepest(self, n: int) -> list[int]:
        """Walks over all nodes: for dumps, not for every step."""
        with self.lock:
            return [node.id for node in forest_index.deepest(self.index, n)]

    def metrics(self) -> dict[str, float]:
        with self.lock:
            return forest_index.metrics(self.index, self.counters)

    #### Persistence

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        in_flight = [self.index.in_flight[i] for i in sorted(self.index.in_flight)]  # a restored forest has them waiting
        return forest_state.tables(self.index.trees.values(), in_flight), {"counters": dataclasses.asdict(self.counters)}

    def load(self, tables: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self._take(forest_state.forest(tables, fields))

    def _take(self, saved: forest_state.SavedForest) -> None:
        self.index, self.counters = Index(saved.trees.values(), self.most_in_flight), saved.counters

    def state(self, folder: str) -> None:
        super().state(folder)
        if self._vocabulary is not None:  # saved beside the ids, so that the forest can be used elsewhere
            write_vocabulary(folder, self._vocabulary)


def _suffix_entry(tree: Tree, node: Node) -> SuffixEntry:
    origin = node.origin
    return SuffixEntry(node.id, tree.nodes[0].id, tree.problem, node.created_step, node.ids, origin.suffix_ids, origin.reward)
