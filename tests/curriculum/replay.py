"""Drives pools with the operations of recorded traces, in their vocabulary.

What is random is recorded as probabilities: each is compared with the exact probability that follows from the pool's weights, and
that with what many draws of the pool come to.
"""

import itertools
import json
import tempfile

import numpy as np

from deepgrpo.curriculum.base import Correction, Failure, tree_key
from deepgrpo.curriculum.branches import BranchBuffer, BranchPoint
from deepgrpo.curriculum.chain import LEARNING
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.flat import FlatEntry
from deepgrpo.curriculum.forest_index import context
from deepgrpo.curriculum.saved import Saved, read_saved, write_saved
from deepgrpo.curriculum.suffixes import AnnotatedEntry, AnnotatedPool
from deepgrpo.types import Problem, as_ids
from tests.curriculum import made

DRAWS = 1000
TOLERANCE = 0.08  # of a frequency over so many draws: five standard deviations
UNKNOWN = -1  # a handle that no pool gives out


def problem(prompt=(1,)) -> Problem:
    return Problem(0, "trace", as_ids(list(prompt)), "", "")


def reloaded(saved: Saved, record: type) -> Saved:
    with tempfile.TemporaryDirectory() as folder:
        write_saved(folder, "pool", record, saved)
        return read_saved(folder, "pool", record)


