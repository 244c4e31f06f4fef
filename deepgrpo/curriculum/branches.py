"""Branching from the student's own responses: in the same step, or from a buffer in later ones. No teacher takes part.

A response is cut into segments (`partition`), some of the places between them are chosen (`pivots`), and each is continued a few
times. Continuations are groups of the stream "branch": their advantages are relative to each other alone, and the tokens before
them are prompt, never trained again.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence

import ml_collections
import numpy as np

from deepgrpo.curriculum import partition as partition_lib
from deepgrpo.curriculum import pivots as pivots_lib
from deepgrpo.curriculum.base import Curriculum, State
from deepgrpo.curriculum.branch_buffer import BranchBuffer, BranchPoint
from deepgrpo.curriculum.feedback import check_step
from deepgrpo.curriculum.header import as_saved, read_header, write_header
from deepgrpo.curriculum.partition import Partition
from deepgrpo.curriculum.pivots import PIVOTS, PivotModel, candidates
from deepgrpo.curriculum.saved_rows import read_saved, write_saved
from deepgrpo.curriculum.weighted import STATES, generator
from deepgrpo.types import Group, Prompt, as_ids

INLINE, BUFFERED, VERSION = "branches_inline", "branches", 1
STREAM = "branch"
MAX_AGE = 8  # steps after which a buffered place to branch is dropped


def is_branch(group: Group) -> bool:
    return group.prompt.stream == STREAM


@dataclasses.dataclass(frozen=True)
class Finder:
    """Finds the branch points of a step's main responses.

    threshold: success is reward > threshold. only_on_low_quality: only failures are branched. n_branch_points: of a response.
    min_pivot_index: see `pivots.candidates`.
    """

    partition: Partition
    model: PivotModel
    seed: int
    threshold: float
    max_model_len: int
    only_on_low_quality: bool = True
    n_branch_points: int = 1
    min_pivot_index: int = 0

    def points(self, groups: Sequence[Group], step: int) -> list[BranchPoint]:
        """Branch points of the data set's groups, response by response. One without a verdict has none: nobody knows whether it
        failed."""
        found = []
        for i, group in enumerate(groups):
            if group.prompt.injected:
                continue
            for j, rollout in enumerate(group.rollouts):
                if rollout.reward is None or (self.only_on_low_quality and rollout.grade.succeeds(self.threshold)):
                    continue
                response = rollout.completion.ids
                segments = self.partition.segments(response)
                open_to = candidates(len(group.prompt.ids), segments, self.max_model_len, min_index=self.min_pivot_index)
                random = np.random.default_rng((self.seed, step, PIVOTS, i, j))
                for pivot in self.model.choose(open_to, self.n_branch_points, random):
                    state = as_ids(np.concatenate([group.prompt.ids, response[: pivot.kept]]))
                    place = dataclasses.astuple(pivot)
                    found.append(BranchPoint(group.prompt.problem, group.prompt.group_id, state, *place))
        return found

    def learn(self, groups: Sequence[Group]) -> None:
        """Tells the model what a step's branches came to, and has it fitted anew."""
        for group in filter(is_branch, groups):
            k_succ, _ = group.successes(self.threshold)
            if group.judged or k_succ:
                self.model.observe(group.prompt.node.ratio, k_succ > 0)
        self.model.refit()


class InlineBranches(Curriculum):
    """Branches of this step's responses, in this step."""

    def __init__(self, finder: Finder, *, branches_per_point: int = 8, first_branches: int = 0):
        """Args:
        first_branches: so many continuations of a point first, the others only where the rewards of these differ; 0: all at once.
        """
        self.finder = finder
        self._all, self._first = branches_per_point, first_branches or branches_per_point
        self._lock = threading.Lock()

    def expand(self, groups: Sequence[Group], step: int) -> list[Prompt]:
        """First the branches of the main responses; asked again with their groups, what is left of those that have a contrast."""
        check_step(step)
        begun = [group for group in groups if is_branch(group)]
        if begun:
            open_to = [group.prompt for group in begun if group.prompt.n < self._all and has_contrast(group)]
            return [dataclasses.replace(prompt, n=self._all - prompt.n) for prompt in open_to]
        with self._lock:
            points = self.finder.points(groups, step)
        return [
            Prompt(point.state_ids, point.problem, self._first, f"{point.group_id}:branch:{i}", point.pivot, STREAM)
            for i, point in enumerate(points)
        ]

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        check_step(step)
        with self._lock:
            self.finder.learn(groups)
        return branching_metrics(groups, self.finder.threshold)

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            return self.finder.model.metrics()

    def state(self, folder: str) -> None:
        with self._lock:
            model = self.finder.model.state()
        write_header(folder, INLINE, VERSION, {"pivot_model": model})

    def restore(self, folder: str) -> None:
        header = read_header(folder, INLINE, VERSION)
        with as_saved(folder), self._lock:
            self.finder.model.restore(header["pivot_model"])


