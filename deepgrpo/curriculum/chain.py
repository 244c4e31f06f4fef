"""The chain pool as the training loop's curriculum: a prompt that fails as a whole starts a chain, the teacher deepens it.

Rules: `chain_pool`. Here: which groups of a step become which observations.
"""

import threading
from collections.abc import Mapping, Sequence

import ml_collections

from deepgrpo.curriculum.base import Correction, Curriculum, Failure, State
from deepgrpo.curriculum.chain_pool import FILES, ChainPool
from deepgrpo.curriculum.feedback import (
    check_failures,
    check_step,
    failures_for_teacher,
    injection_metrics,
    judged_groups,
    wanted_failures,
)
from deepgrpo.curriculum.header import as_saved, read_header, write_header
from deepgrpo.curriculum.saved_rows import read_saved, write_saved
from deepgrpo.curriculum.weighted import STATES, generator
from deepgrpo.learner.minibatch import injection_count
from deepgrpo.types import Group, Ids

POOL, VERSION = "chain", 1


class ChainCurriculum(Curriculum):
    """`base.Curriculum` on a `ChainPool`, under one lock."""

    def __init__(
        self,
        pool: ChainPool,
        *,
        seed: int,
        threshold: float,
        failures: str = "all",
        injection_ratio: float = 0.25,
        strict_reference: bool = False,
    ):
        """Args:
        threshold: success is reward > threshold. failures: see `feedback.failures_for_teacher`.
        injection_ratio, strict_reference: see `minibatch.injection_count`.
        """
        check_failures(failures)
        self.pool = pool
        self._seed, self._threshold, self._failures = seed, threshold, failures
        self._ratio, self._strict = injection_ratio, strict_reference
        self._lock = threading.Lock()

    def wanted(self, batch_size: int) -> int:
        with self._lock:
            return injection_count(batch_size, self._ratio, len(self.pool.learning()), self._strict)

    def sample(self, n: int, step: int) -> list[State]:
        check_step(step)
        with self._lock:
            chains = self.pool.sample(n, step, generator(self._seed, step, STATES))
            return [State(ids=chain.nodes[-1].ids, problem=chain.problem, node=chain.number) for chain in chains]

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Feeds a step's groups: injected ones to their chains, then dataset ones that failed as a whole, which start chains.

        Rollouts without a verdict count neither way; a group with too few (`Group.judged`) is left out.
        """
        check_step(step)
        judged = judged_groups(groups, self._threshold)
        seen = dict.fromkeys(("observations_recorded", "main_failures_seen", "main_failures_enqueued"), 0)
        with self._lock:
            for group, k_succ, k_total in judged:
                if group.prompt.injected and (k_succ or self._failures != "none"):  # without a teacher no chain deepens
                    failed = None if k_succ else self._to_teacher(group)
                    prompt_ids = group.prompt.problem.prompt_ids
                    seen["observations_recorded"] += self.pool.observe(prompt_ids, k_succ, k_total, step, failed)
            for group, k_succ, _ in judged:
                if not group.prompt.injected and not k_succ and self._failures != "none":
                    seen["main_failures_seen"] += 1
                    seen["main_failures_enqueued"] += self.pool.main_failure(group.prompt.problem, self._to_teacher(group), step)
        counts = {f"chain_pool/{name}_this_step": float(value) for name, value in seen.items()}
        return injection_metrics(groups, judged) | counts

    def _to_teacher(self, group: Group) -> list[Ids]:
        return [rollout.completion.ids for rollout in failures_for_teacher(group, self._threshold, self._failures)]

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        """Hands out at most `max_items` failures, at most one a chain."""
        with self._lock:
            return self.pool.dispatch(max_items)

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        """Returns the outcome's name (`ChainPool.resolve` lists them)."""
        with self._lock:
            return self.pool.resolve(failure, correction, step)

    def requeue(self, failure: Failure) -> None:
        with self._lock:
            self.pool.requeue(failure.event)

    def pending(self) -> int:
        with self._lock:
            return self.pool.pending()

    def metrics(self) -> Mapping[str, float]:
        with self._lock:
            return self.pool.metrics()

    def state(self, folder: str) -> None:
        with self._lock:
            saved = self.pool.saved()
        for name, rows in saved.items():
            write_saved(folder, name, rows)
        write_header(folder, POOL, VERSION, {})

    def restore(self, folder: str) -> None:
        read_header(folder, POOL, VERSION)
        saved = {name: read_saved(folder, name, record) for name, record in FILES.items()}
        with as_saved(folder), self._lock:
            self.pool.load(saved)


def create(config: ml_collections.ConfigDict) -> ChainCurriculum:
    """Builds the curriculum from the whole configuration."""
    curriculum = config.curriculum
    pool = ChainPool(max_state_len=config.rollout.max_model_len - curriculum.min_remaining_tokens)
    return ChainCurriculum(
        pool,
        seed=config.seed,
        threshold=config.rewards.threshold,
        failures=wanted_failures(config),
        injection_ratio=curriculum.injection_ratio,
        strict_reference=config.strict_reference,
    )