def assert_close(found, expected, where):
    """Equal, numbers within 1e-6, however deeply they lie."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), (where, found, expected)
        for key in expected:
            assert_close(found[key], expected[key], f"{where}: {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), (where, found, expected)
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_close(*pair, f"{where}: [{i}]")
    elif isinstance(expected, float):
        assert abs(found - expected) <= 1e-6, (where, found, expected)
    else:
        assert found == expected, (where, found, expected)


def inclusion(weights: list[float], k: int) -> list[float]:
    """Probability of each item to be among the first k of successive draws proportional to weight, zero weights last."""
    found = [0.0] * len(weights)

    def draw(left: tuple[int, ...], k: int, probability: float) -> None:
        total = sum(weights[i] for i in left)
        if k >= len(left) or total <= 0:  # then in the order given
            for i in left[:k]:
                found[i] += probability
            return
        for i in left:
            if k and weights[i] > 0:
                chance = probability * weights[i] / total
                found[i] += chance
                draw(tuple(j for j in left if j != i), k - 1, chance)

    draw(tuple(range(len(weights))), k, 1.0)
    return found


class Replay:
    """One scenario of one pool."""

    prefix = ""  # of the trace's statistics
    record = None  # of a pool that is a part of a curriculum

    def __init__(self, config: dict):
        self.config, self.random = config, np.random.default_rng(0)
        self.pool = self.create(config)

    def run(self, ops: list[dict], stat_keys: list[str] | None) -> None:
        """Applies the operations in order; checks each result, and the statistics after each operation."""
        for number, op in enumerate(ops):
            where = f"operation {number}: {op['op']} {json.dumps(op['args'])}"
            expected = op["result"]
            if isinstance(expected, dict) and "error" in expected:
                try:
                    found = {"returned": getattr(self, op["op"])(**op["args"])}
                except ValueError:
                    found = {"error": expected["error"]} | ({"size_after": len(self.pool)} if "size_after" in expected else {})
            else:
                found = getattr(self, op["op"])(**op["args"])
            self.check(op, found, where)
            if "stats" in op:
                stats = dict(zip(stat_keys, op["stats"], strict=True)) if stat_keys else op["stats"]
                metrics = self.pool.metrics()
                assert_close({name: metrics[self.prefix + name] for name in stats}, stats, where)

    def check(self, op, found, where):
        assert_close(found, op["result"], where)

    def save_load(self, into_config=None):
        self.config = self.config | (into_config or {})
        old, self.pool = self.pool, self.create(self.config)
        if self.record is None:
            with tempfile.TemporaryDirectory() as folder:
                old.state(folder)
                return self.pool.restore(folder)
        self.pool.load(reloaded(old.saved(), self.record))
        return len(self.pool)


class ChainReplay(Replay):
    """Failed rollouts are told apart by their ids: rollout r3 of length 4 is [3, 3, 3, 3]. Agent names are not the pool's."""

    prefix = "chain_pool/"

    def create(self, config):
        return made.create("chain", max_model_len=10**6, **config)

    def _responses(self, failed):
        return [as_ids([int(f["rollout"][1:])] * f["response_len"]) for f in failed or ()]

    def _labels(self, failed):
        return [f"r{f.response_ids[0]}" for f in failed]

    def main_failure(self, prompt, failed, step):
        return self.pool.start_chain(problem(prompt), self._responses(failed), step)

    def weights(self):
        return [self._named(chain) | {"weight": self.pool.weight(chain)} for chain in self.pool.learning()]

    def _named(self, chain):
        return {"prompt": chain.problem.prompt_ids.tolist(), "node": chain.nodes[-1].ids.tolist()}

    def sample(self, n, step):
        return [self._named(chain) for chain in self.pool.draw(n, step, self.random)]

    def sample_distribution(self, n):
        learning = self.pool.learning()
        exact = inclusion([self.pool.weight(chain) for chain in learning], n)
        clocks = [chain.nodes[-1].last_used_step for chain in learning]
        seen = sum(
            np.isin(np.arange(len(learning)), [learning.index(c) for c in self.pool.draw(n, 0, self.random)])
            for _ in range(DRAWS)
        )
        for chain, clock in zip(learning, clocks, strict=True):
            chain.nodes[-1].last_used_step = clock
        np.testing.assert_allclose(seen / DRAWS, exact, atol=TOLERANCE)
        names = [chain.problem.prompt_ids.tolist() for chain in learning]
        return [{"prompt": p, "inclusion_probability": e} for p, e in zip(names, exact, strict=True)]

    def observe(self, prompt, k_succ, k_total, step, failed):
        self.pool.observe_state(as_ids(prompt), k_succ, k_total, step, self._responses(failed))

    def drain_teacher_queue(self):
        drained = []
        while self.pool.queue:
            if (chain := self.pool.next_in_queue()) is not None:
                drained.append({"prompt": chain.problem.prompt_ids.tolist(), "rollouts": self._labels(chain.nodes[-1].failed)})
        return drained

    def teacher_result(self, prompt, new_state_ids, success, step):
        chain = self.pool.chains.get(tree_key(as_ids(prompt)))
        if chain is not None:
            self.pool.deepen(chain, as_ids(new_state_ids) if success and new_state_ids else None, step)

    def snapshot(self):
        return [self._chain(chain) for chain in self.pool.chains.values()]

    def _chain(self, chain):
        if chain.state == LEARNING:
            last = chain.nodes[-1]
            assert not last.last_k_total or 0 < last.last_k_succ < last.last_k_total
        prompt = chain.problem.prompt_ids
        kept = ("observations", "last_k_succ", "last_k_total", "first_observed_step", "last_used_step")
        nodes = [
            {"node": node.ids.tolist(), "depth": len(node.ids) - len(prompt), "agent_name": "ag2" if i else "ag"}
            | {"failed": self._labels(node.failed)}
            | {name: getattr(node, name) for name in kept}
            for i, node in enumerate(chain.nodes)
        ]
        steps = {"created_step": chain.created_step, "last_updated_step": chain.last_updated_step}
        transitions = [list(transition) for transition in chain.transitions]
        named = {"prompt": prompt.tolist(), "state": chain.state, "active_idx": len(chain.nodes) - 1}
        return named | steps | {"transitions": transitions, "nodes": nodes}


