"""Branching from the student's own responses: in the same step, or from a buffer in later ones. No teacher takes part.

A failed response is cut into segments, some of the places between them are chosen (`pivots`), and each is continued a few times.
Continuations are groups of the stream "branch": their advantages are relative to each other alone, and the tokens before them are
prompt, never trained again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.base import NEVER, STATES, STREAM, Buffer, Curriculum, State, check_step, frozen_ids, generator, named
from deepgrpo.curriculum.pivots import PIVOTS, Pivot, PivotModel, candidates, create_partition
from deepgrpo.curriculum.saved import Saved
from deepgrpo.types import Group, Ids, Problem, Prompt, as_ids

MAX_SIZE = 10000  # newest points kept in the buffer
MAX_AGE = 8  # steps after which a buffered point is dropped
MIN_REMAINING_RATIO = 0.1  # of the context, room that a buffered point must leave


def is_branch(group: Group) -> bool:
    return group.prompt.stream == STREAM


@dataclasses.dataclass(frozen=True, eq=False)
class BranchPoint:
    """A place to branch, with what to continue there.

    state_ids: int32[len], prompt and the response up to there. group_id: of the rollouts that the response was one of.
    index, chain_length, kept: see `pivots.Pivot`. step: at which it was added, set by the buffer.
    """

    problem: Problem
    group_id: str
    state_ids: Ids
    index: int
    chain_length: int
    kept: int
    step: int = NEVER

    @property
    def pivot(self) -> Pivot:
        return Pivot(self.index, self.chain_length, self.kept)


class Branches(Curriculum):
    """What both forms share: where failed responses are branched, and what is learned from it."""

    branches = True
    only_failures = True  # the reference can also branch what succeeded
    min_index = 0  # 1: never at the prompt itself

    def __init__(self, config: ml_collections.ConfigDict):
        super().__init__(config)
        self.max_model_len, self.points_per_response = config.rollout.max_model_len, config.branches.n_branch_points
        self.partition = create_partition(config)
        self.model = PivotModel()

    def points(self, groups: Sequence[Group], step: int) -> list[BranchPoint]:
        """Branch points of the data set's groups, response by response. One without a verdict has none: nobody knows whether it
        failed. Called under the lock."""
        found = []
        for i, group in enumerate(groups):
            if group.prompt.injected:
                continue
            for j, rollout in enumerate(group.rollouts):
                if rollout.reward is None or (self.only_failures and rollout.grade.succeeds(self.threshold)):
                    continue
                response = rollout.completion.marked_ids
                segments = self.partition.segments(response)
                open_to = candidates(len(group.prompt.ids), segments, self.max_model_len, min_index=self.min_index)
                random = np.random.default_rng((self.seed, step, PIVOTS, i, j))
                for pivot in self.model.choose(open_to, self.points_per_response, random):
                    state = as_ids(np.concatenate([group.prompt.ids, response[: pivot.kept]]))
                    place = dataclasses.astuple(pivot)
                    found.append(BranchPoint(group.prompt.problem, group.prompt.group_id, state, *place))
        return found

    def learn(self, groups: Sequence[Group]) -> None:
        """Tells the model what a step's branches came to, and has it fitted anew. Called under the lock."""
        for group in filter(is_branch, groups):
            k_succ, _ = group.successes(self.threshold)
            if group.judged or k_succ:
                self.model.observe(group.prompt.node.ratio, k_succ > 0)
        self.model.refit()

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Returns what a step's branches came to: points continued, the share of them with a success and with a contrast, mean
        position."""
        check_step(step)
        with self.lock:
            self.learn(groups)
        judged = [group for group in groups if is_branch(group) and group.judged]
        values = {"points": len(judged)}
        if judged:
            contrasts = [len({rollout.reward for rollout in group.verdicts()}) > 1 for group in judged]
            values |= {
                "recovered_share": sum(group.successes(self.threshold)[0] > 0 for group in judged) / len(judged),
                "contrast_share": sum(contrasts) / len(judged),
                "avg_position_ratio": sum(group.prompt.node.ratio for group in judged) / len(judged),
            }
        return named("branching", values)

    def metrics(self) -> Mapping[str, float]:
        with self.lock:
            return self.model.metrics()

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        return {}, {"pivot_model": self.model.state()}

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        self.model.restore(fields["pivot_model"])


class InlineBranches(Branches):
    """Branches of this step's responses, in this step."""

    name = "branches_inline"

    def __init__(self, config: ml_collections.ConfigDict):
        super().__init__(config)
        self.branches_per_point = config.branches.branches_per_point

    @classmethod
    def branch_groups(cls, config: ml_collections.ConfigDict, failed: float) -> tuple[float, int]:
        return failed * config.branches.n_branch_points, config.branches.branches_per_point

    def expand(self, groups: Sequence[Group], step: int) -> list[Prompt]:
        check_step(step)
        if any(map(is_branch, groups)):
            return []
        with self.lock:
            points = self.points(groups, step)
        return [
            Prompt(point.state_ids, point.problem, self.branches_per_point, f"{point.group_id}:branch:{i}", point.pivot, STREAM)
            for i, point in enumerate(points)
        ]


