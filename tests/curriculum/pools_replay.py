"""Drives the chain, flat, failed and annotated pools with the operations of recorded traces, in their vocabulary.

What is random is recorded as probabilities: each `sample_distribution` is compared with the exact probabilities that follow from
the pool's weights, and these with what many draws of the pool come to.
"""

import itertools
import json
import tempfile

import numpy as np

from deepgrpo.curriculum.annotated_pool import AnnotatedEntry, AnnotatedPool
from deepgrpo.curriculum.chain_pool import FILES, LEARNING, ChainPool
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.curriculum.flat_pool import FlatEntry, FlatPool
from deepgrpo.curriculum.saved_rows import Saved, read_saved, write_saved
from deepgrpo.types import Problem, as_ids

DRAWS = 1000
TOLERANCE = 0.08  # of a frequency over so many draws: five standard deviations


def problem(prompt=(1,)) -> Problem:
    return Problem(0, "trace", as_ids(list(prompt)), "", "")


def reloaded(saved: Saved, record: type) -> Saved:
    with tempfile.TemporaryDirectory() as folder:
        write_saved(folder, "pool", saved)
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

    def __init__(self, config: dict):
        self.config = config
        self.pool = self.create(config)
        self.random = np.random.default_rng(0)

    def run(self, ops: list[dict], stat_keys: list[str] | None) -> None:
        for number, op in enumerate(ops):
            where = f"operation {number}: {op['op']} {json.dumps(op['args'])}"
            expected = op["result"]
            if isinstance(expected, dict) and "error" in expected:
                try:
                    found = {"returned": getattr(self, op["op"])(**op["args"])}
                except ValueError:
                    found = {"error": "invalid_argument"} | ({"size_after": len(self.pool)} if "size_after" in expected else {})
            else:
                found = getattr(self, op["op"])(**op["args"])
            self.check(op, found, where)
            if "stats" in op:
                stats = dict(zip(stat_keys, op["stats"], strict=True)) if stat_keys else op["stats"]
                metrics = self.pool.metrics()
                assert_close({name: metrics[self.prefix + name] for name in stats}, stats, where)

    def check(self, op, found, where):
        assert_close(found, op["result"], where)


