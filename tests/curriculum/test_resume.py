"""Every pool: a resumed run does what an uninterrupted one does, and equal content makes equal files."""

import numpy as np
import pytest

from deepgrpo.curriculum import POOLS
from deepgrpo.types import Completion, Grade, Group, Prompt, Rollout, as_ids
from tests.curriculum.made import content, correction, create, problem, saved


def answered(prompt: Prompt, rewards, step: int) -> Group:
    ids = [as_ids([10 + i, 20 + step, 30, 40]) for i in range(len(rewards))]
    completions = [Completion(one, np.zeros(4, np.float32), "stop", 0) for one in ids]
    return Group(prompt, tuple(Rollout(c, Grade(float(r), True, "")) for c, r in zip(completions, rewards, strict=True)))


def drive(pool, steps) -> list:
    """A trace of some steps. Of the failures that the teacher gets, the first stays in flight and the others are corrected."""
    trace = []
    for step in steps:
        states = pool.sample(pool.num_to_inject(8), step)
        prompts = [Prompt(s.ids, s.problem, 3, f"{step}:state:{i}", s.node, s.stream) for i, s in enumerate(states)]
        rows = [problem(i, (1, 2, 3 + i)) for i in range(4)]
        groups = [answered(Prompt(row.prompt_ids, row, 3, f"{step}:{row.index}"), [0, 0, row.index == 0], step) for row in rows]
        prompts += pool.expand(groups, step)
        suffixes = [None if (known := pool.continuation(s.node)) is None else known[0].tolist() for s in states]
        groups += [answered(prompt, [(len(prompt.ids) + i + step) % 3 == 0 for i in range(3)], step) for prompt in prompts]
        metrics = pool.observe(groups, step)
        for failure in pool.dispatch(5, step)[1:]:
            pool.resolve(failure, correction(failure, 1 + step % 3), step)
        trace.append(([prompt.ids.tolist() for prompt in prompts], suffixes, metrics, dict(pool.metrics())))
    return trace


@pytest.mark.parametrize("pool", POOLS)
def test_resumes_bit_for_bit(pool, tmp_path):
    def made():
        return create(pool, injection_ratio=0.5, branches__tokens_per_node=2, branches__batch_threshold=2)

    first, second = made(), made()
    begun = drive(first, range(1, 7))
    folder = tmp_path / "a"
    files = saved(first, folder)
    for resumed in (first, second) if first.asks_teacher else (second,):  # what was in flight waits again, in both
        resumed.restore(str(folder))
    assert saved(second, tmp_path / "b") == saved(first, tmp_path / "c") and content(folder) == files
    trace = drive(second, range(7, 12))
    assert trace == drive(first, range(7, 12))
    assert any(prompts for prompts, *_ in begun) == any(prompts for prompts, *_ in trace) == (pool != "none")
    assert made().metrics() != second.metrics() or pool == "none"