class FlatReplay(Replay):
    def create(self, config):
        self.labels = getattr(self, "labels", {})
        pool = made.create("flat")
        pool.max_per_state, pool.w_floor_hard, pool.w_floor_mastered = (
            config[name] for name in ("max_per_prompt", "w_floor_hard", "w_floor_mastered")
        )
        return pool

    def add(self, entries):
        for entry in entries:
            known = {} if entry["initial_p_hat"] is None else {"initial_p_hat": entry["initial_p_hat"]}
            self.labels[self.pool.add(FlatEntry(problem(), as_ids(entry["state_ids"]), **known))] = entry["entry"]
        return len(self.pool.entries)

    def record_usage(self, entry, k_succ, k_total, step):
        handle = next(handle for handle, label in self.labels.items() if label == entry)
        found = self.pool.record_usage(handle, k_succ, k_total, step)
        return {name: getattr(found, name) for name in ("last_k_succ", "last_k_total", "last_used_step")}

    def weights(self):
        return [{"entry": self.labels[e.handle], "weight": self.pool.weight(e)} for e in self.pool.entries.values()]

    def _candidate_sets(self):
        """All equally likely lists of candidates."""
        cap, groups = self.config["max_per_prompt"], {}
        for entry in self.pool.entries.values():
            groups.setdefault(tuple(entry.state_ids.tolist()), []).append(entry)
        choices = []
        for group in groups.values():
            order = sorted(group, key=self.pool.weight, reverse=True)
            last = self.pool.weight(order[min(cap, len(order)) - 1])
            sure = [e for e in order if self.pool.weight(e) > last] if len(order) > cap else group
            ties = [e for e in order if self.pool.weight(e) == last]
            choices.append(
                [sure + list(t) for t in itertools.combinations(ties, cap - len(sure))] if len(order) > cap else [sure]
            )
        return [[entry for group in groups for entry in group] for groups in itertools.product(*choices)]

    def _compare(self, exact, draw):
        """The exact probabilities by label, after comparing them with the frequencies of draws."""
        seen = dict.fromkeys(exact, 0)
        for _ in range(DRAWS):
            for entry in draw():
                seen[self.labels[entry.handle]] += 1
        np.testing.assert_allclose([n / DRAWS for n in seen.values()], list(exact.values()), atol=TOLERANCE)
        return exact

    def _exact(self, n):
        exact = {self.labels[e.handle]: 0.0 for e in self.pool.entries.values()}
        sets = self._candidate_sets()
        for candidates in sets:
            weights = [self.pool.weight(e) for e in candidates]
            weights = weights if sum(weights) > 0 else [1.0] * len(weights)
            for entry, chance in zip(candidates, inclusion(weights, n), strict=True):
                exact[self.labels[entry.handle]] += chance / len(sets)
        return exact

    def candidates(self):
        exact = self._compare(self._exact(len(self.pool.entries)), lambda: self.pool.candidates(self.random))
        return [{"entry": entry, "candidate_probability": chance} for entry, chance in exact.items()]

    def sample_distribution(self, n):
        exact = self._compare(self._exact(n), lambda: self.pool.draw(n, self.random))
        return {"returned": self.sample_count(n), "inclusion_probability": exact}

    def sample_count(self, n):
        return len(self.pool.draw(n, self.random))


class FailedReplay(Replay):
    """Entry f7 has the response [7]."""

    record = FailedRollout

    def create(self, config):
        bounds = {name: value for name, value in config.items() if name != "priority_mode"}
        return FailedPool(priority=True, max_size=0) if config["priority_mode"] else FailedPool(**bounds)

    def add(self, entries, step):
        ids = [(as_ids(entry["prompt_ids"]), as_ids([int(entry["entry"][1:])])) for entry in entries]
        return self.pool.add([FailedRollout(problem(), "g", *pair) for pair in ids], step)

    def _label(self, failed):
        return f"f{failed.response_ids[0]}"

    def contents(self):
        if self.config["priority_mode"]:
            return [[self._label(failed) for failed in stack] for stack in self.pool.contents()]
        return [[self._label(failed), failed.step] for failed in self.pool.contents()[0]]

    def take(self, n):
        return [self._label(failed) for failed in self.pool.take(n, self.random)]

    def check(self, op, found, where):
        expected = op["result"]
        if op["op"] != "take" or "error" in expected:
            assert_close(found, expected, where)
        elif "order" in expected:
            assert found == expected["order"], where
        else:
            assert len(set(found)) == expected["random_subset_of_size"], where
            assert [int(label[1:]) for label in found] == sorted((int(label[1:]) for label in found), reverse=True), where


