"""The chain pool, an ablation of the forest: one chain of ever deeper states per prompt, of which only the deepest is rolled out.

A prompt that fails as a whole starts a chain and waits for the teacher. A verified prefix becomes the chain's next state, which
is rolled out until a group fails as a whole (the teacher deepens the chain) or succeeds as a whole (the chain retreats to the
state before; after the prompt itself it is completed). A chain whose failures the teacher cannot use is abandoned.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from deepgrpo.curriculum import base
from deepgrpo.curriculum.base import NEVER, STATES, Correction, Curriculum, Failure, State
from deepgrpo.curriculum.saved import Saved, fields_of, saved_counts
from deepgrpo.types import Group, Ids, Problem

LEARNING, DEEPENING, COMPLETED, ABANDONED = "learning", "deepening_requested", "completed", "abandoned"
LOG_LENGTH = 64  # newest transitions kept of a chain

COUNTERS = ("retreats", "masters", "completed_cumulative", "abandoned_cumulative", "deepening_requests", "teacher_successes")
COUNTERS += ("teacher_invalid_depth", "teacher_invalid_prefix", "teacher_invalid_length")


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


@dataclasses.dataclass(eq=False)
class Chain:
    """The states of one prompt, ascending in length; the last one is active, and in a completed chain there is none.

    number: by creation. transitions: newest (step, from, to). tried: failures of the active node that the teacher could not use.
    in_flight: failure that is with the teacher.
    """

    number: int
    problem: Problem
    created_step: int
    last_updated_step: int
    state: str = LEARNING
    tried: int = 0
    nodes: list[ChainNode] = dataclasses.field(default_factory=list)
    transitions: collections.deque = dataclasses.field(default_factory=lambda: collections.deque(maxlen=LOG_LENGTH))
    in_flight: int | None = None

    def move(self, state: str, step: int) -> None:
        self.transitions.append((step, self.state, state))
        self.state, self.last_updated_step = state, step

    def to_try(self) -> list[StoredFailure]:
        """What the teacher has not seen of the active node: the longest response first, equal ones by arrival."""
        return sorted(self.nodes[-1].failed, key=lambda failed: -len(failed.response_ids))[self.tried :]


_OF_CHAIN, _OF_NODE = fields_of(Chain, "nodes", "transitions", "in_flight"), fields_of(ChainNode, "failed")
# As they are saved: a chain's nodes are the next `num_nodes` of theirs, a node's failures the next `num_failed` of theirs.
ChainRow = NamedTuple("ChainRow", [*_OF_CHAIN, ("transitions", list[tuple[int, str, str]]), ("num_nodes", int)])
NodeRow = NamedTuple("NodeRow", [*_OF_NODE, ("num_failed", int)])


class QueueRow(NamedTuple):
    chain: int  # a place in the queue: position of its chain among the chains


_of_chain, _of_node = (operator.attrgetter(*(name for name, _ in fields)) for fields in (_OF_CHAIN, _OF_NODE))


class ChainPool(Curriculum):
    """`base.Curriculum`: chains in order of creation, and the queue of those that wait for the teacher."""

    name, version = "chain", 2
    by_ratio = asks_teacher = True
    keys = ("rollout_n",)
    records = {"chains": ChainRow, "chain_nodes": NodeRow, "chain_failures": StoredFailure, "chain_queue": QueueRow}

    def __init__(self, config: ml_collections.ConfigDict):
        super().__init__(config)
        self.chains: dict[bytes, Chain] = {}
        self.queue: collections.deque[bytes] = collections.deque()
        self.in_flight: dict[int, Chain] = {}
        self.counts = dict.fromkeys((*COUNTERS, "next_chain", "next_event"), 0)

    #### Observing groups

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Feeds a step's groups: injected ones to their chains, then dataset ones that failed as a whole, which start chains.

        Rollouts without a verdict count neither way; a group with too few (`Group.judged`) is left out.
        """
        base.check_step(step)
        judged = self.judged(groups)
        seen = dict.fromkeys(("observations_recorded", "main_failures_seen", "main_failures_enqueued"), 0)
        with self.lock:
            for group, k_succ, k_total in judged:
                if group.prompt.injected and (k_succ or self.failures != "none"):  # without a teacher no chain deepens
                    failed = [] if k_succ else self._responses(group)
                    prompt_ids = group.prompt.problem.prompt_ids
                    seen["observations_recorded"] += self.observe_state(prompt_ids, k_succ, k_total, step, failed)
            for group, k_succ, _ in judged:
                if not group.prompt.injected and not k_succ and self.failures != "none":
                    seen["main_failures_seen"] += 1
                    seen["main_failures_enqueued"] += self.start_chain(group.prompt.problem, self._responses(group), step)
        metrics = {f"{name}_this_step": value for name, value in seen.items()}
        return base.injection_metrics(groups, judged) | base.named("chain_pool", metrics)

    def _responses(self, group: Group) -> list[Ids]:
        return [rollout.completion.marked_ids for rollout in self.to_teacher(group)]

    def start_chain(self, problem: Problem, failed: Sequence[Ids], step: int) -> bool:
        """Takes in a dataset group that failed as a whole; returns whether that started a chain. Called under the lock."""
        key = base.tree_key(problem.prompt_ids)
        if not key or key in self.chains:
            return False
        chain = Chain(self.counts["next_chain"], problem, step, step, nodes=[ChainNode(base.frozen_ids(problem.prompt_ids))])
        self.counts["next_chain"] += 1
        self.chains[key] = chain
        self._request(chain, failed, step)
        return True

    def observe_state(self, prompt_ids: Ids, k_succ: int, k_total: int, step: int, failed: Sequence[Ids]) -> bool:
        """Takes in a group of a chain's active state; returns whether it counted (the chain is being learned). Called under the
        lock."""
        chain = self.chains.get(base.tree_key(prompt_ids))
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
            self._request(chain, failed, step)
        return True

    def _retreat(self, chain: Chain, step: int) -> None:
        self.counts["masters"] += 1
        chain.nodes.pop()
        if not chain.nodes:
            chain.move(COMPLETED, step)
            self.counts["completed_cumulative"] += 1
            return
        chain.nodes[-1] = ChainNode(chain.nodes[-1].ids)  # as if it had never been rolled out
        chain.last_updated_step = step
        self.counts["retreats"] += 1

    def _request(self, chain: Chain, failed: Sequence[Ids], step: int) -> None:
        """Stores the active node's failures, and has the chain wait for the teacher."""
        first = self.counts["next_event"]
        self.counts["next_event"] += len(failed)
        chain.nodes[-1].failed = [StoredFailure(first + i, step, base.frozen_ids(ids)) for i, ids in enumerate(failed)]
        chain.tried = 0
        chain.move(DEEPENING, step)
        self.queue.append(base.tree_key(chain.problem.prompt_ids))
        self.counts["deepening_requests"] += 1

    #### Rolling states out

    def learning(self) -> list[Chain]:
        return [chain for chain in self.chains.values() if chain.state == LEARNING]

    def ready(self) -> int:
        with self.lock:
            return len(self.learning())

    def weight(self, chain: Chain) -> float:
        """4 p (1 - p) of the active node's latest success rate p; 1 before its first group."""
        node = chain.nodes[-1]
        if node.last_k_succ is None or not node.last_k_total:
            return 1.0
        rate = node.last_k_succ / node.last_k_total
        return 4 * rate * (1 - rate)

    def draw(self, n: int, step: int, random: np.random.Generator) -> list[Chain]:
        """Draws min(n, learning) different chains by weight and stamps their active nodes."""
        learning = self.learning()
        weights = np.array([self.weight(chain) for chain in learning])
        if n <= 0 or weights.sum() <= 0:
            return []
        chosen = [learning[i] for i in base.weighted_sample(weights, n, random)]
        for chain in chosen:
            chain.nodes[-1].last_used_step = step
        return chosen

    def sample(self, n: int, step: int) -> list[State]:
        base.check_step(step)
        with self.lock:
            chains = self.draw(n, step, base.generator(self.seed, step, STATES))
            return [State(ids=chain.nodes[-1].ids, problem=chain.problem, node=chain.number) for chain in chains]

    #### The teacher

    def pending(self) -> int:
        """Number of chains that wait for the teacher and have a failure for it."""
        with self.lock:
            chains = [self.chains[key] for key in set(self.queue)]
            return sum(chain.state == DEEPENING and bool(chain.nodes[-1].failed) for chain in chains)

    def next_in_queue(self) -> Chain | None:
        """Takes the queue's head; None if it has nothing for the teacher, and is given up. Called under the lock."""
        chain = self.chains[self.queue.popleft()]
        if chain.state != DEEPENING or chain.in_flight is not None:
            return None
        if not chain.to_try():
            self._give_up(chain, chain.last_updated_step)
            return None
        return chain

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        """Hands out failures, one of a chain: of the chains first come first, of each the longest response first."""
        failures: list[Failure] = []
        with self.lock:
            while self.queue and len(failures) < max_items:
                if (chain := self.next_in_queue()) is not None:
                    failed = chain.to_try()[0]
                    chain.in_flight = failed.event
                    self.in_flight[failed.event] = chain
                    failures.append(Failure(failed.event, chain.problem, chain.nodes[-1].ids, failed.response_ids, failed.step))
        return failures

    def requeue(self, failure: Failure) -> None:
        """Puts a failure in flight back: its chain is the next one served."""
        with self.lock:
            if (chain := self.in_flight.pop(failure.failure_id, None)) is not None:
                chain.in_flight = None
                self.queue.appendleft(base.tree_key(chain.problem.prompt_ids))

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Takes in the teacher's answer to a dispatched failure; an empty shared prefix is none.

        Returns "stale" (not in flight), "next_failure" (the chain's next one is tried at once), or as `deepen` does.
        """
        with self.lock:
            chain = self.in_flight.pop(failure.failure_id, None)
            if chain is None:
                return "stale"
            chain.in_flight = None
            if correction is not None and len(correction.prefix_ids):
                return self.deepen(chain, np.concatenate([failure.state_ids, correction.prefix_ids]), step)
            chain.tried += 1
            if chain.to_try():
                self.queue.appendleft(base.tree_key(chain.problem.prompt_ids))
                return "next_failure"
            return self.deepen(chain, None, step)

    def deepen(self, chain: Chain, state_ids: Ids | None, step: int) -> str:
        """Takes in the teacher's last word on a chain that waits for it: a new state, or none. Called under the lock.

        The state need only extend the prompt and be longer than the chain's deepest one (the reference); one that `resolve` makes
        extends the active state. Returns "ignored" (the chain does not wait), "deepened" or "abandoned".
        """
        if chain.state != DEEPENING:
            return "ignored"
        prompt = chain.problem.prompt_ids
        if state_ids is None or not len(state_ids):
            return self._give_up(chain, step)
        if not np.array_equal(state_ids[: len(prompt)], prompt):
            return self._give_up(chain, step, "prefix")
        if len(state_ids) <= len(chain.nodes[-1].ids):
            return self._give_up(chain, step, "depth")
        if len(state_ids) > self.max_state_len:
            return self._give_up(chain, step, "length")
        chain.nodes.append(ChainNode(base.frozen_ids(state_ids)))
        chain.move(LEARNING, step)
        self.counts["teacher_successes"] += 1
        return "deepened"

    def _give_up(self, chain: Chain, step: int, invalid: str | None = None) -> str:
        if invalid is not None:
            self.counts[f"teacher_invalid_{invalid}"] += 1
        chain.move(ABANDONED, step)
        self.counts["abandoned_cumulative"] += 1
        return "abandoned"

    #### Looking in, persistence

    def metrics(self) -> Mapping[str, float]:
        with self.lock:
            chains = list(self.chains.values())
            lengths = [len(chain.nodes) for chain in chains]
            tokens = [len(node.ids) for chain in chains for node in chain.nodes]
            depths = [len(node.ids) - len(chain.problem.prompt_ids) for chain in chains for node in chain.nodes]
            states = collections.Counter(chain.state for chain in chains)
            counts = {"size": len(chains), "learning": states[LEARNING], "deepening": states[DEEPENING]}
            counts |= {"completed": states[COMPLETED], "abandoned": states[ABANDONED], "total_nodes": len(tokens)}
            for name, values in (("chain_len", lengths), ("depth", depths), ("aug_prompt_len", tokens)):
                counts |= {f"avg_{name}": sum(values) / max(len(values), 1), f"max_{name}": max(values, default=0)}
            counts |= {name: self.counts[name] for name in COUNTERS} | {"deepening_queue_size": len(self.queue)}
            return base.named("chain_pool", counts)

    def saved(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        places = {key: i for i, key in enumerate(self.chains)}
        with_teacher = [base.tree_key(chain.problem.prompt_ids) for _, chain in sorted(self.in_flight.items())]  # first again
        nodes = [node for chain in self.chains.values() for node in chain.nodes]
        chains = [(*_of_chain(chain), list(chain.transitions), len(chain.nodes)) for chain in self.chains.values()]
        return {
            "chains": Saved(chains, self.counts.copy()),
            "chain_nodes": Saved([(*_of_node(node), len(node.failed)) for node in nodes]),
            "chain_failures": Saved([failed for node in nodes for failed in node.failed]),
            "chain_queue": Saved([(places[key],) for key in (*with_teacher, *self.queue)]),
        }, {}

    def load(self, tables: Mapping[str, Saved], fields: Mapping[str, Any]) -> None:
        """Chains that were with the teacher wait again: dispatched ones first, drained ones last."""
        self.counts, self.in_flight = saved_counts(tables["chains"].numbers, self.counts), {}
        nodes, failures = iter(tables["chain_nodes"].rows), iter(tables["chain_failures"].rows)
        self.chains = {}
        for row in tables["chains"].rows:
            chain = Chain(*row[: len(_OF_CHAIN)])
            chain.transitions.extend(map(tuple, row.transitions))
            for node in itertools.islice(nodes, row.num_nodes):
                chain.nodes.append(ChainNode(*node[:-1], failed=list(itertools.islice(failures, node.num_failed))))
            if chain.state not in (LEARNING, DEEPENING, COMPLETED, ABANDONED) or not (chain.nodes or chain.state == COMPLETED):
                raise ValueError(f"chain {chain.number} without a state, or in the unknown state {chain.state!r}")
            self.chains[base.tree_key(row.problem.prompt_ids)] = chain
        keys, places = list(self.chains), [row.chain for row in tables["chain_queue"].rows]
        if len(keys) < len(tables["chains"].rows) or not all(0 <= place < len(keys) for place in places):
            raise ValueError("two chains of one prompt, or a queue of chains that there are not")
        if next(failures, None) or next(nodes, None):
            raise ValueError("more nodes than the chains, or more failures than the nodes, say that they have")
        self.queue = collections.deque(keys[place] for place in places)
        self.queue += [key for key, chain in self.chains.items() if chain.state == DEEPENING and key not in set(self.queue)]
