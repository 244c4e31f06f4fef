"""Drives a `Forest` with the operations of recorded traces, in their vocabulary: trees are named by prompts, nodes by states."""

import tempfile

import numpy as np

from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Annotation
from deepgrpo.types import Problem, as_ids

UNKNOWN = -1  # a handle that no pool gives out


class Replay:
    """One scenario. Labels of failed rollouts are mapped to events, which are numbered in the order they are enqueued."""

    def __init__(self, config: dict):
        self.config = config
        self.pool = Forest(**config)
        self.events: dict[str, int] = {}
        self.labels: dict[int, str] = {}

    def run(self, ops: list[dict], stat_keys: list[str] | None) -> None:
        """Applies the operations in order; asserts each result, and the statistics after each operation."""
        for number, op in enumerate(ops):
            where = f"operation {number}: {op['op']} {op['args']}"
            if isinstance(op["result"], dict) and "error" in op["result"]:
                try:
                    result = {"returned": getattr(self, op["op"])(**op["args"])}
                except ValueError:
                    result = op["result"]
            else:
                result = getattr(self, op["op"])(**op["args"])
            assert result == op["result"], where
            if "stats" in op:
                stats = dict(zip(stat_keys, op["stats"], strict=True)) if stat_keys else op["stats"]
                metrics = self.pool.metrics()
                found = {name: metrics[name] for name in stats}
                wrong = {name: (found[name], value) for name, value in stats.items() if abs(found[name] - value) > 1e-6}
                assert not wrong, f"{where}: (found, expected) {wrong}"

    def _find(self, tree, node) -> int:
        found = self.pool.find(tree, node)
        return UNKNOWN if found is None else found

    def _enqueued(self, failed, counts: dict[str, int]) -> dict[str, int]:
        before = self.pool.metrics()["forest_pool/events_enqueued"] - counts["events_added"]
        for offset in range(counts["events_added"]):
            label = failed[offset]["event"]
            self.events[label], self.labels[before + offset] = before + offset, label
        return counts

    def observe_root(self, prompt, k_succ, k_total, step, failed):
        problem = Problem(0, "trace", as_ids(prompt), "", "")
        counts = self.pool.observe_root(problem, k_succ, k_total, step, _responses(failed))
        return self._enqueued(failed, counts)

    def observe_node(self, tree, node, k_succ, k_total, step, failed):
        counts = self.pool.observe_node(self._find(tree, node), k_succ, k_total, step, _responses(failed))
        return self._enqueued(failed, counts)

    def sample_rollout(self, n, step):
        states = self.pool.sample_rollout(n, step)
        return [{"tree": state.problem.prompt_ids.tolist(), "node": state.ids.tolist()} for state in states]

    def dispatch_teacher(self, max_items, step):
        return [
            {
                "event": self.labels[failure.event],
                "tree": failure.problem.prompt_ids.tolist(),
                "parent": failure.state_ids.tolist(),
                "created_step": failure.step,
            }
            for failure in self.pool.dispatch_teacher(max_items, step)
        ]

    def teacher_result(self, event, annotated, success, step):
        annotation = None
        if annotated is not None:
            suffix = annotated["suffix_ids"]
            state_ids = as_ids(annotated["prompt_ids"] + annotated["prefix_ids"])
            annotation = Annotation(state_ids, None if suffix is None else as_ids(suffix))
        outcome, child = self.pool.teacher_result(self.events.get(event, UNKNOWN), annotation, step, success=success)
        if child is None:
            return {"outcome": outcome}
        lineage = self.pool.debug_context(child)["lineage"]
        assert lineage[-1]["node"] == child
        return {"outcome": outcome, "child": annotation.state_ids.tolist()}

    def cleanup(self):
        return self.pool.cleanup()

    def _routes(self, entries):
        return [{"tree": entry.problem.prompt_ids.tolist(), "node": entry.state_ids.tolist()} for entry in entries]

    def sample_sft(self, n, step, max_nodes_per_tree):
        return self._routes(self.pool.sample_sft(n, step, max_nodes_per_tree))

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

    def save_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.pool.state(folder)
            self.pool = Forest(**self.config)
            self.pool.restore(folder)

    def size(self):
        return len(self.pool)

    def debug_context(self, tree, node, max_children, max_lineage):
        context = self.pool.debug_context(self._find(tree, node), max_children, max_lineage)
        if not context:
            return {}
        ids = {n["node"]: n["ids"].tolist() for t in self.pool.describe() for n in t["nodes"]}
        rate = context["lineage"][-1]["success_rate"] if context["lineage"] else None
        named = {kind: [ids[summary["node"]] for summary in context[kind]] for kind in ("lineage", "children")}
        return context | named | {"success_rate": rate}

    def snapshot(self):
        return [self._tree_listing(tree) for tree in self.pool.describe()]

    def _tree_listing(self, tree: dict) -> dict:
        """A tree of `Forest.describe` in the trace's words. Agent names and numbers of turns are not the pool's business."""
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
            {
                "event": self.labels[event["event"]],
                "parent": ids[event["node"]],
                "created_step": event["created_step"],
                "in_flight": event["in_flight"],
            }
            for event in tree["events"]
        ]
        clocks = ("created_step", "last_updated_step", "last_rollout_sampled_step", "last_dispatch_step", "last_sft_sampled_step")
        return {"tree": ids[tree["nodes"][0]["node"]], "nodes": nodes, "events": events} | {name: tree[name] for name in clocks}


def _responses(failed):
    return None if failed is None else [as_ids(rollout["response_ids"]) for rollout in failed]
