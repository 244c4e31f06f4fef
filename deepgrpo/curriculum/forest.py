"""The forest as the training loop's curriculum (the method's default): groups in, hard states out.

Rules of the pool: `forest_pool`. Here: which groups of a step become which observations, and the metrics of a step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.config.forest_folder import Vocabulary, vocabulary_of_model, write_vocabulary
from deepgrpo.curriculum import forest_start
from deepgrpo.curriculum.base import Correction, Curriculum, Failure, State
from deepgrpo.curriculum.feedback import (
    check_failures,
    check_step,
    failures_for_teacher,
    injection_metrics,
    judged_groups,
    wanted_failures,
)
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Annotation, tree_key
from deepgrpo.learner.minibatch import injection_count
from deepgrpo.types import Group, Ids, Problem

IN_FLIGHT = 2  # failures of a tree that the teacher works on at once: a first answer may well serve its siblings


@dataclasses.dataclass
class _RootGroup:
    """The dataset groups of a step that share one prompt: the pool sees them as a single group."""

    problem: Problem  # of the first group that failed, if one did
    k_succ: int = 0
    k_total: int = 0
    failed: list[Ids] = dataclasses.field(default_factory=list)


class ForestCurriculum(Curriculum):
    """`base.Curriculum` on a `Forest`.

    Group by group, `observe` is atomic: between two of a step's groups the teacher's thread may be served.
    """

    def __init__(
        self,
        pool: Forest,
        *,
        threshold: float,
        failures: str = "all",
        injection_ratio: float = 0.25,
        strict_reference: bool = False,
        vocabulary: Vocabulary | None = None,
    ):
        """Args:
          threshold: success is reward > threshold.
          injection_ratio, strict_reference: see `minibatch.injection_count`.
          failures: of a group's failures send to the teacher "all", or "longest_prefix": the one with the longest right prefix.
          vocabulary: of the ids, saved beside them, so that the forest can be used elsewhere; None: not known.

        Raises:
          ValueError: `failures` is neither.
        """
        check_failures(failures)
        self.pool = pool
        self._threshold = threshold
        self._failures = failures
        self._ratio, self._strict = injection_ratio, strict_reference
        self._vocabulary = vocabulary
        self._cleaned_before_sampling = 0

    def ready(self) -> int:
        return self.pool.ready()

    def wanted(self, batch_size: int) -> int:
        return injection_count(batch_size, self._ratio, self.ready(), self._strict)

    def sample(self, n: int, step: int) -> list[State]:
        """Removes exhausted trees, then returns at most `n` states, one a tree.

        Raises:
          ValueError: `step` is negative (-1 means never).
        """
        check_step(step)
        self._cleaned_before_sampling = self.pool.cleanup()
        return self.pool.sample_rollout(n, step)

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Feeds a step's groups: injected ones to their nodes, dataset ones, merged by prompt, to the roots; then cleans up.

        Of the returned counts, `observations_recorded`, `events_added` and `nodes_retired` are of injected groups only.
        Rollouts without a verdict count neither as success nor as failure; a group with too few verdicts (`Group.judged`) and no
        failure is left out and counted: nothing is mastered on what is not known.

        Raises:
          ValueError: `failures` is "longest_prefix" and no failure of a group has a right prefix; or `step` is negative.
        """
        check_step(step)
        judged = judged_groups(groups, self._threshold, failing=True)
        seen = dict.fromkeys(("observations_recorded", "events_added", "nodes_retired", "root_events_added"), 0)
        seen |= dict.fromkeys(("root_groups_seen", "root_fail_groups", "root_success_groups"), 0)
        seen |= dict.fromkeys(("root_trees_created", "root_nodes_deactivated"), 0)
        for group, k_succ, k_total in judged:
            if group.prompt.injected:
                counts = self.pool.observe_node(group.prompt.node, k_succ, k_total, step, self._to_teacher(group))
                seen["observations_recorded"] += counts["observations_recorded"]
                seen["events_added"] += counts["events_added"]
                seen["nodes_retired"] += counts["node_retired"]
        for root in self._root_groups(judged):
            counts = self.pool.observe_root(root.problem, root.k_succ, root.k_total, step, root.failed or None)
            seen["root_groups_seen"] += 1
            seen["root_fail_groups" if root.k_succ < root.k_total else "root_success_groups"] += 1
            seen["root_events_added"] += counts["events_added"]
            seen["root_trees_created"] += counts["tree_created"]
            seen["root_nodes_deactivated"] += counts["root_deactivated"]
        seen["trees_cleaned"] = self.pool.cleanup()
        seen["groups_without_verdict"] = len(groups) - len(judged)
        return (
            {f"forest_pool/{name}_this_step": float(value) for name, value in seen.items()}
            | {"forest_pool/trees_cleaned_pre_sample": float(self._cleaned_before_sampling)}
            | self.pool.event_ages(step)
            | injection_metrics(groups, judged)
        )

    def _root_groups(self, judged: Sequence[tuple[Group, int, int]]) -> list[_RootGroup]:
        """Merges the dataset groups by their prompt, in order of first appearance."""
        merged: dict[bytes, _RootGroup] = {}
        for group, k_succ, k_total in judged:
            if not group.prompt.injected:
                problem = group.prompt.problem
                root = merged.setdefault(tree_key(problem.prompt_ids), _RootGroup(problem))
                failed = self._to_teacher(group)
                if failed and not root.failed:
                    root.problem = problem
                root.k_succ += k_succ
                root.k_total += k_total
                root.failed += failed
        return list(merged.values())

    def _to_teacher(self, group: Group) -> list[Ids]:
        """The responses of a group that the teacher is to correct."""
        rollouts = failures_for_teacher(group, self._threshold, self._failures)
        return [rollout.completion.ids for rollout in rollouts]

    def look_up(self, node: int) -> Mapping[str, Any]:
        return self.pool.look_up(node)

    def deepest(self, n: int) -> list[int]:
        return [row["node"] for row in self.pool.deeper_nodes(n)]

    def continuation(self, node: int) -> tuple[Ids, float | None] | None:
        return self.pool.continuation(node)

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        """Hands out at most `max_items` failures, at most one a tree."""
        return self.pool.dispatch_teacher(max_items, step)

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Returns the outcome's name (`Forest.teacher_result` lists them)."""
        annotation = None
        if correction is not None:
            annotation = Annotation(
                state_ids=np.concatenate([failure.state_ids, correction.prefix_ids]),
                suffix_ids=correction.suffix_ids,
                reward=correction.reward,
                failed_suffix_ids=correction.failed_suffix_ids,
            )
        return self.pool.teacher_result(failure.event, annotation, step)[0]

    def requeue(self, failure: Failure) -> None:
        self.pool.requeue(failure.event)

    def rest(self, failure: Failure) -> None:
        self.pool.rest(failure.event)

    def withdraw(self, failure: Failure) -> bool:
        return self.pool.withdraw(failure.event)

    def pending(self) -> int:
        return self.pool.pending()

    def metrics(self) -> Mapping[str, float]:
        return self.pool.metrics()

    def state(self, folder: str) -> None:
        self.pool.state(folder)
        if self._vocabulary is not None:
            write_vocabulary(folder, self._vocabulary)

    def restore(self, folder: str) -> None:
        self.pool.restore(folder)


def create(config: ml_collections.ConfigDict) -> ForestCurriculum:
    """Builds the curriculum from the whole configuration; not empty if `curriculum.start_from` names a forest."""
    pool = Forest(
        max_model_len=config.rollout.max_model_len,
        min_remaining_tokens=config.curriculum.min_remaining_tokens,
        max_events_per_parent=config.curriculum.max_events_per_parent,
        max_events=config.curriculum.max_events,
        max_nodes_per_tree=config.curriculum.max_nodes_per_tree,
        retire_after=config.curriculum.retire_after,
        most_in_flight=0 if config.strict_reference else IN_FLIGHT,
    )
    if config.curriculum.start_from:
        forest_start.fill(pool, config)
    return ForestCurriculum(
        pool,
        threshold=config.rewards.threshold,
        failures=wanted_failures(config),
        injection_ratio=config.curriculum.injection_ratio,
        strict_reference=config.strict_reference,
        vocabulary=vocabulary_of_model(config.model.path) if config.model.path else None,
    )
