"""The vLLM engine against a fake server: what it asks for, what it believes, and what a failing server costs."""

import asyncio

import numpy as np
import pytest

from deepgrpo.rollout.engine import Request
from deepgrpo.rollout.vllm_fleet import Deadlines
from deepgrpo.rollout.vllm_http import VllmError
from deepgrpo.types import as_ids
from tests.rollout import tiny
from tests.rollout.fake_vllm import Knobs
from tests.rollout.vllm_rig import Rig, weights


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**settings):
        made.append(Rig(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def flat(completions):
    return [completion for group in completions for completion in group]


def logps_are_the_learners(requests, completions, sampling, params):
    for request, group in zip(requests, completions, strict=True):
        for completion in group:
            expected = tiny.learner_logps(params, request, completion, sampling)
            np.testing.assert_allclose(completion.logps, expected, rtol=0, atol=1e-4)


def test_the_sampled_distribution_is_the_one_whose_log_probs_come_back(rig):
    one, requests = rig(), tiny.make_requests([1, 9, 14], samples=2, max_tokens=3)
    for temperature in (0.6, 1.0, 1.3):
        for top_p in (1.0, 0.9):
            for top_k in (-1, 20):
                sampling = tiny.plain(temperature=temperature, top_p=top_p, top_k=top_k)
                logps_are_the_learners(requests, one.engine.generate(requests, sampling), sampling, weights(0))


def test_requests_say_everything_and_ids_are_verbatim(rig):
    one = rig()
    requests, sampling = tiny.make_requests([5, 12], samples=3), tiny.plain(stop_ids=(3, 4), temperature=0.7)
    completions = one.engine.generate(requests, sampling)
    bodies = one.fakes[0].bodies("/deepgrpo/generate")
    assert sorted(body["token_ids"] for body in bodies) == sorted(request.prompt_ids.tolist() for request in requests)
    for body in bodies:
        p = body["sampling_params"]
        assert (p["n"], p["temperature"], p["top_p"], p["top_k"], p["min_p"], p["logprobs"]) == (3, 0.7, 1.0, 0, 0.0, 0)
        assert p["repetition_penalty"] == 1.0 and p["presence_penalty"] == p["frequency_penalty"] == 0.0
        assert p["stop_token_ids"] == [3, 4] and p["ignore_eos"] and "logit_bias" not in p
        assert p["max_tokens"] == 32 - len(body["token_ids"]) and body["cache_salt"] == "run.0"
    assert len({body["sampling_params"]["seed"] for body in bodies}) == 2
    for completion in flat(completions):
        assert completion.ids.max() < tiny.REAL and completion.version == 0 and not completion.ids.flags.writeable
        assert (completion.finish_reason == "stop") == (completion.ids[-1] in (3, 4))


def test_a_request_without_samples_is_not_sent(rig):
    one, (asked, other) = rig(), tiny.make_requests([5, 12], samples=2, max_tokens=3)
    completions = one.engine.generate([Request(other.prompt_ids, ()), asked], tiny.plain())
    assert [len(group) for group in completions] == [0, 2] and len(one.fakes[0].bodies("/deepgrpo/generate")) == 1


def test_seeds_decide_the_samples(rig):
    one, requests = rig(servers=2), tiny.make_requests([6, 6, 6], samples=4, max_tokens=6)
    first, again = (one.engine.generate(requests, tiny.plain()) for _ in range(2))
    ids = [tuple(c.ids.tolist()) for c in flat(first)]
    assert ids == [tuple(c.ids.tolist()) for c in flat(again)] and len(set(ids)) == 12
    other = [Request(r.prompt_ids, tuple(s + 1000 for s in r.seeds), 6) for r in requests]
    assert not set(ids) & {tuple(c.ids.tolist()) for c in flat(one.engine.generate(other, tiny.plain()))}


def test_greedy_samples_are_one(rig):
    one, request = rig(), tiny.make_requests([6], samples=3, max_tokens=4)[0]
    completions = one.engine.generate([request], tiny.plain(temperature=0.0))[0]
    assert one.fakes[0].bodies("/deepgrpo/generate")[0]["sampling_params"]["n"] == 1
    assert len({tuple(c.ids.tolist()) for c in completions}) == 1 and len(completions) == 3
    logps_are_the_learners([request], [completions], tiny.plain(), weights(0))


def test_room_at_the_edge_of_the_context(rig):
    one, seen = rig(), {}
    requests = tiny.make_requests([15, 16, 17], samples=2)
    completions = one.engine.generate(requests, tiny.plain(16), on_done=lambda i, j, c: seen.setdefault((i, j), c))
    assert [[(len(c.ids), c.finish_reason) for c in group] for group in completions] == [
        [(1, "length")] * 2,
        [(0, "length")] * 2,
        [(0, "length")] * 2,
    ]
    assert len(one.fakes[0].bodies("/deepgrpo/generate")) == 1
    assert seen == {(i, j): c for i, group in enumerate(completions) for j, c in enumerate(group)}


@pytest.mark.parametrize("knob", ["drop", "error", "abort", "shorten"])
def test_what_went_wrong_is_asked_again(rig, knob):
    one = rig()
    requests, sampling = tiny.make_requests([4, 5, 6, 7], samples=2, max_tokens=4), tiny.plain()
    expected = one.engine.generate(requests, sampling)
    setattr(one.fakes[0].knobs, knob, 3)
    found = one.engine.generate(requests, sampling)
    assert [c.ids.tolist() for c in flat(found)] == [c.ids.tolist() for c in flat(expected)]
    metrics = one.engine.metrics()
    assert metrics["engine/retries"] == 3 and one.fakes[0].restarts == 0
    kind = {"drop": "transport", "error": "server_errors", "abort": "aborted", "shorten": "incomplete"}[knob]
    assert metrics[f"engine/{kind}"] == 3


def test_a_killed_server_loses_no_rollout(rig):
    one, requests = rig(servers=2), tiny.make_requests(range(3, 13), samples=2, max_tokens=3)
    one.fakes[1].knobs.die_after = 2
    completions = one.engine.generate(requests, tiny.plain())
    logps_are_the_learners(requests, completions, tiny.plain(), weights(0))
    assert one.fakes[1].restarts == 1 and one.engine.metrics()["engine/restarts"] == 1
    assert one.fakes[1].version == "0"  # it came back with the present weights, proven


def test_an_only_server_comes_back_too_and_a_hung_one_is_restarted(rig):
    one, requests = rig(request_deadline=5.0), tiny.make_requests(range(3, 9), samples=1, max_tokens=2)
    one.fakes[0].knobs.hang = 4  # all that are in flight at once
    completions = one.engine.generate(requests, tiny.plain())
    assert len(flat(completions)) == 6 and one.fakes[0].restarts >= 1
    assert one.engine.metrics()["engine/timeouts"] >= 1


class Clock:
    """Passes only while the engine sleeps, a moment of real time for each sleep."""

    now, moment = 0.0, 0.01

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        await asyncio.sleep(self.moment)


@pytest.mark.parametrize("attached", [False, True])
def test_a_slow_server_is_not_a_hung_one(rig, attached):
    """Its answer takes 50 looks of 15 s, six times the deadline for a token, and a token is new at each."""
    one, clock = rig(request_deadline=120.0, attached=attached), Clock()
    one.engine.clock, one.engine.sleep = clock, clock.sleep
    one.fakes[0].knobs.slow = 50
    completions = one.engine.generate(tiny.make_requests([4, 5], samples=2, max_tokens=2), tiny.plain())
    assert len(flat(completions)) == 4 and clock.now >= 50 * 15
    metrics = one.engine.metrics()
    assert (one.fakes[0].restarts, metrics["engine/retries"], metrics["engine/timeouts"], metrics["engine/recoveries"]) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("no_metrics", [False, True])
def test_a_frozen_server_is_noticed_within_the_deadline(rig, no_metrics, caplog):
    one, clock = rig(request_deadline=120.0, deadlines=Deadlines(control=1.0, load=5.0, start=5.0)), Clock()
    one.engine.clock, one.engine.sleep, clock.moment = clock, clock.sleep, 0.3
    one.fakes[0].knobs.hang, one.fakes[0].knobs.no_metrics = 100, no_metrics
    restart, noticed = one.fakes[0].restart, []

    def heal(*args):
        one.fakes[0].knobs.hang = 0
        noticed.append(clock.now)
        restart(*args)

    one.fakes[0].restart = heal
    completions = one.engine.generate(tiny.make_requests([4], samples=2, max_tokens=2), tiny.plain())
    assert len(flat(completions)) == 2 and one.fakes[0].restarts == 1
    assert 120 < noticed[0] <= 120 + 3 * 15 and "the server made no token for 120 s" in caplog.text


def test_a_busy_server_whose_metrics_are_hidden_shows_tokens_of_its_own(rig):
    """Without counters each look asks for one token, as long as that is answered."""
    one = rig()
    one.fakes[0].knobs.no_metrics = True
    assert [one.fleet.progress(one.fleet.replicas[0]) for _ in range(2)] == [None, None]  # a 404 is no answer
    one.fakes[0].knobs.no_metrics = False
    one.fleet.replicas[0].control.progress = lambda deadline: None
    assert [one.fleet.progress(one.fleet.replicas[0]) for _ in range(2)] == [1.0, 2.0]


def test_a_server_that_fails_for_good_ends_the_call(rig):
    one = rig()
    one.fakes[0].knobs.error = -1
    with pytest.raises(VllmError, match=r"answered 500: .*EngineCore"):
        one.engine.generate(tiny.make_requests([4], samples=1, max_tokens=2), tiny.plain())


def test_an_attached_server_that_is_gone_is_waited_for_then_named(rig):
    one = rig(attached=True)
    one.fakes[0].die()
    with pytest.raises(VllmError, match=r"no vLLM server is left:\n- vLLM server 0 \(http://127.*not ready"):
        one.engine.generate(tiny.make_requests([4], samples=1, max_tokens=2), tiny.plain())


def test_one_refused_request_does_not_cost_the_batch(rig):
    one, requests = rig(), tiny.make_requests([4, 5, 6], samples=2, max_tokens=2)
    one.fakes[0].knobs.refuse = 1
    reasons = [c.finish_reason for c in flat(one.engine.generate(requests, tiny.plain()))]
    assert sorted(reasons) == ["abort"] * 2 + ["length"] * 4
    one.fakes[0].knobs.refuse = -1
    with pytest.raises(VllmError, match="every request was refused.*not valid"):
        one.engine.generate(requests, tiny.plain())


def test_rollouts_of_other_weights_are_refused_and_the_weights_restored(rig):
    one, requests = rig(attached=True), tiny.make_requests([4, 9], samples=2, max_tokens=3)
    one.fakes[0].version, one.fakes[0].model.w = "7", {k: 2 * v for k, v in one.fakes[0].model.w.items()}
    completions = one.engine.generate(requests, tiny.plain())
    logps_are_the_learners(requests, completions, tiny.plain(), weights(0))
    assert one.engine.metrics()["engine/stale"] >= 1 and one.fakes[0].version == "0"


def test_concurrency_is_bounded_and_replicas_share_the_load(rig):
    one = rig(servers=2, knobs=[Knobs(delay=0.02), Knobs(delay=0.02)])
    one.engine.generate(tiny.make_requests([8] * 24, samples=1, max_tokens=1), tiny.plain())
    counts = [len(fake.bodies("/deepgrpo/generate")) for fake in one.fakes]
    assert sum(counts) == 24 and min(counts) >= 8
    assert all(replica.generating == 0 for replica in one.fleet.replicas)


def test_an_impossible_answer_is_asked_again(rig):
    one, requests = rig(), tiny.make_requests([4, 5], samples=2, max_tokens=4)
    one.fakes[0].knobs.phantom = 2
    assert max(c.ids.max() for c in flat(one.engine.generate(requests, tiny.plain()))) < 90
    assert one.engine.metrics()["engine/incomplete"] == 2


def test_bad_requests_are_named(rig):
    one = rig()
    for ids, message in (([], "request 0: the prompt is empty"), ([5, 93], "request 0: prompt id 93 .* id < 90")):
        with pytest.raises(ValueError, match=message):
            one.engine.generate([Request(as_ids(ids), (1,))], tiny.plain())
    with pytest.raises(ValueError, match="stop id 95 has no token, expected one below 90"):
        one.engine.generate(tiny.make_requests([3]), tiny.plain(stop_ids=(3, 95)))
    with pytest.raises(ValueError, match="temperature is 2.5, vLLM takes"):
        one.engine.generate(tiny.make_requests([3]), tiny.plain(temperature=2.5))