class ChainReplay(Replay):
    """Failed rollouts are told apart by their ids: rollout r3 of length 4 is [3, 3, 3, 3]. Agent names are not the pool's."""

    prefix = "chain_pool/"

    def create(self, config):
        return ChainPool(**config)

    def _responses(self, failed):
        return None if failed is None else [as_ids([int(f["rollout"][1:])] * f["response_len"]) for f in failed]

    def _labels(self, failed):
        return [f"r{f.response_ids[0]}" for f in failed]

    def main_failure(self, prompt, failed, step):
        return self.pool.main_failure(problem(prompt), self._responses(failed), step)

    def weights(self):
        return [self._named(chain) | {"weight": self.pool.weight(chain)} for chain in self.pool.learning()]

    def _named(self, chain):
        return {"prompt": chain.problem.prompt_ids.tolist(), "node": chain.nodes[-1].ids.tolist()}

    def sample(self, n, step):
        return [self._named(chain) for chain in self.pool.sample(n, step, self.random)]

    def sample_distribution(self, n):
        learning = self.pool.learning()
        exact = inclusion([self.pool.weight(chain) for chain in learning], n)
        clocks = [chain.nodes[-1].last_used_step for chain in learning]
        seen = sum(
            np.isin(np.arange(len(learning)), [learning.index(c) for c in self.pool.sample(n, 0, self.random)])
            for _ in range(DRAWS)
        )
        for chain, clock in zip(learning, clocks, strict=True):
            chain.nodes[-1].last_used_step = clock
        np.testing.assert_allclose(seen / DRAWS, exact, atol=TOLERANCE)
        names = [chain.problem.prompt_ids.tolist() for chain in learning]
        return [{"prompt": p, "inclusion_probability": e} for p, e in zip(names, exact, strict=True)]

    def observe(self, prompt, k_succ, k_total, step, failed):
        self.pool.observe(as_ids(prompt), k_succ, k_total, step, self._responses(failed))

    def drain_teacher_queue(self):
        return [{"prompt": c.problem.prompt_ids.tolist(), "rollouts": self._labels(f)} for c, f in self.pool.drain()]

    def teacher_result(self, prompt, new_state_ids, success, step):
        state_ids = None if new_state_ids is None else as_ids(new_state_ids)
        self.pool.teacher_result(as_ids(prompt), state_ids, step, success=success)

    def save_load(self):
        saved = {name: reloaded(rows, FILES[name]) for name, rows in self.pool.saved().items()}
        self.pool = self.create(self.config)
        self.pool.load(saved)

    def snapshot(self):
        return [self._chain(chain) for chain in self.pool.chains()]

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
        return FlatPool(**config)

    def add(self, entries):
        for entry in entries:
            known = {} if entry["initial_p_hat"] is None else {"initial_p_hat": entry["initial_p_hat"]}
            self.labels[self.pool.add(problem(), as_ids(entry["state_ids"]), **known)] = entry["entry"]
        return len(self.pool)

    def record_usage(self, entry, k_succ, k_total, step):
        handle = next(handle for handle, label in self.labels.items() if label == entry)
        found = self.pool.record_usage(handle, k_succ, k_total, step)
        return {name: getattr(found, name) for name in ("last_k_succ", "last_k_total", "last_used_step")}

    def weights(self):
        return [{"entry": self.labels[e.handle], "weight": self.pool.weight(e)} for e in self.pool.entries()]

    def _candidate_sets(self):
        """All equally likely lists of candidates."""
        cap, groups = self.config["max_per_prompt"], {}
        for entry in self.pool.entries():
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
        exact = {self.labels[e.handle]: 0.0 for e in self.pool.entries()}
        sets = self._candidate_sets()
        for candidates in sets:
            weights = [self.pool.weight(e) for e in candidates]
            weights = weights if sum(weights) > 0 else [1.0] * len(weights)
            for entry, chance in zip(candidates, inclusion(weights, n), strict=True):
                exact[self.labels[entry.handle]] += chance / len(sets)
        return exact

    def candidates(self):
        exact = self._compare(self._exact(len(self.pool)), lambda: self.pool.candidates(self.random))
        return [{"entry": entry, "candidate_probability": chance} for entry, chance in exact.items()]

    def sample_distribution(self, n):
        exact = self._compare(self._exact(n), lambda: self.pool.sample(n, self.random))
        return {"returned": self.sample_count(n), "inclusion_probability": exact}

    def sample_count(self, n):
        return len(self.pool.sample(n, self.random))

    def save_load(self):
        saved = reloaded(self.pool.saved(), FlatEntry)
        self.pool = self.create(self.config)
        self.pool.load(saved)


class FailedReplay(Replay):
    """Entry f7 has the response [7]."""

    def create(self, config):
        config = dict(config)
        return FailedPool(priority=config.pop("priority_mode"), **config)

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

    def save_load(self, into_config):
        saved = reloaded(self.pool.saved(), FailedRollout)
        self.config = self.config | into_config
        self.pool = self.create(self.config)
        self.pool.load(saved)
        return len(self.pool)


class AnnotatedReplay(Replay):
    """Entry a7 has the prefix [7]."""

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
        return self.pool.has_enough(threshold)

    def contents(self):
        return [f"a{entry.prefix_ids[0]}" for entry in self.pool.contents()]

    def take(self, n, strategy):
        return self.pool.take(n, strategy, self.random)

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

    def save_load(self):
        saved = reloaded(self.pool.saved(), AnnotatedEntry)
        self.pool = self.create(self.config)
        self.pool.load(saved)
        return len(self.pool)
