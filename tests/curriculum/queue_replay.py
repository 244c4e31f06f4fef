"""Drives a `FailedPool` and an `AnnotatedPool` with the operations of recorded traces, in their vocabulary."""

from deepgrpo.curriculum.annotated_pool import AnnotatedEntry, AnnotatedPool
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.types import as_ids
from tests.curriculum.replay import Replay, assert_close, problem, reloaded


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
