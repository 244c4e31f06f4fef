"""The interface of every curriculum: which states to roll out, what was learned from them, and work for the teacher.

The training loop calls `num_to_inject`, `sample`, `expand`, `observe`, `metrics`, `state`, `restore` and never asks which
curriculum it has. The teacher's worker (another thread) calls `pending`, `dispatch`, `resolve`, `requeue`, `rest` and `withdraw`.
Every method is atomic. Also here: how the pools read a step's groups, and their random choices, each a function of a numpy
Generator made from (seed, step, purpose, index).
"""

import dataclasses
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import ml_collections
import numpy as np

from deepgrpo.curriculum import saved as files
from deepgrpo.curriculum.saved import Saved
from deepgrpo.types import Group, Ids, Problem, Prompt, Rollout, as_ids, marked, marks, plain

NEVER = -1  # a step at which nothing happened yet
MAX_EVENTS_PER_STATE = 8  # newest failures that wait for the teacher, of one state; strict_reference: no bound
MAX_EVENTS = 8192  # and in all, the oldest dropped first
STATES, FAILURES = 0x57A7E, 0xFA11  # purposes of random draws: states to roll out; failures for the teacher
STREAM = "branch"  # of continuations that the objective weighs apart
Judged = tuple[Group, int, int]  # a group with a verdict, its successes, its rollouts with a verdict


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A state to roll out: original prompt ids followed by a locked prefix.

    ids: int32[len], perhaps with marks (types.marked). node: the curriculum's handle, handed back in `Prompt.node` by `observe`.
    n: rollouts to make; None: curriculum.rollout_n. stream: see `types.Prompt`.
    """

    ids: Ids
    problem: Problem
    node: Any
    n: int | None = None
    stream: str = "main"


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """One failed rollout on its way to the teacher.

    failure_id: the curriculum's handle, handed back to `resolve`.
    state_ids: int32[len], the state that the rollout started from (prompt and locked prefix).
    response_ids: int32[len], what the student sampled. Both perhaps with marks (types.marked).
    step: the step that produced it.
    """

    failure_id: Any
    problem: Problem
    state_ids: Ids
    response_ids: Ids
    step: int


@dataclasses.dataclass(frozen=True, eq=False)
class Correction:
    """A verified correction of one failure.

    prefix_ids: int32[len], a literal slice of the failure's response ids (curriculum.cut=solution: of the teacher's solution):
      state_ids ++ prefix_ids is the new hard state.
    suffix_ids: int32[len], the teacher's tokens after it, closed by a stop id; None if it wrote none.
    reward: the grader's reward of the corrected answer.
    failed_suffix_ids: int32[len], what the student had written instead.
    """

    prefix_ids: Ids
    suffix_ids: Ids | None
    reward: float | None
    failed_suffix_ids: Ids


class Curriculum:
    """A curriculum overrides what it needs; left as it is, it has neither states nor a teacher: plain GRPO.

    The class attributes say what a pool can do; configuration rules, planner and training loop read them and know no names.
    """

    name = "none"  # in curriculum.pool, and in saved folders
    version = 1  # of the saved format
    by_ratio = False  # its states are a fraction of the dataset's prompts (curriculum.injection_ratio) and have a root
    keeps_suffixes = False  # the teacher's continuation of a state is kept, so that it can be trained on
    knows_age = False  # it knows when a state was made
    branches = False  # its states are continued in the stream "branch", on top of the dataset's prompts
    asks_teacher = False  # failures go to the teacher
    keys: ClassVar[tuple[str, ...]] = ()  # keys of the section `curriculum` that not every pool reads, and this one does
    records: ClassVar[dict[str, type]] = {}  # name of each saved table: the class of its rows

    def __init__(self, config: ml_collections.ConfigDict):
        """`config` is the whole configuration."""
        self.section, self.seed, self.strict = config.curriculum, config.seed, config.strict_reference
        self.threshold = config.rewards.threshold  # success is a reward above it
        # Without a teacher nothing is queued for one that never comes.
        self.failures = self.section.failures if config.teacher.enabled else "none"
        self.max_state_len = config.rollout.max_model_len - self.section.min_remaining_tokens
        self.lock = threading.Lock()

    @classmethod
    def branch_groups(cls, config: ml_collections.ConfigDict, failed: float) -> tuple[float, int]:
        """Groups of branches of a step, if `failed` of the dataset's responses fail, and rollouts of each; for planning."""
        return 0, 0

    #### The training loop

    def ready(self) -> int:
        """Number of states that could be rolled out now."""
        return 0

    def num_to_inject(self, batch_size: int) -> int:
        """Number of states that a step with `batch_size` dataset prompts is to get (at most those that are ready)."""
        return injection_count(batch_size, self.section.injection_ratio, self.ready(), self.strict)

    def sample(self, n: int, step: int) -> list[State]:
        """Returns at most `n` states for `step` and stamps them as used."""
        return []

    def expand(self, groups: Sequence[Group], step: int) -> list[Prompt]:
        """Further prompts to roll out in the same step, chosen from its groups so far; `observe` sees their groups too.

        Asked again with their groups among the others, until it returns none. A prompt with the group_id of a group so far adds
        rollouts to that group.
        """
        return []

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Takes in the scored groups of a step, dataset and injected; returns the step's metrics (full names)."""
        return {}

    def continuation(self, node: Any) -> tuple[Ids, float | None] | None:
        """The teacher's verified (suffix_ids, reward) of an injected state, None if there is none. Asked before `observe`."""
        return None

    #### The teacher's thread

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        """Hands out at most `max_items` failures for the teacher; each stays in flight until `resolve`."""
        return []

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Takes in the teacher's result (None: no usable correction); returns the outcome's name."""
        raise ValueError(f"failure {failure.failure_id} is not of this curriculum: it sends nothing to the teacher")

    def requeue(self, failure: Failure) -> None:
        """Puts a dispatched failure back, dispatchable again: nothing was learned about it. Unknown ones are ignored."""
        raise ValueError(f"failure {failure.failure_id} is not of this curriculum: it sends nothing to the teacher")

    def rest(self, failure: Failure) -> None:
        """Notes that nobody works on a failure in flight for now, so that it does not keep others of its state waiting."""

    def withdraw(self, failure: Failure) -> bool:
        """Whether an answer to a failure in flight could not be used any more; if so, it is no longer in flight, and counted."""
        return False

    def pending(self) -> int:
        """Number of failures that `dispatch` could hand out now."""
        return 0

    #### Looking in, saving

    def look_up(self, node: Any) -> Mapping[str, Any]:
        """What diagnostics can know of an injected state; empty if that is nothing. Where they are known: created_step,
        and the teacher's suffix_ids, failed_suffix_ids and reward; `Forest.look_up` has more."""
        return {}

    def deepest(self, n: int) -> list[Any]:
        """Handles of the `n` deepest states, where states have a depth."""
        return []

    def metrics(self) -> Mapping[str, float]:
        """Current sizes and cumulative counters (full names). Reading changes nothing."""
        return {}

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        """Everything that `load` needs: tables by the names of `records`, and further fields (JSON). Called under the lock, so
        rows must be copies or unchangeable: they are written after it is released."""
        return {}, {}

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        """Replaces the content by what `saved` returned; failures that were in flight wait again. Called under the lock."""

    def state(self, folder: str) -> None:
        """Writes everything that `restore` needs into `folder` (exists, empty), in self-describing files."""
        with self.lock, files.collector_paused():
            tables, fields = self.saved()
        for name, table in tables.items():
            files.write_saved(folder, name, self.records[name], table)
        files.write_header(folder, self.name, self.version, fields)

    def restore(self, folder: str) -> None:
        """Replaces the content by that of `folder`. Failures that were in flight become dispatchable again.

        Raises:
          NotAsSaved: the folder's format version or pool is not this curriculum's, or a file is damaged; names it.
        """
        header = files.read_header(folder, self.name, self.version)
        with files.collector_paused(), files.as_saved(folder):
            tables = {name: files.read_saved(folder, name, record) for name, record in self.records.items()}
            with self.lock:
                self.load(tables, header)

    #### What the pools share

    def judged(self, groups: Sequence[Group], failing: bool = False) -> list[Judged]:
        """The groups that are judged, and their (k_succ, k_total).

        failing: also those with too few verdicts, if one of these is a failure: for pools that conclude nothing else from it.
        """
        counted = [(group, *group.successes(self.threshold)) for group in groups]
        return [(g, k_succ, k_total) for g, k_succ, k_total in counted if g.judged or (failing and k_succ < k_total)]

    def to_teacher(self, group: Group) -> list[Rollout]:
        """Of a group's failures all, none, or the one with the longest prefix that a step-checking grader found right.

        Raises:
          ValueError: longest_prefix, and no failure of the group carries `right_prefix`.
        """
        failed = [] if self.failures == "none" else group.failures(self.threshold)
        if not failed or self.failures == "all":
            return failed
        graded = [rollout for rollout in failed if rollout.grade.right_prefix is not None]
        if not graded:
            raise ValueError(
                f"curriculum.failures=longest_prefix needs a step-checking grader, but no failure of group "
                f"{group.prompt.group_id!r} (data source {group.prompt.problem.data_source!r}) carries right_prefix; "
                "set curriculum.failures=all"
            )
        return [max(graded, key=lambda rollout: rollout.grade.right_prefix)]