class AnnotatedReplay(Replay):
    """Entry a7 has the prefix [7]."""

    record = AnnotatedEntry

    def create(self, config):
        return AnnotatedPool(**config)

    def add(self, entries):
        one = as_ids([1])
        return self.pool.add(
            [
                AnnotatedEntry(
                    *(problem(), entry["group"], one, as_ids([int(entry["entry"][1:])])),
                    *(one if entry["has_suffix"] else None, 1.0, one, 1),
                )
                for entry in entries
            ]
        )

    def has_enough(self, threshold):
        return len(self.pool) >= threshold

    def contents(self):
        return [f"a{entry.prefix_ids[0]}" for entry in self.pool.entries]

    def take(self, n, strategy):
        return self.pool.take(n, self.random, strategy)

    def check(self, op, found, where):
        expected = op["result"]
        if op["op"] == "take" and "error" not in expected:
            groups = [entry.group_id for entry in found]
            counts = sorted(groups.count(group) for group in set(groups))
            labels = sorted((f"a{entry.prefix_ids[0]}" for entry in found), key=lambda label: int(label[1:]))
            found = {"returned": len(labels), "per_group_counts_sorted": counts, "all_in_any_order": labels}
            assert len(set(labels)) == len(labels), where
            if "all_in_any_order" in expected:
                expected = expected | {"all_in_any_order": sorted(expected["all_in_any_order"], key=lambda a: int(a[1:]))}
            found = {key: found[key] for key in expected}
        assert_close(found, expected, where)


def point(label, group, length, index=0, chain_length=2) -> BranchPoint:
    """`kept` is its label here."""
    return BranchPoint(problem(), group, as_ids([1] * length), index, chain_length, label)


class BufferReplay(Replay):
    record = BranchPoint

    def create(self, config):
        return BranchBuffer(**config)

    def add(self, entries, step):
        points = [
            point(int(e["entry"][1:]), e["group"], e["prompt_len"] + e["response_len"], e["index"], e["chain_length"])
            for e in entries
        ]
        self.pool.add(points, step)
        return [[f"b{p.kept}", p.step] for p in self.pool.entries]

    def sample(self, n, strategy):
        return [self.pool.sample(n, self.random, strategy) for _ in range(DRAWS)]

    def check(self, op, found, where):
        expected = op["result"]
        if op["op"] != "sample" or "error" in expected:
            return assert_close(found, expected, where)
        for draw in found:
            groups = [p.group_id for p in draw]
            counts = sorted(groups.count(group) for group in set(groups))
            assert len({p.kept for p in draw}) == len(draw) == expected["returned"], where
            assert counts == expected.get("per_group_counts_sorted", counts), where
        for label, probability in expected["inclusion_probability"].items():
            share = sum(any(f"b{p.kept}" == label for p in draw) for draw in found) / DRAWS
            assert abs(share - probability) < TOLERANCE, (where, label)
            assert probability not in (0.0, 1.0) or share == probability, (where, label)