class BufferedBranches(Curriculum):
    """Branches of earlier steps' responses, drawn from a buffer; this step's are collected for later ones."""

    def __init__(
        self,
        finder: Finder,
        buffer: BranchBuffer,
        *,
        sample_size: int = 32,
        branches_per_entry: int = 4,
        strategy: str = "stratified",
    ):
        """Args:
          sample_size: points that a step continues. branches_per_entry: continuations of each.
          strategy: see `BranchBuffer.sample`.

        Raises:
          ValueError: fewer than two continuations, which have no advantage.
        """
        if branches_per_entry < 2:
            raise ValueError(f"branches.branches_per_entry must be at least 2, got {branches_per_entry}")
        self.finder, self.buffer = finder, buffer
        self._sample_size, self._n, self._strategy = sample_size, branches_per_entry, strategy
        self._lock = threading.Lock()

    def wanted(self, batch_size: int) -> int:
        with self._lock:
            return min(self._sample_size, len(self.buffer))

    def sample(self, n: int, step: int) -> list[State]:
        """Draws points; they stay in the buffer."""
        check_step(step)
        with self._lock:
            points = self.buffer.sample(n, self._strategy, generator(self.finder.seed, step, STATES))
        return [State(point.state_ids, point.problem, point.pivot, self._n, STREAM) for point in points]

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Learns from the continued points, then collects those of the main responses."""
        check_step(step)
        with self._lock:
            self.finder.learn(groups)
            points = self.finder.points(groups, step)
            self.buffer.add(points, step)
        counts = {"entries_sampled": sum(map(is_branch, groups)), "new_points_collected": len(points)}
        return {f"buffer/{name}": float(value) for name, value in counts.items()} | branching_metrics(
            groups, self.finder.threshold
        )

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            return self.buffer.metrics() | self.finder.model.metrics()

    def state(self, folder: str) -> None:
        with self._lock:
            model, points = self.finder.model.state(), self.buffer.saved()
        write_saved(folder, "branch_buffer", points)
        write_header(folder, BUFFERED, VERSION, {"pivot_model": model})

    def restore(self, folder: str) -> None:
        header = read_header(folder, BUFFERED, VERSION)
        points = read_saved(folder, "branch_buffer", BranchPoint)
        with as_saved(folder), self._lock:
            self.finder.model.restore(header["pivot_model"])
            self.buffer.load(points)


def has_contrast(group: Group) -> bool:
    """Whether the rewards of a group differ."""
    return len({rollout.reward for rollout in group.verdicts()}) > 1


def branching_metrics(groups: Sequence[Group], threshold: float) -> dict[str, float]:
    """What a step's branches came to: points continued, the share of them with a success and with a contrast, mean position."""
    judged = [group for group in groups if is_branch(group) and group.judged]
    values = {"points": float(len(judged))}
    if judged:
        successes = [group.successes(threshold)[0] > 0 for group in judged]
        values |= {
            "recovered_share": sum(successes) / len(judged),
            "contrast_share": sum(map(has_contrast, judged)) / len(judged),
            "avg_position_ratio": sum(group.prompt.node.ratio for group in judged) / len(judged),
        }
    return {f"branching/{name}": value for name, value in values.items()}


def create_finder(config: ml_collections.ConfigDict) -> Finder:
    keys = config.branches
    return Finder(
        partition_lib.create(config),
        pivots_lib.create(config),
        config.seed,
        config.rewards.threshold,
        config.rollout.max_model_len,
        n_branch_points=keys.n_branch_points,
    )


def create_inline(config: ml_collections.ConfigDict) -> InlineBranches:
    """Builds the curriculum from the whole configuration."""
    return InlineBranches(create_finder(config), branches_per_point=config.branches.branches_per_point)


def create_buffered(config: ml_collections.ConfigDict) -> BufferedBranches:
    """Builds the curriculum from the whole configuration."""
    keys = config.branches
    buffer = BranchBuffer(max_model_len=config.rollout.max_model_len, max_age=MAX_AGE)
    return BufferedBranches(
        create_finder(config),
        buffer,
        sample_size=keys.sample_size_per_step,
        branches_per_entry=keys.branches_per_entry,
    )
