"""Trees with both engines: what is joined from several requests is what one policy would have sampled in one."""

import numpy as np
import pytest

from deepgrpo.loops import treerl
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rollout.engine import Request
from deepgrpo.types import Problem, Prompt
from tests.loops.scripted import LastTokenGrader, NumberTokenizer
from tests.rollout import tiny
from tests.rollout.vllm_rig import Rig, weights

SHAPE = (2, 1, 2, 2)
SAMPLING = tiny.plain(48, stop_ids=(3, 4), temperature=1.2)


def grown(engine):
    ids = [request.prompt_ids for request in tiny.make_requests([4, 9])]
    prompts = [Prompt(p, Problem(i, "toy", p, None, ""), 1, f"1:{i}") for i, p in enumerate(ids)]
    return treerl.run(SHAPE, RolloutContext(engine, LastTokenGrader(), NumberTokenizer(), SAMPLING, 0, 10.0), prompts, 1, "train")


def responses(groups):
    return [r.completion.ids.tolist() for group in groups for r in group.rollouts]


@pytest.fixture(params=["native", "vllm"])
def engine(request, tmp_path):
    if request.param == "native":
        yield tiny.make_engine(weights(0), slots=8)
        return
    rig = Rig(tmp_path)
    yield rig.engine
    rig.close()


def test_log_probs_of_forked_responses_are_the_learners(engine):
    groups = grown(engine)
    forked = [r for group in groups for r in group.rollouts if r.shared]
    assert len({r.shared for r in forked}) > 2 and all(len(r.completion.ids) > r.shared for r in forked)
    for group in groups:
        request = Request(group.prompt.ids, (0,))
        for rollout in group.rollouts:
            expected = tiny.learner_logps(weights(0), request, rollout.completion, SAMPLING)
            np.testing.assert_allclose(rollout.completion.logps, expected, rtol=0, atol=1e-4)
    assert responses(grown(engine)) == responses(groups)
