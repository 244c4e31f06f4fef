"""Drives a `FlatPool` with the operations of recorded traces, in their vocabulary: entries have labels."""

import itertools

import numpy as np

from deepgrpo.curriculum.flat_pool import FlatEntry, FlatPool
from deepgrpo.types import as_ids
from tests.curriculum.replay import DRAWS, TOLERANCE, Replay, inclusion, problem, reloaded


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