class BranchBuffer(Buffer):
    """Points that stay when they are drawn, each for so many steps."""

    prefix = "buffer"
    counters = ("refused_room", "dropped_age", "dropped_capacity")

    def __init__(
        self,
        max_model_len: int,
        *,
        max_size: int = MAX_SIZE,
        max_age: int = MAX_AGE,
        min_remaining_ratio: float = MIN_REMAINING_RATIO,
    ):
        super().__init__(max_size)
        self.max_age, self.max_state_len = max_age, max_model_len - int(max_model_len * min_remaining_ratio)

    def add(self, points: Sequence[BranchPoint], step: int) -> int:
        """Takes in the points of a step that leave room, then drops the old ones, then the oldest above the bound; returns how
        many entered. Also without points it drops; nothing else does."""
        roomy = [point for point in points if len(point.state_ids) <= self.max_state_len]
        self.counts["refused_room"] += len(points) - len(roomy)
        self.entries += [dataclasses.replace(point, state_ids=frozen_ids(point.state_ids), step=step) for point in roomy]
        fresh = [point for point in self.entries if step - point.step <= self.max_age]
        self.counts["dropped_age"] += len(self.entries) - len(fresh)
        self.entries = fresh
        self.drop_oldest()
        return len(roomy)

    def sample(self, n: int, random: np.random.Generator, strategy: str = "stratified") -> list[BranchPoint]:
        """Returns min(n, size) different points."""
        return [self.entries[i] for i in self.draw(n, random, strategy)]

    def metrics(self) -> dict[str, float]:
        if not self.entries:
            return super().metrics()
        ratio = sum(point.pivot.ratio for point in self.entries) / len(self.entries)
        values = {"unique_steps": len({point.step for point in self.entries}), "avg_position_ratio": ratio}
        return super().metrics() | named(self.prefix, values)


class BufferedBranches(Branches):
    """Branches of earlier steps' responses, drawn from a buffer; this step's are collected for later ones."""

    name, version = "branches", 2
    records = {"branch_buffer": BranchPoint}

    def __init__(self, config: ml_collections.ConfigDict):
        super().__init__(config)
        self.buffer = BranchBuffer(config.rollout.max_model_len)
        self.sample_size, self.branches_per_entry = self.branch_groups(config, 0)

    @classmethod
    def branch_groups(cls, config: ml_collections.ConfigDict, failed: float) -> tuple[float, int]:
        return config.branches.sample_size_per_step, config.branches.branches_per_entry

    def num_to_inject(self, batch_size: int) -> int:
        with self.lock:
            return min(self.sample_size, len(self.buffer))

    def sample(self, n: int, step: int) -> list[State]:
        """Draws points; they stay in the buffer."""
        check_step(step)
        with self.lock:
            points = self.buffer.sample(n, generator(self.seed, step, STATES))
        return [State(point.state_ids, point.problem, point.pivot, self.branches_per_entry, STREAM) for point in points]

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Learns from the continued points, then collects those of the main responses."""
        metrics = super().observe(groups, step)
        with self.lock:
            points = self.points(groups, step)
            self.buffer.add(points, step)
        counts = {"entries_sampled": sum(map(is_branch, groups)), "new_points_collected": len(points)}
        return metrics | named("buffer", counts)

    def metrics(self) -> Mapping[str, float]:
        with self.lock:
            return self.buffer.metrics() | self.model.metrics()

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        _, fields = super().saved()
        return {"branch_buffer": self.buffer.saved()}, fields

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        super().load(tables, fields)
        self.buffer.load(tables["branch_buffer"])