class Buffer:
    """The newest `max_size` entries in order of arrival, drawn from by the groups that they come from (`group_id`). Entries never
    change. Its owner holds the lock."""

    prefix = ""  # of its metrics
    counters: tuple[str, ...] = ("dropped_capacity",)

    def __init__(self, max_size: int):
        self.max_size, self.counts = max_size, dict.fromkeys(self.counters, 0)
        self.entries: list[Any] = []

    def __len__(self) -> int:
        return len(self.entries)

    def drop_oldest(self) -> None:
        """Drops what is above the bound."""
        excess = max(len(self.entries) - self.max_size, 0)
        del self.entries[:excess]
        self.counts["dropped_capacity"] += excess

    def draw(self, n: int, random: np.random.Generator, strategy: str = "stratified") -> list[int]:
        """Indices of min(n, size) different entries; see `sample`."""
        return sample([entry.group_id for entry in self.entries], n, random, strategy) if self.entries else []

    def metrics(self) -> dict[str, float]:
        counts = {"size": len(self.entries)} | self.counts
        return named(
            self.prefix, counts | ({"unique_trees": len({entry.group_id for entry in self.entries})} if self.entries else {})
        )

    def saved(self) -> Saved:
        return Saved(list(self.entries), self.counts.copy())

    def load(self, saved: Saved) -> None:
        self.counts, self.entries = files.saved_counts(saved.numbers, self.counts), list(saved.rows)


