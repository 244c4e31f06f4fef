"""Trees of responses with scripted and with real engines."""

import collections
import dataclasses

import numpy as np
import pytest

from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.rows import group_advantages
from deepgrpo.loops import reasoning, treerl
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rollout.engine import Sampling
from deepgrpo.types import Completion, Grade, Problem, Prompt, as_ids
from tests.conftest import golden_cases
from tests.loops.scripted import EOS, LastTokenGrader, NumberTokenizer


class Engine:
    """Answers each request through `answer(prompt ids, how often it was asked)`; remembers requests, a list a call."""

    version = 3

    def __init__(self, answer):
        self.answer, self.asked, self.calls = answer, collections.Counter(), []

    def generate(self, requests, sampling, on_done=None):
        self.calls.append(requests)
        results = [[None] * len(request.seeds) for request in requests]
        for i, request in enumerate(requests):
            for j in range(len(request.seeds)):
                prompt = tuple(request.prompt_ids.tolist())
                ids, logps, reason = self.answer(prompt, self.asked[prompt])
                self.asked[prompt] += 1
                room = sampling.max_model_len - len(prompt)
                ids, logps = as_ids(ids[:room]), np.array(logps[:room], np.float32)
                results[i][j] = Completion(ids, logps, reason, self.version)
        # They end in another order than that of the requests.
        for i, j in reversed([(i, j) for i, found in enumerate(results) for j in range(len(found))]):
            on_done(i, j, results[i][j])
        return results


def scripted(script) -> Engine:
    known = {tuple(entry["prompt_ids"]): entry["completions"] for entry in script}

    def answer(prompt, times):
        entry = known[prompt][times % len(known[prompt])]
        return entry["token_ids"], entry["logprobs"], entry["finish_reason"]

    return Engine(answer)


def random_engine(seed=0, aborts=0.0) -> Engine:
    """Responses of some 30 tokens that mostly end in 7 or 6 and the end token; now and then one is aborted."""
    rng = np.random.default_rng(seed)

    def answer(prompt, times):
        ids = [*rng.integers(10, 90, rng.integers(2, 60)).tolist(), int(rng.choice([6, 7])), EOS]
        return ids, -rng.exponential(size=len(ids)), "abort" if rng.random() < aborts else "stop"

    return Engine(answer)


def setting(engine, max_model_len=64, grading=None) -> RolloutContext:
    return RolloutContext(
        engine, grading or LastTokenGrader(), NumberTokenizer(), Sampling(1.0, 1.0, -1, (EOS,), max_model_len), 5, 10.0
    )


def prompt(ids=(1, 2), name="1:0") -> Prompt:
    problem = Problem(0, "scripted", as_ids(ids), None, "")
    return Prompt(problem.prompt_ids, problem, 8, name)


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"treerl_full_rollout"}))
def test_golden_rollout(case):
    inputs, expected = case["inputs"], case["expected"]
    shape = (inputs["M"], inputs["N"], inputs["L"], inputs["T"])
    parties = setting(scripted(inputs["script"]), inputs["max_model_len"])
    groups = treerl.run(shape, parties, [prompt(inputs["prompt_ids"])], 1, "train")
    rows = rows_lib.rows_from_groups(groups, "group_mean")
    found = [(row.prompt_ids.tolist(), row.response_ids.tolist(), row.reward) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: found[i])
    theirs = sorted(expected["rows"], key=lambda row: (row["prompt_ids"], row["response_ids"], row["reward"]))
    assert [found[i] for i in order] == [(row["prompt_ids"], row["response_ids"], row["reward"]) for row in theirs]
    close = {"abs": case["tolerance"]["atol"], "rel": case["tolerance"]["rtol"]}
    for i, row in zip(order, theirs, strict=True):
        assert rows[i].advantage == pytest.approx(row["token_level_advantages"], **close)
        assert rows[i].mean_advantage == pytest.approx(row["advantage"], **close)
        assert row["response_mask"] == [1] * len(rows[i].response_ids)
    assert expected["n_branch_rows"] == sum(row.source != rows_lib.MAIN for row in rows)


