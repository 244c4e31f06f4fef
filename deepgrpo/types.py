"""The records that travel between the parts: plain dataclasses over token ids.

Token ids are the truth: what was sampled is what is trained. Ids are read-only int32 arrays, shared by reference; nothing
decodes and re-encodes a sampled sequence.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Ids = np.ndarray  # int32[len], read-only
LEAST_VERDICTS = 0.5  # share of a group's rollouts without which nothing is said of the group as a whole


def as_ids(ids: Sequence[int] | np.ndarray) -> Ids:
    """Returns `ids` as a read-only int32[len] array.

    Raises:
      ValueError: if `ids` is not one-dimensional or holds a negative id.
    """
    array = np.array(ids, dtype=np.int32)  # always a copy: a caller's buffer must not change what was sampled
    if array.ndim != 1 or (array.size and array.min() < 0):
        raise ValueError(f"token ids must be a flat list of non-negative ints, got shape {array.shape}, min {array.min()}")
    array.flags.writeable = False
    return array


# Who wrote what: curricula and the teacher keep ids in which a token that an environment wrote is *marked*: stored as its
# complement, which is negative. So that goes with the ids through every slice, pool and file. Engine and network see plain ids.


def marked(ids: Ids, observed: np.ndarray | None) -> Ids:
    """int32[len]: `ids`, those that are `observed` (bool[len]) marked."""
    return ids if observed is None else _read_only(np.where(observed, ~ids, ids))


def plain(ids: Ids) -> Ids:
    """int32[len]: the ids without marks."""
    return _read_only(np.where(ids < 0, ~ids, ids)) if len(ids) and ids.min() < 0 else ids


def marks(ids: Ids) -> np.ndarray | None:
    """bool[len]: which of the ids are marked; None: none is."""
    return ids < 0 if len(ids) and ids.min() < 0 else None


def _read_only(ids: np.ndarray) -> Ids:
    ids = ids.astype(np.int32)
    ids.flags.writeable = False
    return ids


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """One row of a data set, templated and tokenised once.

    index: position in its data set file after filtering; identifies the row in dumps and in validation.
    data_source: picks the grader (`GSM8K`, `MATH`, `carry_chain`, ...).
    prompt_ids: int32[len], chat template applied, generation prompt included.
    ground_truth: what the grader compares with; JSON-serialisable.
    question: the user's text, for graders and dumps.
    extra: further columns of the row; JSON-serialisable.
    told: all that the prompt tells the student, instructions and examples included, for the teacher; "": the question alone.
    """

    index: int
    data_source: str
    prompt_ids: Ids
    ground_truth: Any
    question: str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    told: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """What the engine continues: a problem's prompt, or that prompt plus a locked prefix (a hard state).

    ids: int32[len], verbatim what the engine is given.
    problem: the row it belongs to.
    n: rollouts to make from it (the group's size).
    group_id: unique within a step, a pure function of (step, position).
    node: the curriculum's own handle of an injected state (opaque to everyone else); None for a dataset prompt.
    stream: "main", or "branch" for continuations that the objective weighs apart (objective.branch_lambda).
    observed: bool[locked], tokens of the locked prefix that an environment wrote; None: none.
    """

    ids: Ids
    problem: Problem
    n: int
    group_id: str
    node: Any = None
    stream: str = "main"
    observed: np.ndarray | None = None

    @property
    def locked(self) -> int:
        """Number of trailing ids that are a locked prefix (0 for a dataset prompt)."""
        return len(self.ids) - len(self.problem.prompt_ids)

    @property
    def marked_ids(self) -> Ids:
        """int32[len]: the ids, with marks (see `marked`)."""
        if self.observed is None:
            return self.ids
        return marked(self.ids, np.concatenate([np.zeros(len(self.problem.prompt_ids), bool), self.observed]))

    @property
    def injected(self) -> bool:
        return self.node is not None


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """What an engine returns for one sample.

    ids: int32[len], the stop id included when one was sampled.
    logps: float32[len], natural-log probabilities under the distribution that was actually sampled from; NaN where observed.
    finish_reason: "stop" (a stop id was sampled), "length" (budget used up) or "abort" (never trained, never graded).
    version: the weight version that produced it; of several turns, the oldest.
    observed: bool[len], tokens that an environment wrote between the student's turns; None: the student wrote all of them.
    """

    ids: Ids
    logps: np.ndarray
    finish_reason: str
    version: int
    observed: np.ndarray | None = None

    @property
    def sampled(self) -> int:
        """Number of tokens that the student sampled."""
        return len(self.ids) - (0 if self.observed is None else int(self.observed.sum()))

    @property
    def marked_ids(self) -> Ids:
        """int32[len]: the ids, with marks (see `marked`)."""
        return marked(self.ids, self.observed)


STUDENT, ENVIRONMENT = "student", "environment"  # who wrote a part of a trace
REPLAY_MISMATCH = "replay_mismatch"  # reason of a grade: the environment could not be brought to the state that was to go on
TASK = "task"  # the part of a grade that the task itself gives, beside bonuses


@dataclasses.dataclass(frozen=True)
class Grade:
    """A grader's verdict. Three outcomes: `succeeds` is right, otherwise wrong, and a reward of None is *no verdict*.

    reward: scalar, bonuses included, or None when the infrastructure failed; such a row leaves the batch and is counted, it is
      never a label.
    completed: a gradable answer was found.
    reason: short code (`right`, `wrong`, `unformatted`, `truncated`, `timeout`, `crash`, ...), counted in metrics.
    answer: the extracted answer, for dumps.
    right_prefix: characters at the response's start that a step-checking grader found right; None from other graders.
    parts: (name, value) of each reward that the total was weighted from, TASK among them; empty if the task's is all.
    """

    reward: float | None
    completed: bool
    reason: str
    answer: str = ""
    right_prefix: int | None = None
    parts: tuple[tuple[str, float], ...] = ()

    def succeeds(self, threshold: float) -> bool:
        """Whether the task's own reward is above `threshold`: the one definition of success, which no bonus changes."""
        return self.reward is not None and dict(self.parts).get(TASK, self.reward) > threshold


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """One scored sample of a prompt.

    advantages: float64[R] of its tokens, from a loop that finds them itself; None: the objective's, relative to the group.
    shared: leading response tokens that another rollout of the group has as well, sampled once for both.
    episode: what happened between the student and an environment; None where there is none.
    """

    completion: Completion
    grade: Grade
    advantages: np.ndarray | None = None
    shared: int = 0
    episode: Any = None

    @property
    def sampled(self) -> int:
        """Response tokens that were sampled for this rollout."""
        return self.completion.sampled - self.shared

    @property
    def turns(self) -> int:
        """How often the student wrote."""
        return 1 if self.episode is None else self.episode.turns

    @property
    def end(self) -> str:
        """Why the conversation ended (`environments.base.Trace`); "" without one."""
        return "" if self.episode is None else self.episode.end

    @property
    def reward(self) -> float | None:
        return self.grade.reward


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """All rollouts of one prompt in one step."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def verdicts(self) -> list[Rollout]:
        """The rollouts that have a verdict; everything that counts successes or takes a mean uses only these."""
        return [r for r in self.rollouts if r.reward is not None]

    @property
    def judged(self) -> bool:
        """Whether enough rollouts have a verdict to call the group mastered or failed, or to count its success rate.

        One that was aborted is no part of `rollouts`, and has none.
        """
        return 0 < LEAST_VERDICTS * max(self.prompt.n, len(self.rollouts)) <= len(self.verdicts())

    def successes(self, threshold: float) -> tuple[int, int]:
        """Returns (k_succ, k_total): rollouts that succeed (see `Grade.succeeds`), and rollouts with a verdict."""
        judged = self.verdicts()
        return sum(r.grade.succeeds(threshold) for r in judged), len(judged)

    def failures(self, threshold: float) -> list[Rollout]:
        return [r for r in self.verdicts() if not r.grade.succeeds(threshold)]