def injection_count(batch_size: int, ratio: float, ready: int, strict_reference: bool = False) -> int:
    """Number of hard states to add to `batch_size` dataset prompts: min(floor(ratio * batch_size), ready).

    The product is nudged so that 0.29 * 100 counts as 29; `strict_reference` truncates it as it is (28).
    """
    count = int(ratio * batch_size) if strict_reference else int(np.floor(ratio * batch_size + 1e-9))
    return min(count, ready)


def injection_metrics(groups: Sequence[Group], judged: Sequence[Judged]) -> dict[str, float]:
    """Returns `synthetic_inject/*`, which every pool of states reports."""
    injected = [group for group in groups if group.prompt.injected]
    return {
        "synthetic_inject/injected_count": float(len(injected)),
        "synthetic_inject/rollout_n": float(injected[0].prompt.n if injected else 0),
        "synthetic_inject/failed_collected": float(sum(k_total - k_succ for _, k_succ, k_total in judged)),
        "synthetic_inject/failure_feed_skipped": float(not judged),
    }


def named(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values as metrics: floats by their full names."""
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def check_step(step: int) -> None:
    """Raises:
    ValueError: `step` is negative (-1 means never).
    """
    if step < 0:
        raise ValueError(f"step must be >= 0 (-1 means never), got {step}")


def tree_key(prompt_ids: Ids) -> bytes:
    """Big-endian bytes of a prompt: equal iff the ids are, and in the lexicographic order of the ids."""
    return prompt_ids.astype(">u4").tobytes()


def frozen_ids(ids: np.ndarray) -> Ids:
    """Returns ids, perhaps with marks, that can be kept by reference: int32, read-only, and no view of a larger buffer."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.base is None and not ids.flags.writeable:
        return ids
    ids = np.asarray(ids, np.int32)
    return marked(as_ids(plain(ids)), marks(ids))


#### Random choices


def generator(seed: int, step: int, purpose: int, index: int = 0) -> np.random.Generator:
    """The randomness of one purpose in one step; `index` counts the draws that a step makes for it."""
    return np.random.default_rng((seed, step, purpose, index))


def weighted_sample(weights: Sequence[float] | np.ndarray, k: int, random: np.random.Generator) -> list[int]:
    """Draws `k` indices without replacement, with probability proportional to weight at each draw.

    Each item gets the key ln(u) / w, u uniform in (0, 1); the k largest keys are the sample (exponential keys: Efraimidis and
    Spirakis, Weighted random sampling with a reservoir, 2006). Items of weight 0 come last, in the order given.

    Args:
      weights: float64[N], >= 0.

    Returns:
      Indices, by descending key. All of them in the order given, without any randomness, if k >= N.
    """
    if k >= len(weights):
        return list(range(len(weights)))
    if k <= 0:
        return []
    weights = np.asarray(weights, np.float64)
    uniform = np.maximum(random.random(len(weights)), 1e-12)  # float64[N]; 0 is possible, its logarithm is not
    with np.errstate(divide="ignore"):
        keys = np.where(weights > 0, np.log(uniform) / weights, -np.inf)
    return np.argsort(-keys, kind="stable")[:k].tolist()


def sample(groups: Sequence[Hashable], n: int, random: np.random.Generator, strategy: str = "stratified") -> list[int]:
    """Draws min(n, N) indices without replacement.

    stratified: as evenly over the groups as their sizes allow. The groups are shuffled once, then visited in turn; each visit
    takes a random one of the group's remaining members. uniform: over the items, whatever their groups (the reference has both).

    Args:
      groups: of each item.

    Raises:
      ValueError: unknown strategy; or n is negative and the strategy uniform.
    """
    if strategy == "uniform":
        return random.choice(len(groups), size=min(n, len(groups)), replace=False).tolist()
    if strategy != "stratified":
        raise ValueError(f"sampling strategy must be stratified or uniform, got {strategy!r}")
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    queues = [random.permutation(indices).tolist() for indices in members.values()]
    order = random.permutation(len(queues)).tolist()
    chosen: list[int] = []
    while order and len(chosen) < n:
        for group in order[: n - len(chosen)]:
            chosen.append(queues[group].pop())
        order = [group for group in order if queues[group]]
    return chosen
