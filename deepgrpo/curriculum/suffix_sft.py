"""Steps on the teacher's suffixes alone, beside the policy-gradient steps: the sft arm, in one of two schedules.

epoch_local: at the end of each pass over the data, and of the run, the states that it brought are trained on several times over,
in batches of distinct trees. post_step: every training step is followed by a batch or more of the least recently trained states.
Rows: prompt = state, response = suffix; the optimizer is the teacher's own (`Learner.update_teacher`).
"""

import collections
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import ml_collections
import numpy as np

from deepgrpo.curriculum.base import Curriculum, named
from deepgrpo.curriculum.forest import SuffixEntry
from deepgrpo.learner.objective import TEACHER
from deepgrpo.learner.rows import Row
from deepgrpo.learner.training_rows import closed, suffix_row

PASSES = 5  # epoch_local: over the states that an epoch brought
MAX_BATCHES = 1  # post_step: most optimizer steps on suffixes after a training step
T = TypeVar("T")
Update = Callable[[Sequence[Row], int], tuple[dict[str, float], list[bool]]]  # `Learner.update_teacher`
OF_EPOCH = ("trees_cleaned_after_clear", "events_cleared", "events_cleared_pending", "events_cleared_in_flight", "snapshot_nodes")
OF_EPOCH += ("snapshot_trees", "sample_batches", "sampled_entries", "dropped_entries", "optimizer_steps", "recorded_entries")
OF_EPOCH += ("record_skipped_entries", "record_skipped_optimizer_steps", "stale_entries", "actor_optimizer_steps")
OF_EPOCH += ("actor_lr_scheduler_steps", "actor_post_sft_optimizer_steps", "waiting_for_full_batch", "needed_for_next_batch")
OF_STEP = ("sampled_entries", "train_eligible_entries", "partial_batch_entries", "waiting_for_full_batch", "recorded_entries")
OF_STEP += ("needed_for_next_batch", "matured_entries", "teacher_tail_filtered", "non_sft_teacher_filtered")
OF_STEP += ("stale_teacher_filtered", "record_skipped_entries", "record_skipped_optimizer_steps")


