"""The forest's records: trees (one a prompt), nodes (states), events (failures for the teacher), and what goes in and out."""

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from deepgrpo.types import Ids, Problem, as_ids

NEVER = -1  # a clock that was never stamped

# What an observation counts; `root_deactivated` and `node_retired` split `node_deactivated`.
SEEN = ("tree_created", "root_deactivated", "node_deactivated", "node_reactivated", "node_retired", "events_added")
SEEN += ("observations_recorded",)

Order = tuple[int, int, int]  # (clock, created_step, id) of a node
Turn = tuple[int, int, int, int]  # (dispatch clock, tick, created_step, id) of a node
Seat = tuple[int, int, int, bytes]  # the same of a tree, with its key


def tree_key(prompt_ids: Ids) -> bytes:
    """Big-endian bytes of a prompt: equal iff the ids are, and in the lexicographic order of the ids."""
    return prompt_ids.astype(">u4").tobytes()


def digest(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def own_ids(ids: np.ndarray) -> Ids:
    """Returns ids that can be kept by reference: int32, read-only, and no view that would keep a larger buffer alive."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.base is None and not ids.flags.writeable:
        return ids
    return as_ids(ids)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a forest may hold. Bounds of 0 are no bounds; with all of them 0 and `drop_retired_events` off it behaves as the
    reference.

    max_model_len: tokens of prompt plus response; None: no limit.
    min_remaining_tokens: room that a state must leave for a response below `max_model_len`.
    max_events_per_parent: newest waiting events kept a node.
    max_events: waiting events kept in all, the oldest dropped first.
    max_nodes_per_tree: root included; a full tree refuses children and takes no events.
    drop_retired_events: forget a node's waiting events when it retires. Otherwise those of a node other than the root wait for
      ever and keep their tree alive.
    retire_after: groups in a row that must succeed as a whole before a state retires; a root retires with the first.
    most_in_flight: events of a tree that the teacher works on at once; trees, and states in a tree, are then served in turn. 0:
      any number, and within a step the oldest tree and state first.
    """

    max_model_len: int | None = None
    min_remaining_tokens: int = 32
    max_events_per_parent: int = 0
    max_events: int = 0
    max_nodes_per_tree: int = 0
    drop_retired_events: bool = False
    retire_after: int = 1
    most_in_flight: int = 0

    def __post_init__(self):
        """Raises:
        ValueError: a bound is negative, `retire_after` is below 1, or `max_model_len` leaves no room.
        """
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if name != "max_model_len"}
        least = {"retire_after": 1}
        if wrong := [f"{name} must be >= {least.get(name, 0)}, got {n}" for name, n in numbers.items() if n < least.get(name, 0)]:
            raise ValueError("; ".join(f"curriculum.{text}" for text in wrong))
        if self.max_model_len is not None and self.max_model_len <= self.min_remaining_tokens:
            raise ValueError(
                f"rollout.max_model_len ({self.max_model_len}) must exceed curriculum.min_remaining_tokens "
                f"({self.min_remaining_tokens}): no state could leave room for a response"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Annotation:
    """A teacher's correction as the pool takes it in.

    state_ids: int32[len], the child state (the parent's state and the shared prefix).
    suffix_ids: int32[len], what the teacher wrote after it; a child needs some.
    """

    state_ids: Ids
    suffix_ids: Ids | None
    reward: float | None = None
    failed_suffix_ids: Ids | None = None

    def owned(self) -> "Annotation":
        """The same with ids that can be kept by reference."""
        lists = {name: getattr(self, name) for name in ("state_ids", "suffix_ids", "failed_suffix_ids")}
        return dataclasses.replace(self, **{name: None if ids is None else own_ids(ids) for name, ids in lists.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class SuffixEntry:
    """A node that SFT on teacher tokens can train on: prompt `state_ids`, response `suffix_ids`. tree: the root's handle."""

    node: int
    tree: int
    problem: Problem
    created_step: int
    state_ids: Ids
    suffix_ids: Ids
    reward: float | None


@dataclasses.dataclass
class Counters:
    """Cumulative; saved with the forest. At any time: enqueued = succeeded + duplicate + invalid + failed + cleared
    + stale_parent_inactive + dropped_capacity + dropped_retired + nodes_refused + the events in the forest."""

    enqueued: int = 0
    dispatched: int = 0
    succeeded: int = 0
    failed: int = 0
    stale_parent_inactive: int = 0
    stale: int = 0
    duplicate: int = 0
    invalid: int = 0
    deactivated: int = 0
    sft_sampled: int = 0
    cleared: int = 0
    dropped_capacity: int = 0  # events dropped or not taken because of a bound
    dropped_retired: int = 0  # events dropped with the retirement of their node
    nodes_refused: int = 0  # corrections that a full tree refused


@dataclasses.dataclass
class History:
    """What became of states so far; `forest_history` counts it. Saved with the forest; an older snapshot has none."""

    mastered: int = 0  # states other than roots that retired
    mastered_visits: int = 0  # groups that these took
    mastered_unfailed: int = 0  # how many of them never had a failure
    mastered_steps: int = 0  # steps from their creation to their retirement
    reopened: int = 0  # roots that failed again after they had retired
    first_children: int = 0  # trees that got a state
    first_child_steps: int = 0  # steps that this took from the tree's creation
    first_child_step: int = NEVER  # of the forest's first state
    children: int = 0  # states other than roots
    child_event_steps: int = 0  # steps from the failures to the states made of them
    transfer_trees: int = 0  # trees whose root was observed both before and after a state of the tree was mastered
    transfer_before: int = 0  # sums over these of the root's success rates, in forest_history.SCALE
    transfer_after: int = 0


# One failed rollout for the teacher: (step that produced it, id, node that it started from, response_ids). Ids are a creation
# sequence and never reused; tuples order by (step, id), which is the order of a node's stack. A plain tuple, not a class: the
# garbage collector stops following tuples of numbers and arrays, so that a million waiting failures do not slow it down.
Event = tuple[int, int, int, Ids]


class Origin(NamedTuple):
    """Where a node came from: the failed rollout and the teacher's correction of it. Kept for SFT rows and inspection."""

    event: int
    event_step: int
    response_ids: Ids  # int32[len], the student's whole failed response
    failed_suffix_ids: Ids  # int32[len], what the student wrote after the locked prefix
    suffix_ids: Ids  # int32[len], what the teacher wrote instead; not empty
    reward: float | None  # of the corrected answer


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One state. Everything above the blank line never changes after creation."""

    id: int  # creation sequence: never reused, breaks ties between siblings
    tree: bytes
    parent: int | None  # None: the root
    ids: Ids  # int32[len], prompt ids followed by the locked prefix
    created_step: int
    origin: Origin | None  # None: the root

    active: bool = True
    observations: int = 0
    last_k_succ: int | None = None
    last_k_total: int | None = None
    rollout_clock: int = NEVER  # stamped by sampling and by observation
    dispatch_clock: int = NEVER
    dispatch_tick: int = 0  # number of the last event that the teacher was given, among all; 0 where the order is the reference's
    sft_clock: int = NEVER
    last_success_step: int = NEVER
    last_fail_step: int = NEVER
    sft_updates: int = 0
    mastered_in_a_row: int = 0  # newest observations in a row that succeeded as a whole
    depth: int = 0  # edges to the root; follows from the parents
    children: tuple[int, ...] = ()  # in creation order
    waiting: list[Event] = dataclasses.field(default_factory=list)  # ascending; the teacher is given the last

    def order(self, clock: int) -> Order:
        return clock, self.created_step, self.id

    def turn(self) -> Turn:
        return self.dispatch_clock, self.dispatch_tick, self.created_step, self.id


@dataclasses.dataclass(slots=True, eq=False)
class Tree:
    """All states of one prompt. `nodes[0]` is the root; nodes are in creation order and are never removed one by one."""

    key: bytes
    problem: Problem  # its prompt_ids are the root's ids
    nodes: list[Node]
    created_step: int
    last_updated_step: int
    rollout_clock: int = NEVER
    dispatch_clock: int = NEVER
    dispatch_tick: int = 0  # as of a node
    sft_clock: int = NEVER
    num_active: int = 0
    num_events: int = 0  # waiting and in flight
    busy: int = 0  # events in flight that are worked on
    by_rollout: list[Order] = dataclasses.field(default_factory=list)  # active nodes except the root
    by_sft: list[Order] = dataclasses.field(default_factory=list)  # the same nodes
    by_dispatch: list[Turn] = dataclasses.field(default_factory=list)  # active nodes with waiting events
    seat: Seat | None = None  # its place in the index's order of service; None: it has nothing to serve now
    digests: dict[bytes, int] = dataclasses.field(default_factory=dict)  # of all states but the prompt -> node id
    captured: int = 0  # number of the last capture that has this tree's content
    mastered: int = 0  # states other than the root that retired
    before_succ: int = 0  # rollouts of the root before that, but for the group that made the tree: successes, all
    before_total: int = 0
    after_succ: int = 0  # and after it
    after_total: int = 0

    def order(self, clock: int) -> tuple[int, int, bytes]:
        return clock, self.created_step, self.key


def suffix_entry(tree: Tree, node: Node) -> SuffixEntry:
    """What SFT needs of a node other than the root."""
    return SuffixEntry(
        node=node.id,
        tree=tree.nodes[0].id,
        problem=tree.problem,
        created_step=node.created_step,
        state_ids=node.ids,
        suffix_ids=node.origin.suffix_ids,
        reward=node.origin.reward,
    )


def check_cap(max_nodes_per_tree: int | None) -> None:
    """Raises:
    ValueError: the cap is given and not positive.
    """
    if max_nodes_per_tree is not None and max_nodes_per_tree <= 0:
        raise ValueError(f"max_nodes_per_tree must be positive or None, got {max_nodes_per_tree}")
