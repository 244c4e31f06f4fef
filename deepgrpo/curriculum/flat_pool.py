"""The flat pool: hard states without any order among them, drawn by how uncertain their outcome is (an ablation of the forest).

Not thread-safe: the curriculum that owns it holds one lock over all its pools.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from deepgrpo.curriculum.forest_records import NEVER, own_ids, tree_key
from deepgrpo.curriculum.header import saved_counts
from deepgrpo.curriculum.saved_rows import Saved
from deepgrpo.curriculum.weighted import weighted_sample
from deepgrpo.types import Ids, Problem

CAP_BY = ("state", "prompt")


@dataclasses.dataclass(frozen=True, eq=False)
class FlatEntry:
    """One state.

    handle: its number by arrival. state_ids: int32[len], prompt and locked prefix. initial_p_hat: success rate to assume before
    it was rolled out. last_k_succ, last_k_total: of its latest group; None: never rolled out. last_used_step: -1 for never.
    """

    handle: int
    problem: Problem
    state_ids: Ids
    initial_p_hat: float
    created_step: int
    last_k_succ: int | None = None
    last_k_total: int | None = None
    last_used_step: int = NEVER


class FlatPool:
    """Entries in order of arrival; they stay, whatever became of them."""

    def __init__(
        self,
        *,
        max_per_prompt: int = 3,
        w_floor_hard: float = 0.2,
        w_floor_mastered: float = 0.01,
        cap_by: str = "state",
        max_size: int = 0,
    ):
        """Args:
          max_per_prompt: entries of one key that a draw considers, the heaviest.
          w_floor_hard, w_floor_mastered: weight of an entry whose latest group failed, succeeded as a whole.
          cap_by: the key: "state" (equal states only, the reference) or "prompt" (all states of one problem).
          max_size: newest entries kept; 0: no bound (the reference).

        Raises:
          ValueError: a number is out of range, or `cap_by` is neither.
        """
        numbers = {"w_floor_hard": w_floor_hard, "w_floor_mastered": w_floor_mastered, "max_size": max_size}
        wrong = [f"{name} must be >= 0, got {value}" for name, value in numbers.items() if value < 0]
        if max_per_prompt <= 0:
            wrong.append(f"max_per_prompt must be positive, got {max_per_prompt}")
        if cap_by not in CAP_BY:
            wrong.append(f"cap_by must be one of {', '.join(CAP_BY)}, got {cap_by!r}")
        if wrong:
            raise ValueError(f"flat pool: {'; '.join(wrong)}")
        self._max_per_prompt, self._cap_by, self._max_size = max_per_prompt, cap_by, max_size
        self._w_floor_hard, self._w_floor_mastered = w_floor_hard, w_floor_mastered
        self._entries: dict[int, FlatEntry] = {}
        self._groups: dict[bytes, list[int]] = {}  # key -> handles, both in order of arrival
        self._counts = {"next_handle": 0, "dropped_capacity": 0}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, problem: Problem, state_ids: Ids, initial_p_hat: float = 0.5, step: int = NEVER) -> int:
        """Appends a state; returns its handle."""
        handle = self._counts["next_handle"]
        self._counts["next_handle"] += 1
        self._insert(FlatEntry(handle, problem, own_ids(state_ids), initial_p_hat, step))
        while self._max_size and len(self._entries) > self._max_size:
            self._drop(next(iter(self._entries)))
            self._counts["dropped_capacity"] += 1
        return handle

    def _key(self, entry: FlatEntry) -> bytes:
        return tree_key(entry.state_ids if self._cap_by == "state" else entry.problem.prompt_ids)

    def _insert(self, entry: FlatEntry) -> None:
        self._entries[entry.handle] = entry
        self._groups.setdefault(self._key(entry), []).append(entry.handle)

    def _drop(self, handle: int) -> None:
        key = self._key(self._entries.pop(handle))
        self._groups[key].remove(handle)
        if not self._groups[key]:
            del self._groups[key]

    def record_usage(self, handle: int, k_succ: int, k_total: int, step: int) -> FlatEntry | None:
        """Notes an entry's latest group; returns the entry as it is now, None if there is no such."""
        if (entry := self._entries.get(handle)) is None:
            return None
        entry = dataclasses.replace(entry, last_k_succ=k_succ, last_k_total=k_total, last_used_step=step)
        self._entries[handle] = entry
        return entry

    def weight(self, entry: FlatEntry) -> float:
        """4 p (1 - p) of the success rate p: of the latest group, with floors at both ends; before it, of the prior's."""
        if entry.last_k_succ is None or not entry.last_k_total:
            return max(1e-5, 4 * entry.initial_p_hat * (1 - entry.initial_p_hat))
        if entry.last_k_succ == 0:
            return self._w_floor_hard
        if entry.last_k_succ == entry.last_k_total:
            return self._w_floor_mastered
        rate = entry.last_k_succ / entry.last_k_total
        return 4 * rate * (1 - rate)

    def get(self, handle: int) -> FlatEntry | None:
        return self._entries.get(handle)

    def entries(self) -> list[FlatEntry]:
        return list(self._entries.values())

    def candidates(self, random: np.random.Generator) -> list[FlatEntry]:
        """Group by group, the heaviest entries of each that is over the cap, ties broken at random."""
        chosen: list[FlatEntry] = []
        for handles in self._groups.values():
            group = [self._entries[handle] for handle in handles]
            if len(group) > self._max_per_prompt:
                shuffled = [group[i] for i in random.permutation(len(group)).tolist()]
                group = sorted(shuffled, key=self.weight, reverse=True)[: self._max_per_prompt]
            chosen += group
        return chosen

    def sample(self, n: int, random: np.random.Generator) -> list[FlatEntry]:
        """Draws min(n, candidates) different entries by weight; uniformly if no candidate has any. They stay in the pool."""
        if n <= 0 or not self._entries:
            return []
        candidates = self.candidates(random)
        weights = np.array([self.weight(entry) for entry in candidates])
        if weights.sum() <= 0:
            weights = np.ones(len(candidates))
        return [candidates[i] for i in weighted_sample(weights, n, random)]

    def metrics(self) -> dict[str, float]:
        entries = self.entries()
        used = sum(entry.last_k_succ is not None for entry in entries)
        counts = {"size": len(entries), "unique_prompts": len(self._groups), "used_entries": used}
        counts["dropped_capacity"] = self._counts["dropped_capacity"]
        if entries:
            rates = [entry.last_k_succ / entry.last_k_total for entry in entries if entry.last_k_total]
            lengths = [len(entry.state_ids) for entry in entries]
            counts |= {"avg_p_hat_tried": _mean(rates), "avg_aug_prompt_len": _mean(lengths)}
            counts |= {"max_aug_prompt_len": max(lengths), "min_aug_prompt_len": min(lengths)}
        return {f"synthetic_pool/{name}": float(value) for name, value in counts.items()}

    def saved(self) -> Saved:
        """Everything that `load` needs. Entries never change, so the files can be written after the lock is released."""
        return Saved(self.entries(), dict(self._counts))

    def load(self, saved: Saved) -> None:
        self._entries, self._groups, self._counts = {}, {}, saved_counts(saved.numbers, dict.fromkeys(self._counts, 0))
        handles = [entry.handle for entry in saved.rows]
        if len(set(handles)) < len(handles) or max(handles, default=-1) >= self._counts["next_handle"]:
            raise ValueError("flat_pool.json: a handle comes twice, or the next one is in use")
        for entry in saved.rows:
            self._insert(entry)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
