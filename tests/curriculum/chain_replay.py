"""Drives a `ChainPool` with the operations of recorded traces, in their vocabulary: chains are named by their prompts."""

import numpy as np

from deepgrpo.curriculum.chain_pool import FILES, LEARNING, ChainPool
from deepgrpo.types import as_ids
from tests.curriculum.replay import DRAWS, TOLERANCE, Replay, inclusion, problem, reloaded


class ChainReplay(Replay):
    """Failed rollouts are told apart by their ids: rollout r3 of length 4 is [3, 3, 3, 3]. Agent names are not the pool's."""

    prefix = "chain_pool/"

    def create(self, config):
        return ChainPool(**config)

    def _responses(self, failed):
        return None if failed is None else [as_ids([int(f["rollout"][1:])] * f["response_len"]) for f in failed]

    def _labels(self, failed):
        return [f"r{f.response_ids[0]}" for f in failed]

    def main_failure(self, prompt, failed, step):
        return self.pool.main_failure(problem(prompt), self._responses(failed), step)

    def weights(self):
        return [self._named(chain) | {"weight": self.pool.weight(chain)} for chain in self.pool.learning()]

    def _named(self, chain):
        return {"prompt": chain.problem.prompt_ids.tolist(), "node": chain.nodes[-1].ids.tolist()}

    def sample(self, n, step):
        return [self._named(chain) for chain in self.pool.sample(n, step, self.random)]

    def sample_distribution(self, n):
        learning = self.pool.learning()
        exact = inclusion([self.pool.weight(chain) for chain in learning], n)
        clocks = [chain.nodes[-1].last_used_step for chain in learning]
        seen = sum(
            np.isin(np.arange(len(learning)), [learning.index(c) for c in self.pool.sample(n, 0, self.random)])
            for _ in range(DRAWS)
        )
        for chain, clock in zip(learning, clocks, strict=True):
            chain.nodes[-1].last_used_step = clock
        np.testing.assert_allclose(seen / DRAWS, exact, atol=TOLERANCE)
        names = [chain.problem.prompt_ids.tolist() for chain in learning]
        return [{"prompt": p, "inclusion_probability": e} for p, e in zip(names, exact, strict=True)]

    def observe(self, prompt, k_succ, k_total, step, failed):
        self.pool.observe(as_ids(prompt), k_succ, k_total, step, self._responses(failed))

    def drain_teacher_queue(self):
        return [{"prompt": c.problem.prompt_ids.tolist(), "rollouts": self._labels(f)} for c, f in self.pool.drain()]

    def teacher_result(self, prompt, new_state_ids, success, step):
        state_ids = None if new_state_ids is None else as_ids(new_state_ids)
        self.pool.teacher_result(as_ids(prompt), state_ids, step, success=success)

    def save_load(self):
        saved = {name: reloaded(rows, FILES[name]) for name, rows in self.pool.saved().items()}
        self.pool = self.create(self.config)
        self.pool.load(saved)

    def snapshot(self):
        return [self._chain(chain) for chain in self.pool.chains()]

    def _chain(self, chain):
        if chain.state == LEARNING:
            last = chain.nodes[-1]
            assert not last.last_k_total or 0 < last.last_k_succ < last.last_k_total
        prompt = chain.problem.prompt_ids
        kept = ("observations", "last_k_succ", "last_k_total", "first_observed_step", "last_used_step")
        nodes = [
            {"node": node.ids.tolist(), "depth": len(node.ids) - len(prompt), "agent_name": "ag2" if i else "ag"}
            | {"failed": self._labels(node.failed)}
            | {name: getattr(node, name) for name in kept}
            for i, node in enumerate(chain.nodes)
        ]
        steps = {"created_step": chain.created_step, "last_updated_step": chain.last_updated_step}
        transitions = [list(transition) for transition in chain.transitions]
        named = {"prompt": prompt.tolist(), "state": chain.state, "active_idx": len(chain.nodes) - 1}
        return named | steps | {"transitions": transitions, "nodes": nodes}