class SuffixSft:
    """Chooses suffixes of a forest, has them trained on, and credits their states.

    steps: optimizer steps that the last `train` made.
    """

    def __init__(self, config: ml_collections.ConfigDict, curriculum: Curriculum | None, update: Update, stop_ids: Sequence[int]):
        """Args:
        config: the whole configuration. curriculum: a forest, whose suffixes are trained on, if the schedule is not "off".
        update: trains on rows (`Learner.update_teacher`). stop_ids: of the student; the first one closes a suffix.
        """
        teacher = config.optim.teacher
        self.steps = 0
        self._pool, self._update, self._schedule = curriculum, update, config.curriculum.suffix_sft
        self._batch, self._partial = teacher.mini_batch_rows, teacher.allow_partial  # states of an optimizer step
        # With schedule "off", teacher rows that the training step has already get optimizer steps of their own.
        self._separate_steps = config.objective.teacher_update == "post_ppo"
        self._stop_ids, self._limit = tuple(stop_ids), config.rollout.max_model_len
        self._window_start = 1  # first training step whose states the next phase trains on
        self._ended = 0  # passes over the data whose end was noticed

    def train(self, rows: Sequence[Row], step: int, ended: int, last: bool) -> dict[str, float]:
        """To be called once a training step, after its policy-gradient steps.

        Args:
          rows: of the step. ended: passes over the data that are over by now. last: the run ends with this step.

        Returns:
          Metrics: `prefix_suffix_sft/*`, `epoch_suffix_sft/*` when a phase was due, those of the optimizer steps.
        """
        self.steps = 0
        if self._schedule == "off":
            own = [row for row in rows if row.source == TEACHER] if self._separate_steps else []
            return self._steps(own, step)[0] if own else {}
        begun = time.monotonic()
        metrics, due = self._readiness(), ended > self._ended or last
        if self._schedule == "post_step":
            metrics |= self._after_step(step)
        elif due:
            metrics |= self._after_epoch(step, ended)
        self._ended = ended
        metrics["sft/optimizer_steps"] = float(self.steps)
        passes = dict.fromkeys(("timing_s/epoch_suffix_sft_old_log_prob", "timing_s/epoch_suffix_sft_ref"), 0.0)  # there are none
        return metrics | passes | {"timing_s/epoch_suffix_sft_update_actor": time.monotonic() - begun}

    def state(self) -> dict[str, int]:
        """A JSON-serialisable position in the schedule."""
        return {"window_start": self._window_start, "ended": self._ended}

    def restore(self, state: dict[str, int]) -> None:
        self._window_start, self._ended = state["window_start"], state["ended"]

    #### The schedules

    def _after_epoch(self, step: int, ended: int) -> dict[str, float]:
        """Freezes the states made since the last phase, clears the teacher's queue, trains on full batches of distinct trees."""
        entries, cleared = self._pool.freeze_sft_epoch(self._window_start, step)
        seen = collections.Counter({f"events_{name}": n for name, n in cleared.items()})
        seen["trees_cleaned_after_clear"] = self._pool.cleanup()
        seen["snapshot_nodes"], trees = len(entries), len({entry.tree for entry in entries})
        seen["snapshot_trees"], seen["waiting_for_full_batch"] = trees, int(trees < self._batch)
        seen["needed_for_next_batch"] = max(0, self._batch - trees)
        parts: list[dict[str, float]] = []
        for _, chosen in epoch_sft_minibatches([(entry.tree, entry) for entry in entries], self._batch, PASSES):
            seen["sample_batches"] += 1
            seen["sampled_entries"] += len(chosen)
            if len(self._trainable(chosen)) < len(chosen):
                seen["stale_entries"] += len(chosen)
                seen["record_skipped_entries"] += len(chosen)
                continue
            self._pool.mark_sft([entry.node for entry in chosen], step)
            parts.append(self._train_on(chosen, step, seen))
        seen["dropped_entries"] = max(0, len(entries) * PASSES - seen["sampled_entries"])
        seen["optimizer_steps"] = seen["actor_post_sft_optimizer_steps"] = self.steps
        metrics = named("epoch_suffix_sft", {name: seen[name] for name in OF_EPOCH})
        epoch = ended - 1 if ended > self._ended else ended  # over, or cut short by the run's end
        about = {"enabled": 1, "epoch": epoch, "epoch_start_step": self._window_start, "epoch_end_step": step}
        about |= {"passes": PASSES, "train_chunk_size": self._batch}
        self._window_start = step + 1
        return metrics | named("epoch_suffix_sft", about) | _means(parts)

    def _after_step(self, step: int) -> dict[str, float]:
        """Trains on as many full batches of distinct trees as there are, up to the cap."""
        ready, seen = self._pool.ready_counts()["sft_trees"], collections.Counter()
        n = min(MAX_BATCHES, ready // self._batch) * self._batch
        if not n:
            seen["waiting_for_full_batch"], seen["needed_for_next_batch"] = 1, self._batch - ready
            n = seen["partial_batch_entries"] = ready if self._partial else 0
        chosen = self._pool.sample_sft(n, step)
        usable = self._trainable(chosen)
        kept = usable if self._partial else usable[: len(usable) - len(usable) % self._batch]
        seen["sampled_entries"], seen["train_eligible_entries"] = len(chosen), len(kept)
        seen["stale_teacher_filtered"], seen["teacher_tail_filtered"] = len(chosen) - len(usable), len(usable) - len(kept)
        parts = [self._train_on(kept, step, seen)] if kept else []
        return named("prefix_suffix_sft", {name: seen[name] for name in OF_STEP}) | _means(parts)

    #### What they share

    def _readiness(self) -> dict[str, float]:
        """`prefix_suffix_sft/*` at a step's end; a schedule that trains now overwrites what it does."""
        ready, balanced = self._pool.ready_counts(), self._pool.ready_counts(1)
        about = {
            "ready_trees": ready["sft_trees"],
            "ready_nodes": ready["sft_nodes"],
            "balanced_ready_nodes": balanced["sft_nodes"],
            "max_nodes_per_tree_per_step": 1,
            "train_chunk_size": self._batch,
            "partial_batch_enabled": self._partial,
            "schedule_epoch_local": self._schedule == "epoch_local",
            "pending_trees": ready["sft_trees"] % self._batch,
            "pending_nodes": balanced["sft_nodes"] % self._batch,
        }
        return named("prefix_suffix_sft", dict.fromkeys(OF_STEP, 0) | about)

    def _trainable(self, entries: Sequence[SuffixEntry]) -> list[SuffixEntry]:
        """Those whose state is still to be learned, and whose row the learner can hold."""
        fit = [e for e in entries if len(e.state_ids) + len(closed(e.suffix_ids, self._stop_ids)) <= self._limit]
        return [entry for entry in fit if self._pool.is_sft_trainable(entry.node)]

    def _train_on(self, entries: Sequence[SuffixEntry], step: int, seen: collections.Counter) -> dict[str, float]:
        """Trains on the entries; credits their states if every optimizer step changed the policy."""
        rows = [suffix_row(e.state_ids, e.suffix_ids, e.reward, self._stop_ids, f"{step}:suffix:{e.node}") for e in entries]
        metrics, done = self._steps(rows, step)
        if done and all(done):
            seen["recorded_entries"] += sum(self._pool.record_sft(entry.node, step) for entry in entries)
        else:
            seen["record_skipped_entries"] += len(entries)
            seen["record_skipped_optimizer_steps"] += max(1, done.count(False))
        return metrics

    def _steps(self, rows: Sequence[Row], step: int) -> tuple[dict[str, float], list[bool]]:
        metrics, done = self._update(rows, step)
        self.steps += sum(done)
        return metrics, done


def _means(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the metrics of several updates: sums of counts, means of the rest."""
    values = {key: [part[key] for part in parts if key in part] for part in parts for key in part}
    return {key: float(np.sum(v) if key.endswith("_steps") else np.mean(v)) for key, v in values.items()}


def epoch_sft_minibatches(
    snapshot: Sequence[tuple[Hashable, T]], mini_batch_size: int, epoch_passes: int
) -> Iterator[tuple[int, list[T]]]:
    """Yields (pass, mini-batch) from a frozen snapshot of (tree, node) pairs.

    Every batch is full and has nodes of distinct trees. Within a pass each node is used at most once: a ring of trees is walked,
    taking one node of each tree that still has one, from where the last batch stopped; the pass ends when fewer than
    `mini_batch_size` trees have nodes left, and what they still have is dropped.
    """
    groups: dict[Hashable, list[T]] = {}
    for tree, node in snapshot:
        groups.setdefault(tree, []).append(node)
    for epoch_pass in range(epoch_passes):
        ring = collections.deque(collections.deque(nodes) for nodes in groups.values())  # only trees with nodes left
        while len(ring) >= mini_batch_size:
            trees = [ring.popleft() for _ in range(mini_batch_size)]
            yield epoch_pass, [nodes.popleft() for nodes in trees]
            ring.extend(nodes for nodes in trees if nodes)