@pytest.mark.parametrize("shape", [(3, 2, 1, 2), (2, 3, 3, 1), (2, 1, 0, 2)], ids=str)
def test_every_response_is_whole_and_every_seed_its_own(shape):
    M, N, L, T = shape
    engine, prompts = random_engine(), [prompt((1, 2), "4:0"), prompt((3, 4, 5), "4:1")]
    groups = treerl.run(shape, setting(engine), prompts, 4, "train")
    assert [group.prompt.group_id for group in groups] == ["4:0", "4:1"] and len(engine.calls) <= 1 + L
    requests = [request for call in engine.calls for request in call]
    seeds = [seed for request in requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == sum(len(group.rollouts) for group in groups)
    assert all(len(request.prompt_ids) < 64 - 10 for request in requests)
    for group in groups:
        known = {tuple(r.completion.ids.tolist()): r for r in group.rollouts}
        assert len(group.rollouts) == group.prompt.n <= M * (1 + N * L * T)
        assert sum(r.shared == 0 for r in group.rollouts) == M
        for rollout in group.rollouts:
            ids, logps = rollout.completion.ids, rollout.completion.logps
            assert len(ids) == len(logps) == len(rollout.advantages) <= 64 - len(group.prompt.ids) and ids.dtype == np.int32
            assert rollout.grade.reward == float(len(ids) > 1 and ids[-2] == 7 and rollout.completion.finish_reason == "stop")
            if rollout.shared:  # some other response goes through the same tokens, and was as sure of them
                twins = [
                    r
                    for other, r in known.items()
                    if r is not rollout and other[: rollout.shared] == tuple(ids[: rollout.shared])
                ]
                assert twins and all((twin.completion.logps[: rollout.shared] == logps[: rollout.shared]).all() for twin in twins)
                assert all((twin.advantages[:1] == rollout.advantages[:1]).all() for twin in twins)
    sampled = sum(r.sampled for group in groups for r in group.rollouts)
    assert sampled == sum(len(r.completion.ids) - r.shared for group in groups for r in group.rollouts) > 0


def test_forks_are_at_the_least_likely_tokens_of_leaf_segments():
    """Round 1 splits the response at 20 and 30, not near its ends; round 2 takes tokens behind 30 only, if only just."""
    logps = np.full(100, -0.1)
    logps[[4, 95, 20, 30, 25, 31, 45]] = -20, -20, -9, -8, -7, -5, -4

    def answer(prompt, times):
        return (range(100, 200), logps, "stop") if len(prompt) == 2 else (range(200, 215), np.full(15, -0.01), "stop")

    engine = Engine(answer)
    (group,) = treerl.run((1, 2, 2, 1), setting(engine, 200), [prompt()], 1, "train")
    lengths = [[len(request.prompt_ids) - 2 for request in call] for call in engine.calls]
    assert lengths == [[0], [20, 30], [31, 45]] and [r.shared for r in group.rollouts] == [0, 45, 31, 30, 20]
    assert engine.calls[2][0].prompt_ids.tolist() == [1, 2, *range(100, 131)]


def test_aborted_and_unjudged_responses():
    """What was aborted does not exist; what has no verdict stays in the group, without part in any value."""

    class Grading(LastTokenGrader):
        def submit(self, answer):
            future = super().submit(answer)
            if answer.response.startswith(("1", "2", "3")):
                future.result = lambda: Grade(None, False, "timeout")
            return future

    (group,) = treerl.run((4, 2, 2, 2), setting(random_engine(3, aborts=0.3), 64, Grading()), [prompt()], 1, "train")
    assert all(r.completion.finish_reason != "abort" for r in group.rollouts)
    judged = group.verdicts()
    assert 0 < len(judged) < len(group.rollouts) and all((r.advantages is None) == (r.reward is None) for r in group.rollouts)
    rows = rows_lib.rows_from_groups([group], "group_mean")
    assert len(rows) == len(judged) and len({id(row.advantage) for row in rows}) == len(rows)
    metrics = rows_lib.tree_metrics([group])
    assert metrics["treerl/leaves"] == len(judged) and 0 < metrics["treerl/forked_share"] < 1
    (nothing,) = treerl.run((2, 1, 1, 1), setting(random_engine(aborts=1.0)), [prompt()], 1, "train")
    assert nothing.rollouts == () and rows_lib.rows_from_groups([nothing], "group_mean") == []


def test_a_prompt_without_room_gives_empty_answers():
    engine = Engine(lambda prompt, times: ([], [], "length"))
    (group,) = treerl.run((2, 1, 1, 1), setting(engine, 2), [prompt()], 1, "train")
    assert [len(r.completion.ids) for r in group.rollouts] == [0, 0] and len(engine.calls) == 1
    assert rows_lib.keep_rows(rows_lib.rows_from_groups([group], "group_mean")) == []


@pytest.mark.parametrize("purpose", ["validation", "evaluation:gsm8k:0", "train", "train/1"])
def test_what_only_measures_is_a_plain_rollout(purpose):
    seen = []

    class Grading(LastTokenGrader):
        def submit(self, answer):
            seen.append(answer.validation)
            return super().submit(answer)

    prompts = [dataclasses.replace(prompt(), n=2)]
    (ours,) = treerl.run((6, 2, 1, 2), setting(random_engine(), grading=Grading()), prompts, 7, purpose)
    if purpose.startswith("train"):
        assert len(ours.rollouts) > 6 and not any(seen)
        return
    (plain,) = reasoning.run(setting(random_engine()), prompts, 7, purpose)
    assert [r.completion.ids.tolist() for r in ours.rollouts] == [r.completion.ids.tolist() for r in plain.rollouts]
    assert seen == [True, True] and ours.rollouts[0].advantages is None


def test_trees_without_forks_are_a_group():
    (group,) = treerl.run((8, 1, 0, 1), setting(random_engine(4)), [prompt()], 1, "train")
    rewards = np.array([r.reward for r in group.rollouts])
    assert 0 < rewards.mean() < 1
    for rollout, advantage in zip(group.rollouts, group_advantages(rewards, [0] * 8, "group_mean"), strict=True):
        np.testing.assert_allclose(rollout.advantages, np.full(len(rollout.completion.ids), advantage), rtol=1e-12)
