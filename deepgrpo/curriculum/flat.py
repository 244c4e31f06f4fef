"""The flat pool: states without any order among them, drawn by how uncertain their outcome is (an ablation of the forest).

Groups that fail as a whole go to the teacher (`failed_pool`); prompt and shared prefix become a state. A state's weight is the
variance of its success rate, so that what is mastered or hopeless is rarely drawn. It stays in the pool, whatever became of it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum import base
from deepgrpo.curriculum.base import MAX_EVENTS, MAX_EVENTS_PER_STATE, NEVER, STATES, Correction, State
from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout, QueuedCurriculum
from deepgrpo.curriculum.saved import Saved, saved_counts
from deepgrpo.types import Group, Ids, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class FlatEntry:
    """One state.

    handle: its number by arrival. state_ids: int32[len], prompt and locked prefix. initial_p_hat: success rate to assume before
    it was rolled out. last_k_succ, last_k_total: of its latest group; None: never rolled out. last_used_step: -1 for never.
    """

    problem: Problem
    state_ids: Ids
    initial_p_hat: float = 0.5
    created_step: int = NEVER
    handle: int = NEVER
    last_k_succ: int | None = None
    last_k_total: int | None = None
    last_used_step: int = NEVER


class FlatPool(QueuedCurriculum):
    """`base.Curriculum`: entries in order of arrival."""

    name, version = "flat", 2
    by_ratio = knows_age = True
    keys = ("rollout_n",)
    records = {"flat_pool": FlatEntry, "failed_pool": FailedRollout}
    max_per_state = 3  # entries of equal states that a draw considers, the heaviest
    w_floor_hard = 0.2  # weight of a state whose latest group failed as a whole
    w_floor_mastered = 0.01  # and of one whose latest group succeeded as a whole
    max_size = 10000  # newest entries kept

    def __init__(self, config: ml_collections.ConfigDict):
        bounds = {} if config.strict_reference else {"max_per_state": MAX_EVENTS_PER_STATE, "max_size": MAX_EVENTS, "fair": True}
        super().__init__(config, FailedPool(**{"priority": True, "max_size": 0} | bounds))
        self.entries: dict[int, FlatEntry] = {}
        self.counts = {"next_handle": 0, "dropped_capacity": 0}

    def ready(self) -> int:
        with self.lock:
            return len(self.entries)

    def sample(self, n: int, step: int) -> list[State]:
        """Draws states; fewer than `n` where the cap on equal states leaves fewer."""
        base.check_step(step)
        with self.lock:
            entries = self.draw(n, base.generator(self.seed, step, STATES))
        return [State(ids=entry.state_ids, problem=entry.problem, node=entry.handle) for entry in entries]

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Notes what became of the injected states; the failures of groups without any success go to the teacher.

        Rollouts without a verdict count neither way; a group with too few (`Group.judged`) is left out.
        """
        base.check_step(step)
        judged = self.judged(groups)
        injected = [row for row in judged if row[0].prompt.injected]
        failed = [entry for group, k_succ, _ in judged if not k_succ for entry in self.failures_of(group)]
        with self.lock:
            self.failed.add(failed, step)
            recorded = [self.record_usage(group.prompt.node, *counts, step) for group, *counts in injected]
        metrics = {"failed_gated_to_teacher": len(failed), "recorded_entries": sum(entry is not None for entry in recorded)}
        if injected:
            metrics["escape_rate_groups"] = sum(k_succ > 0 for _, k_succ, _ in injected) / len(injected)
        return base.injection_metrics(groups, judged) | base.named("synthetic_inject", metrics)

    def corrected(self, failed: FailedRollout, correction: Correction, step: int) -> FlatEntry:
        """The success rate to assume is the share of the corrected answer's tokens that the prefix has (the parent's was 0)."""
        prefix, suffix = len(correction.prefix_ids), len(correction.suffix_ids)
        prior = prefix / (prefix + suffix) if prefix + suffix else 0.5
        return FlatEntry(failed.problem, np.concatenate([failed.state_ids, correction.prefix_ids]), prior, step)

    def add(self, entry: FlatEntry) -> int:
        """Appends a state; returns its handle."""
        handle = self.counts["next_handle"]
        self.counts["next_handle"] += 1
        self.entries[handle] = dataclasses.replace(entry, handle=handle, state_ids=base.frozen_ids(entry.state_ids))
        while len(self.entries) > self.max_size:
            del self.entries[next(iter(self.entries))]
            self.counts["dropped_capacity"] += 1
        return handle

    def record_usage(self, handle: int, k_succ: int, k_total: int, step: int) -> FlatEntry | None:
        """Notes an entry's latest group; returns the entry as it is now, None if there is no such. Called under the lock."""
        if (entry := self.entries.get(handle)) is None:
            return None
        entry = dataclasses.replace(entry, last_k_succ=k_succ, last_k_total=k_total, last_used_step=step)
        self.entries[handle] = entry
        return entry

    def weight(self, entry: FlatEntry) -> float:
        """4 p (1 - p) of the success rate p: of the latest group, with floors at both ends; before it, of the prior's."""
        if entry.last_k_succ is None or not entry.last_k_total:
            return max(1e-5, 4 * entry.initial_p_hat * (1 - entry.initial_p_hat))
        if entry.last_k_succ == 0:
            return self.w_floor_hard
        if entry.last_k_succ == entry.last_k_total:
            return self.w_floor_mastered
        rate = entry.last_k_succ / entry.last_k_total
        return 4 * rate * (1 - rate)

    def _by_state(self) -> dict[bytes, list[FlatEntry]]:
        groups: dict[bytes, list[FlatEntry]] = {}
        for entry in self.entries.values():
            groups.setdefault(base.tree_key(entry.state_ids), []).append(entry)
        return groups

    def candidates(self, random: np.random.Generator) -> list[FlatEntry]:
        """State by state, the heaviest entries of each that is over the cap, ties broken at random."""
        chosen: list[FlatEntry] = []
        for group in self._by_state().values():
            if len(group) > self.max_per_state:
                shuffled = [group[i] for i in random.permutation(len(group)).tolist()]
                group = sorted(shuffled, key=self.weight, reverse=True)[: self.max_per_state]
            chosen += group
        return chosen

    def draw(self, n: int, random: np.random.Generator) -> list[FlatEntry]:
        """Draws min(n, candidates) different entries by weight; uniformly if no candidate has any. They stay in the pool."""
        if n <= 0 or not self.entries:
            return []
        candidates = self.candidates(random)
        weights = np.array([self.weight(entry) for entry in candidates])
        if weights.sum() <= 0:
            weights = np.ones(len(candidates))
        return [candidates[i] for i in base.weighted_sample(weights, n, random)]

    def look_up(self, node: int) -> Mapping[str, Any]:
        with self.lock:
            entry = self.entries.get(node)
        return {} if entry is None else {"created_step": entry.created_step}

    def metrics(self) -> Mapping[str, float]:
        with self.lock:
            entries = list(self.entries.values())
            counts = {"size": len(entries), "unique_prompts": len(self._by_state())}
            counts["used_entries"] = sum(entry.last_k_succ is not None for entry in entries)
            counts["dropped_capacity"] = self.counts["dropped_capacity"]
            if entries:
                rates = [entry.last_k_succ / entry.last_k_total for entry in entries if entry.last_k_total]
                lengths = [len(entry.state_ids) for entry in entries]
                counts |= {"avg_p_hat_tried": sum(rates) / max(len(rates), 1), "avg_aug_prompt_len": sum(lengths) / len(lengths)}
                counts |= {"max_aug_prompt_len": max(lengths), "min_aug_prompt_len": min(lengths)}
            return base.named("synthetic_pool", counts) | self.failed.metrics()

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        tables, fields = super().saved()
        return tables | {"flat_pool": Saved(list(self.entries.values()), self.counts.copy())}, fields

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        saved = tables["flat_pool"]
        counts, entries = saved_counts(saved.numbers, self.counts), {entry.handle: entry for entry in saved.rows}
        if len(entries) < len(saved.rows) or max(entries, default=-1) >= counts["next_handle"]:
            raise ValueError("flat_pool.npz: a handle comes twice, or the next one is in use")
        super().load(tables, fields)
        self.entries, self.counts = entries, counts
