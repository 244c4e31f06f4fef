"""The chain pool: one chain of ever deeper states a prompt, of which only the deepest is rolled out (an ablation of the forest).

A prompt that fails as a whole starts a chain and waits for the teacher. A verified prefix becomes the chain's next state, which
is rolled out until a group fails as a whole (the teacher deepens the chain) or succeeds as a whole (the chain retreats to the
state before; after the prompt itself it is completed). A chain whose failures the teacher cannot use is abandoned.

Not thread-safe: the curriculum that owns it holds the lock.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from deepgrpo.curriculum.base import Correction, Failure
from deepgrpo.curriculum.forest_records import NEVER, own_ids, tree_key
from deepgrpo.curriculum.header import saved_counts
from deepgrpo.curriculum.saved_rows import Saved
from deepgrpo.curriculum.weighted import weighted_sample
from deepgrpo.types import Ids, Problem

LEARNING, DEEPENING, COMPLETED, ABANDONED = "learning", "deepening_requested", "completed", "abandoned"
TERMINAL = (COMPLETED, ABANDONED)
STATES = (LEARNING, DEEPENING, *TERMINAL)
LOG_LENGTH = 64  # newest transitions kept of a chain

COUNTERS = ("retreats", "masters", "completed_cumulative", "abandoned_cumulative", "deepening_requests", "teacher_successes")
COUNTERS += ("teacher_invalid_depth", "teacher_invalid_prefix", "teacher_invalid_length", "retries", "restarts")


@dataclasses.dataclass(frozen=True, eq=False)
class StoredFailure:
    """One failed rollout of a node. event: its number by arrival. response_ids: int32[len]. step: at which it was sampled."""

    event: int
    step: int
    response_ids: Ids


@dataclasses.dataclass(eq=False)
class ChainNode:
    """One state.

    ids: int32[len], prompt and locked prefix. last_k_succ, last_k_total: of its latest group; None: not observed.
    first_observed_step, last_used_step: -1 for never. failed: of its latest group, if that failed as a whole.
    """

    ids: Ids
    observations: int = 0
    last_k_succ: int | None = None
    last_k_total: int | None = None
    first_observed_step: int = NEVER
    last_used_step: int = NEVER
    failed: list[StoredFailure] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        """As if it had never been rolled out."""
        self.observations, self.last_k_succ, self.last_k_total = 0, None, None
        self.first_observed_step = self.last_used_step = NEVER
        self.failed = []


@dataclasses.dataclass(eq=False)
class Chain:
    """The states of one prompt, ascending in length; the last one is active, and in a completed chain there is none.

    number: by creation. transitions: newest (step, from, to). tried: failures of the active node that the teacher could not use.
    in_flight: event that is with the teacher. retries: second chances used since its last success.
    """

    number: int
    problem: Problem
    nodes: list[ChainNode]
    created_step: int
    last_updated_step: int
    state: str = LEARNING
    transitions: collections.deque = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LOG_LENGTH))
    tried: int = 0
    in_flight: int | None = None
    retries: int = 0

    def move(self, state: str, step: int) -> None:
        self.transitions.append((step, self.state, state))
        self.state, self.last_updated_step = state, step

    def to_try(self) -> list[StoredFailure]:
        """What the teacher has not seen of the active node: the longest response first, equal ones by arrival."""
        return sorted(self.nodes[-1].failed, key=lambda failed: -len(failed.response_ids))[self.tried :]


class ChainPool:
    """Chains in order of creation, and the queue of those that wait for the teacher."""

    def __init__(self, *, max_state_len: int | None = None, max_retries: int = 0, restart_after: int = 0):
        """Args:
          max_state_len: tokens of a state, at most; None: no limit.
          max_retries: times that a chain goes back to being rolled out when the teacher could use none of its failures, counted
            anew after each success; 0: it is abandoned at once (the reference).
          restart_after: steps after which a completed or abandoned chain's prompt may start another; 0: never (the reference).

        Raises:
          ValueError: a number is negative.
        """
        if max_retries < 0 or restart_after < 0:
            raise ValueError(f"chain pool: max_retries ({max_retries}) and restart_after ({restart_after}) must be >= 0")
        self._max_state_len, self._max_retries, self._restart_after = max_state_len, max_retries, restart_after
        self._chains: dict[bytes, Chain] = {}
        self._queue: collections.deque[bytes] = collections.deque()
        self._in_flight: dict[int, Chain] = {}
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._next_chain = self._next_event = 0

    def __len__(self) -> int:
        return len(self._chains)

    # ---- observing groups

    def main_failure(self, problem: Problem, failed: Sequence[Ids] | None, step: int) -> bool:
        """Takes in a dataset group that failed as a whole; returns whether that started a chain."""
        key = tree_key(problem.prompt_ids)
        if not key:
            return False
        if (known := self._chains.get(key)) is not None:
            if not self._restart_after or known.state not in TERMINAL or step - known.last_updated_step < self._restart_after:
                return False
            del self._chains[key]
            self._counts["restarts"] += 1
        chain = Chain(self._next_chain, problem, [ChainNode(own_ids(problem.prompt_ids))], step, step)
        self._next_chain += 1
        self._chains[key] = chain
        self._request(chain, failed or (), step)
        return True

    def observe(self, prompt_ids: Ids, k_succ: int, k_total: int, step: int, failed: Sequence[Ids] | None) -> bool:
        """Takes in a group of a chain's active state; returns whether it counted (the chain is being learned)."""
        chain = self._chains.get(tree_key(prompt_ids))
        if chain is None or chain.state != LEARNING:
            return False
        node = chain.nodes[-1]
        node.observations += 1
        node.last_k_succ, node.last_k_total, node.last_used_step = k_succ, k_total, step
        if node.first_observed_step == NEVER:
            node.first_observed_step = step
        if k_total > 0 and k_succ == k_total:
            self._retreat(chain, step)
        elif k_total > 0 and k_succ == 0:
            self._request(chain, failed or (), step)
        return True

    def _retreat(self, chain: Chain, step: int) -> None:
        self._counts["masters"] += 1
        chain.nodes.pop()
        if not chain.nodes:
            chain.move(COMPLETED, step)
            self._counts["completed_cumulative"] += 1
            return
        chain.nodes[-1].forget()
        chain.last_updated_step = step
        self._counts["retreats"] += 1

    def _request(self, chain: Chain, failed: Sequence[Ids], step: int) -> None:
        """Stores the active node's failures, and has the chain wait for the teacher."""
        first = self._next_event
        self._next_event += len(failed)
        chain.nodes[-1].failed = [StoredFailure(first + i, step, own_ids(ids)) for i, ids in enumerate(failed)]
        chain.tried = 0
        chain.move(DEEPENING, step)
        self._queue.append(tree_key(chain.problem.prompt_ids))
        self._counts["deepening_requests"] += 1

    # ---- rolling states out

    def learning(self) -> list[Chain]:
        return [chain for chain in self._chains.values() if chain.state == LEARNING]

    def weight(self, chain: Chain) -> float:
        """4 p (1 - p) of the active node's latest success rate p; 1 before its first group."""
        node = chain.nodes[-1]
        if node.last_k_succ is None or not node.last_k_total:
            return 1.0
        rate = node.last_k_succ / node.last_k_total
        return 4 * rate * (1 - rate)

    def sample(self, n: int, step: int, random: np.random.Generator) -> list[Chain]:
        """Draws min(n, learning) different chains by weight and stamps their active nodes."""
        learning = self.learning()
        weights = np.array([self.weight(chain) for chain in learning])
        if n <= 0 or weights.sum() <= 0:
            return []
        chosen = [learning[i] for i in weighted_sample(weights, n, random)]
        for chain in chosen:
            chain.nodes[-1].last_used_step = step
        return chosen

    # ---- the teacher

    def pending(self) -> int:
        """Chains that wait for the teacher and have a failure for it."""
        return sum(self._chains[key].state == DEEPENING and bool(self._chains[key].nodes[-1].failed) for key in set(self._queue))

    def drain(self) -> list[tuple[Chain, list[StoredFailure]]]:
        """Empties the queue; returns its chains, first come first, each with all its failures. Those without any are given up."""
        drained = []
        while self._queue:
            if (chain := self._next_in_queue()) is not None:
                drained.append((chain, list(chain.nodes[-1].failed)))
        return drained

    def _next_in_queue(self) -> Chain | None:
        """Takes the queue's head; None if it has nothing for the teacher."""
        chain = self._chains[self._queue.popleft()]
        if chain.state != DEEPENING or chain.in_flight is not None:
            return None
        if not chain.to_try():
            self._give_up(chain, chain.last_updated_step)
            return None
        return chain

    def dispatch(self, max_items: int) -> list[Failure]:
        """Hands out failures, one a chain: of the chains first come first, of each the longest response first."""
        failures: list[Failure] = []
        while self._queue and len(failures) < max_items:
            if (chain := self._next_in_queue()) is not None:
                failed = chain.to_try()[0]
                chain.in_flight = failed.event
                self._in_flight[failed.event] = chain
                failures.append(Failure(failed.event, chain.problem, chain.nodes[-1].ids, failed.response_ids, failed.step))
        return failures

    def requeue(self, event: int) -> None:
        """Puts a failure in flight back: its chain is the next one served."""
        if (chain := self._in_flight.pop(event, None)) is not None:
            chain.in_flight = None
            self._queue.appendleft(tree_key(chain.problem.prompt_ids))

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Takes in the teacher's answer to a dispatched failure; an empty shared prefix is none.

        Returns "stale" (not in flight), "next_failure" (the chain's next one is tried at once), or as `teacher_result` does.
        """
        chain = self._in_flight.pop(failure.event, None)
        if chain is None:
            return "stale"
        chain.in_flight = None
        if correction is not None and len(correction.prefix_ids):
            state_ids = np.concatenate([failure.state_ids, correction.prefix_ids])
            return self.teacher_result(chain.problem.prompt_ids, state_ids, step)
        chain.tried += 1
        if chain.to_try():
            self._queue.appendleft(tree_key(chain.problem.prompt_ids))
            return "next_failure"
        return self.teacher_result(chain.problem.prompt_ids, None, step)

    def teacher_result(self, prompt_ids: Ids, state_ids: Ids | None, step: int, *, success: bool = True) -> str:
        """Takes in the teacher's last word on a chain that waits for it: a new state, or none.

        The state need only extend the prompt and be longer than the chain's deepest one (the reference); one that `resolve` makes
        extends the active state. Returns "ignored" (the chain does not wait), "deepened", "retried" or "abandoned".
        """
        chain = self._chains.get(tree_key(prompt_ids))
        if chain is None or chain.state != DEEPENING:
            return "ignored"
        if not success or state_ids is None or not len(state_ids):
            return self._give_up(chain, step)
        prompt = chain.problem.prompt_ids
        if len(state_ids) < len(prompt) or not np.array_equal(state_ids[: len(prompt)], prompt):
            self._counts["teacher_invalid_prefix"] += 1
            return self._give_up(chain, step)
        if len(state_ids) <= len(chain.nodes[-1].ids):
            self._counts["teacher_invalid_depth"] += 1
            return self._give_up(chain, step)
        if self._max_state_len is not None and len(state_ids) > self._max_state_len:
            self._counts["teacher_invalid_length"] += 1
            return self._give_up(chain, step)
        chain.nodes.append(ChainNode(own_ids(state_ids)))
        chain.move(LEARNING, step)
        chain.retries = 0
        self._counts["teacher_successes"] += 1
        return "deepened"

    def _give_up(self, chain: Chain, step: int) -> str:
        if chain.retries < self._max_retries:
            chain.retries += 1
            chain.nodes[-1].forget()
            chain.move(LEARNING, step)
            self._counts["retries"] += 1
            return "retried"
        chain.move(ABANDONED, step)
        self._counts["abandoned_cumulative"] += 1
        return "abandoned"

    # ---- looking in, persistence

    def chains(self) -> list[Chain]:
        return list(self._chains.values())

    def metrics(self) -> dict[str, float]:
        chains = self.chains()
        lengths = [len(chain.nodes) for chain in chains]
        tokens = [len(node.ids) for chain in chains for node in chain.nodes]
        depths = [len(node.ids) - len(chain.problem.prompt_ids) for chain in chains for node in chain.nodes]
        states = collections.Counter(chain.state for chain in chains)
        counts = {"size": len(chains), "learning": states[LEARNING], "deepening": states[DEEPENING]}
        counts |= {"completed": states[COMPLETED], "abandoned": states[ABANDONED], "total_nodes": len(tokens)}
        for name, values in (("chain_len", lengths), ("depth", depths), ("aug_prompt_len", tokens)):
            counts |= {f"avg_{name}": sum(values) / max(len(values), 1), f"max_{name}": max(values, default=0)}
        counts |= self._counts | {"deepening_queue_size": len(self._queue)}
        return {f"chain_pool/{name}": float(value) for name, value in counts.items()}

    def saved(self) -> dict[str, Saved]:
        """Everything that `load` needs, as copies: the files can be written after the lock is released."""
        chains = self.chains()
        nodes = [node for chain in chains for node in chain.nodes]
        position = {tree_key(chain.problem.prompt_ids): i for i, chain in enumerate(chains)}
        with_teacher = [tree_key(self._in_flight[event].problem.prompt_ids) for event in sorted(self._in_flight)]
        numbers = self._counts | {"next_chain": self._next_chain, "next_event": self._next_event}
        return {
            "chains": Saved([_chain_row(chain) for chain in chains], numbers),
            "chain_nodes": Saved([_node_row(node) for node in nodes]),
            "chain_failures": Saved([failed for node in nodes for failed in node.failed]),
            "chain_queue": Saved([QueueRow(position[key]) for key in (*with_teacher, *self._queue)]),
        }

    def load(self, saved: dict[str, Saved]) -> None:
        """Replaces the content. Chains that were with the teacher wait again: dispatched ones first, drained ones last."""
        numbers = saved_counts(saved["chains"].numbers, dict.fromkeys((*COUNTERS, "next_chain", "next_event"), 0))
        self._next_chain, self._next_event = numbers.pop("next_chain"), numbers.pop("next_event")
        self._counts, self._in_flight = numbers, {}
        failures, nodes = iter(saved["chain_failures"].rows), iter(saved["chain_nodes"].rows)
        chains = [_chain(row, [_node(next(nodes), failures) for _ in range(row.num_nodes)]) for row in saved["chains"].rows]
        self._chains = {tree_key(chain.problem.prompt_ids): chain for chain in chains}
        keys, places = list(self._chains), [row.chain for row in saved["chain_queue"].rows]
        known = all(chain.state == COMPLETED or (chain.nodes and chain.state in STATES) for chain in chains)
        if not known or len(keys) < len(chains) or not all(0 <= place < len(keys) for place in places):
            raise ValueError("a chain without a state, two chains of one prompt, or a queue of chains that there are not")
        if next(failures, None) or next(nodes, None):
            raise ValueError("more nodes than the chains, or more failures than the nodes, say that they have")
        self._queue = collections.deque(keys[place] for place in places)
        queued = set(self._queue)
        self._queue += [key for key, chain in self._chains.items() if chain.state == DEEPENING and key not in queued]


@dataclasses.dataclass(frozen=True, eq=False)
class ChainRow:
    """A chain on disk; its nodes are the next `num_nodes` of theirs."""

    problem: Problem
    number: int
    created_step: int
    last_updated_step: int
    state: str
    transitions: list[tuple[int, str, str]]
    tried: int
    retries: int
    num_nodes: int


@dataclasses.dataclass(frozen=True, eq=False)
class NodeRow:
    """A node on disk; its failures are the next `num_failed` of theirs."""

    ids: Ids
    observations: int
    last_k_succ: int | None
    last_k_total: int | None
    first_observed_step: int
    last_used_step: int
    num_failed: int


@dataclasses.dataclass(frozen=True)
class QueueRow:
    """A place in the queue: position of its chain among the chains."""

    chain: int


def _chain_row(chain: Chain) -> ChainRow:
    fields = {name: getattr(chain, name) for name in _CHAIN_FIELDS}
    return ChainRow(transitions=list(chain.transitions), num_nodes=len(chain.nodes), **fields)


def _chain(row: ChainRow, nodes: list[ChainNode]) -> Chain:
    transitions = collections.deque(map(tuple, row.transitions), maxlen=LOG_LENGTH)
    return Chain(nodes=nodes, transitions=transitions, **{name: getattr(row, name) for name in _CHAIN_FIELDS})


def _node_row(node: ChainNode) -> NodeRow:
    return NodeRow(num_failed=len(node.failed), **{name: getattr(node, name) for name in _NODE_FIELDS})


def _node(row: NodeRow, failures: Iterator[StoredFailure]) -> ChainNode:
    failed = list(itertools.islice(failures, row.num_failed))
    return ChainNode(failed=failed, **{name: getattr(row, name) for name in _NODE_FIELDS})


_CHAIN_FIELDS = ("problem", "number", "created_step", "last_updated_step", "state", "tried", "retries")
_NODE_FIELDS = ("ids", "observations", "last_k_succ", "last_k_total", "first_observed_step", "last_used_step")

FILES = {"chains": ChainRow, "chain_nodes": NodeRow, "chain_failures": StoredFailure, "chain_queue": QueueRow}  # name -> record
