"""Pools, groups and teacher's answers that the tests of the curricula share."""

import collections
import importlib
import pathlib

import numpy as np

from deepgrpo import curriculum
from deepgrpo.curriculum.base import Correction
from deepgrpo.curriculum.forest import Forest
from deepgrpo.curriculum.forest_index import ROLLOUT, SFT, TEACHER, summary
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids

WRONG, RIGHT, NO_VERDICT = 0.0, 1.0, None
UNBOUNDED = {"max_events_per_state": 0, "max_events": 0, "max_nodes": 0}  # as the reference
OF_ROLLOUT = ("max_model_len",)


def config(pool="forest", **changes):
    """The defaults with changes: names of the section `curriculum`, or dotted keys with "__" in place of the dots."""
    made = importlib.import_module("configs.common").get_config()
    made.model.path, made.curriculum.pool = "", pool
    names = {name: f"rollout.{name}" if name in OF_ROLLOUT else f"curriculum.{name}" for name in changes if "__" not in name}
    made.update_from_flattened_dict({names.get(n, n.replace("__", ".")): value for n, value in changes.items()})
    return made


def create(pool, **changes):
    return curriculum.create(config(pool, **changes))


def forest(strict_reference=True, **changes) -> Forest:
    """A forest without bounds, unless they are given."""
    bounds = {name: changes.pop(name, bound) for name, bound in UNBOUNDED.items()}
    settings = config("forest", **changes)
    settings.strict_reference = strict_reference
    made = Forest(settings)
    vars(made).update(bounds)
    return made


def problem(index=0, prompt=(1, 2)) -> Problem:
    return Problem(index, "test", as_ids(prompt), "", "")


def group(problem, rewards, state=None, right_prefix=None) -> Group:
    """Rollout i has response [10 + i, 20 + i, 30 + i]."""
    prefixes = right_prefix or [None] * len(rewards)
    rollouts = []
    for i, (reward, prefix) in enumerate(zip(rewards, prefixes, strict=True)):
        completion = Completion(as_ids([10 + i, 20 + i, 30 + i]), np.zeros(3, np.float32), "stop", 0)
        rollouts.append(Rollout(completion, Grade(reward, True, "", right_prefix=prefix)))
    ids, node = (problem.prompt_ids, None) if state is None else (state.ids, state.node)
    return Group(Prompt(ids, problem, len(rewards), f"g{problem.index}", node), tuple(rollouts))


def correction(failure, prefix: int, suffix=(7, 0)) -> Correction:
    """The first `prefix` tokens of the failure are right."""
    ids = failure.response_ids
    return Correction(ids[:prefix], as_ids(suffix), 1.0, ids[prefix:])


def answer(pool, failure, prefix, step, suffix=(9,)) -> int:
    """Has a failure corrected: the child adds the ids `prefix`, which need not be the student's. Returns the child's handle."""
    outcome = pool.resolve(failure, Correction(as_ids(prefix), as_ids(suffix), 1.0, as_ids([])), step)
    assert outcome == "child_created", outcome
    return pool.find(failure.problem.prompt_ids, [*failure.state_ids, *prefix])


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def saved(pool, folder: pathlib.Path) -> dict[str, bytes]:
    folder.mkdir()
    pool.state(str(folder))
    return content(folder)


def describe(pool: Forest) -> list[dict]:
    """Trees in insertion order, each with its nodes in creation order and its events in order of arrival, as plain values."""
    listing = []
    for tree in pool.index.trees.values():
        ids = {node.id for node in tree.nodes}
        events = [event for event in pool.index.events.values() if event[2] in ids]
        listing.append(
            {name: getattr(tree, name) for name in ("problem", "created_step", "last_updated_step")}
            | {
                "last_rollout_sampled_step": tree.rollout_clock,
                "last_dispatch_step": tree.dispatch_clock,
                "last_sft_sampled_step": tree.sft_clock,
                "nodes": [summary(node, tree) | {"ids": node.ids, "origin": node.origin} for node in tree.nodes],
                "events": [
                    {"event": n, "node": node, "created_step": step, "in_flight": n in pool.index.in_flight}
                    for step, n, node, _ in sorted(events, key=lambda event: event[1])
                ],
            }
        )
    return listing


def check(pool: Forest) -> None:
    """Scans a forest and compares everything with its live orders and totals, and the pool's invariants."""
    index, counters = pool.index, pool.counters
    trees, nodes = list(index.trees.values()), list(index.nodes.values())
    assert sorted(node.id for tree in trees for node in tree.nodes) == sorted(index.nodes)
    waiting = [event[1] for node in nodes for event in node.waiting]
    assert sorted(waiting) == list(index.waiting) == sorted(index.events.keys() - index.in_flight.keys())
    assert index.in_flight.keys() <= index.events.keys() and index.resting <= index.in_flight.keys()
    assert all(event[2] in index.nodes for event in index.events.values())
    flying = collections.Counter(index.nodes[event[2]].tree for event in index.in_flight.values())
    busy = flying - collections.Counter(index.nodes[index.events[i][2]].tree for i in index.resting)
    most, orders, removable, dispatchable = pool.most_in_flight, ([], [], []), set(), 0
    for tree in trees:
        key = tree.key
        assert (tree.in_flight, tree.busy) == (flying[key], busy[key])
        servable = sum(len(node.waiting) for node in tree.nodes if node.active)
        dispatchable += servable
        if any(node.candidate for node in tree.nodes):
            orders[ROLLOUT].append((tree.rollout_clock, tree.created_step, key))
            orders[SFT].append((tree.sft_clock, tree.created_step, key))
        if servable and not (most and busy[key] >= most):
            orders[TEACHER].append((tree.dispatch_clock, tree.dispatch_tick, tree.created_step, key))
        if not flying[key] and not any(node.active or node.waiting for node in tree.nodes):
            removable.add(key)
        by_id = {node.id: node for node in tree.nodes}
        assert list(by_id) == sorted(by_id) and tree.nodes[0].parent is None and tree.nodes[0].origin is None
        assert len({node.ids.tobytes() for node in tree.nodes}) == len(tree.nodes)
        for node in tree.nodes[1:]:
            parent = by_id[node.parent]
            assert len(node.ids) > len(parent.ids) and np.array_equal(node.ids[: len(parent.ids)], parent.ids)
            assert len(node.origin.suffix_ids) and node.depth == parent.depth + 1
        assert all(node.waiting == sorted(node.waiting) and node.tree == key for node in tree.nodes)
    assert [list(order) for order in index.orders] == [sorted(order) for order in orders]
    assert index.removable.keys() == removable and index.num_dispatchable == dispatchable
    answered = counters.succeeded + counters.duplicate + counters.invalid + counters.failed + counters.stale_parent_inactive
    dropped = counters.cleared + counters.dropped_capacity + counters.nodes_refused
    assert counters.enqueued == answered + dropped + len(index.events)