class ForestReplay(Replay):
    """Trees are named by prompts, nodes by states. Labels of failed rollouts are mapped to events, which are numbered in the
    order they are enqueued."""

    def create(self, config):
        self.events, self.labels = getattr(self, "events", {}), getattr(self, "labels", {})
        limit = config["max_model_len"]
        return made.forest(**config | {"max_model_len": 10**6 if limit is None else limit})

    def _find(self, tree, node) -> int:
        found = self.pool.find(tree, node)
        return UNKNOWN if found is None else found

    def _enqueued(self, failed, counts: dict[str, int]) -> dict[str, int]:
        before = self.pool.counters.enqueued - counts["events_added"]
        for offset in range(counts["events_added"]):
            label = failed[offset]["event"]
            self.events[label], self.labels[before + offset] = before + offset, label
        return counts

    def observe_root(self, prompt, k_succ, k_total, step, failed):
        counts = self.pool.observe_root(problem(prompt), k_succ, k_total, step, _responses(failed))
        return self._enqueued(failed, counts)

    def observe_node(self, tree, node, k_succ, k_total, step, failed):
        counts = self.pool.observe_node(self._find(tree, node), k_succ, k_total, step, _responses(failed))
        return self._enqueued(failed, counts)

    def sample_rollout(self, n, step):
        states = self.pool.sample_rollout(n, step)
        return [{"tree": state.problem.prompt_ids.tolist(), "node": state.ids.tolist()} for state in states]

    def dispatch_teacher(self, max_items, step):
        return [
            {"event": self.labels[failure.failure_id], "tree": failure.problem.prompt_ids.tolist()}
            | {"parent": failure.state_ids.tolist(), "created_step": failure.step}
            for failure in self.pool.dispatch(10**6 if max_items is None else max_items, UNKNOWN if step is None else step)
        ]

    def teacher_result(self, event, annotated, success, step):
        failure, correction = Failure(self.events.get(event, UNKNOWN), None, as_ids([]), as_ids([]), 0), None
        if annotated is not None and success:
            state_ids, suffix = as_ids(annotated["prompt_ids"] + annotated["prefix_ids"]), annotated["suffix_ids"]
            correction = Correction(state_ids, None if suffix is None else as_ids(suffix), 1.0, as_ids([]))
        outcome = self.pool.resolve(failure, correction, step)
        return {"outcome": outcome} | ({"child": state_ids.tolist()} if outcome == "child_created" else {})

    def cleanup(self):
        return self.pool.cleanup()

    def _routes(self, entries):
        return [{"tree": entry.problem.prompt_ids.tolist(), "node": entry.state_ids.tolist()} for entry in entries]

    def sample_sft(self, n, step, max_nodes_per_tree):
        if max_nodes_per_tree is not None and max_nodes_per_tree <= 0 and n > 0:
            raise ValueError("the pool takes one of a tree, whatever the cap")
        return self._routes(self.pool.sample_sft(n, step))

    def mark_sft(self, routes, step):
        return self.pool.mark_sft([self._find(route["tree"], route["node"]) for route in routes], step)

    def record_sft(self, tree, node, step, count):
        return self.pool.record_sft(self._find(tree, node), step, count)

    def is_sft_trainable(self, tree, node):
        return self.pool.is_sft_trainable(self._find(tree, node))

    def ready_counts(self, max_nodes_per_tree):
        return self.pool.ready_counts(max_nodes_per_tree)

    def freeze_sft_epoch(self, min_created_step, max_created_step):
        entries, counts = self.pool.freeze_sft_epoch(min_created_step, max_created_step)
        return {"snapshot": self._routes(entries)} | counts

    def size(self):
        return len(self.pool)

    def debug_context(self, tree, node, max_children, max_lineage):
        found = self.pool.index.nodes.get(self._find(tree, node))
        if found is None:
            return {}
        about = context(self.pool.index.tree_of(found), found, max_children, max_lineage)
        rate = about["lineage"][-1]["success_rate"] if about["lineage"] else None
        nodes = self.pool.index.nodes
        named = {kind: [nodes[summary["node"]].ids.tolist() for summary in about[kind]] for kind in ("lineage", "children")}
        return about | named | {"success_rate": rate}

    def snapshot(self):
        return [self._tree_listing(tree) for tree in made.describe(self.pool)]

    def _tree_listing(self, tree: dict) -> dict:
        """A tree of `made.describe` in the trace's words. Agent names and numbers of turns are not the pool's business."""
        ids = {node["node"]: node["ids"].tolist() for node in tree["nodes"]}
        kept = ("active", "created_step", "observations", "last_k_succ", "last_k_total", "last_rollout_step", "last_success_step")
        kept += ("last_fail_step", "last_dispatch_step", "last_sft_step", "sft_updates")
        nodes = []
        for node in tree["nodes"]:
            if node["origin"] is not None:
                assert np.array_equal(node["ids"][: len(ids[node["parent"]])], ids[node["parent"]])
            nodes.append(
                {
                    "node": ids[node["node"]],
                    "parent": None if node["parent"] is None else ids[node["parent"]],
                    "children": [ids[child] for child in node["children"]],
                    "teacher_suffix_ids": None if node["origin"] is None else node["origin"].suffix_ids.tolist(),
                    "num_turns": 1.0,
                    "agent_name": "ag",
                }
                | {name: node[name] for name in kept}
            )
        events = [
            {"event": self.labels[event["event"]], "parent": ids[event["node"]]}
            | {name: event[name] for name in ("created_step", "in_flight")}
            for event in tree["events"]
        ]
        clocks = ("created_step", "last_updated_step", "last_rollout_sampled_step", "last_dispatch_step", "last_sft_sampled_step")
        return {"tree": ids[tree["nodes"][0]["node"]], "nodes": nodes, "events": events} | {name: tree[name] for name in clocks}


def _responses(failed):
    return None if failed is None else [as_ids(rollout["response_ids"]) for rollout in failed]


REPLAYS = {
    **{"chain": ChainReplay, "flat": FlatReplay, "failed": FailedReplay, "annotated": AnnotatedReplay},
    **{"branch_buffer": BufferReplay, "forest": ForestReplay},
}
