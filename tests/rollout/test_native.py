"""The native engine: its log-probs are the learner's, its tokens depend on the seed alone, its edges are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner.sharding import make_mesh, parameter_shardings, place
from deepgrpo.rollout.engine import Request
from deepgrpo.types import as_ids
from tests.rollout import tiny


@pytest.fixture(scope="module")
def params():
    return tiny.random_params()


@pytest.fixture(scope="module")
def engine(params):
    return tiny.make_engine(params)


@pytest.fixture(scope="module")
def wide_engine(params):
    """One slot a sample and one decode call a response: nothing is ever refilled."""
    return tiny.make_engine(params, slots=15, decode_steps=32)


def flat(completions):
    return [completion for group in completions for completion in group]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [-1, 20])
def test_logps_are_the_learners(engine, params, temperature, top_p, top_k):
    sampling = tiny.plain(temperature=temperature, top_p=top_p, top_k=top_k, stop_ids=(3, 4))
    requests = tiny.make_requests([1, 2, 9, 27], samples=2)
    for request, group in zip(requests, engine.generate(requests, sampling), strict=True):
        for completion in group:
            expected = tiny.learner_logps(params, request, completion, sampling)
            np.testing.assert_allclose(completion.logps, expected, rtol=0, atol=1e-4)
            assert completion.ids.max() < tiny.REAL and completion.logps.dtype == np.float32


def test_greedy_takes_the_argmax_and_reports_temperature_1(engine, params):
    sampling = tiny.plain(temperature=0.0, top_p=0.5, top_k=2)
    request = tiny.make_requests([6], samples=2)[0]
    one, other = engine.generate([request], sampling)[0]
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logps, tiny.learner_logps(params, request, one, tiny.plain()), rtol=0, atol=1e-4)
    prompt = request.prompt_ids
    for i, token in enumerate(one.ids[:5]):
        step = engine.generate([Request(as_ids([*prompt, *one.ids[:i]]), (0,), max_tokens=1)], sampling)[0][0]
        assert step.ids.tolist() == [token]


def test_tokens_depend_on_the_seed_not_on_slots_steps_or_order(engine, wide_engine):
    requests = tiny.make_requests([3, 17, 30, 1, 8], samples=5)
    sampling = tiny.plain(stop_ids=(5,))
    alone = flat(wide_engine.generate([request], sampling)[0] for request in requests)
    for got in (wide_engine.generate(requests, sampling), engine.generate(requests[::-1], sampling)[::-1]):
        for a, b in zip(alone, flat(got), strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
            assert a.finish_reason == b.finish_reason


def test_samples_of_a_prompt_differ_and_repeat_with_their_seeds(engine):
    request = tiny.make_requests([5], samples=8)[0]
    first, again = (engine.generate([request], tiny.plain())[0] for _ in range(2))
    assert len({tuple(c.ids.tolist()) for c in first}) == 8
    assert [c.ids.tolist() for c in first] == [c.ids.tolist() for c in again]


def test_a_sampled_stop_id_ends_the_response_and_is_part_of_it(engine):
    requests = tiny.make_requests([4, 4], samples=6)
    stops = tuple(range(0, 90, 6))
    completions = flat(engine.generate(requests, tiny.plain(stop_ids=stops)))
    assert {c.finish_reason for c in completions} == {"stop"}
    for completion in completions:
        assert completion.ids[-1] in stops and not set(completion.ids[:-1].tolist()) & set(stops)


def test_without_a_stop_the_context_is_filled_exactly(engine):
    requests = tiny.make_requests([1, 7, 31], samples=2)
    for request, group in zip(requests, engine.generate(requests, tiny.plain()), strict=True):
        assert [(len(request.prompt_ids) + len(c.ids), c.finish_reason) for c in group] == [(32, "length")] * 2
    capped = engine.generate(tiny.make_requests([7], max_tokens=3), tiny.plain())[0]
    assert [(len(c.ids), c.finish_reason) for c in capped] == [(3, "length")] * 3


def test_room_at_the_edge_of_the_context(engine, monkeypatch):
    L = 16
    requests = tiny.make_requests([L - 1, L, L + 1], samples=2)
    one, none, over = engine.generate(requests, tiny.plain(L))
    assert [(len(c.ids), c.finish_reason) for c in one] == [(1, "length")] * 2
    for completion in none + over:
        assert (len(completion.ids), len(completion.logps), completion.finish_reason) == (0, 0, "length")
    monkeypatch.setattr(engine._programs, "decode", None)  # no room at all: the device is not asked
    assert [c.finish_reason for c in engine.generate(requests[1:], tiny.plain(L))[0]] == ["length"] * 2


def test_on_done_reports_every_sample_once_by_its_place(engine):
    requests, seen = tiny.make_requests([30, 2, 32]), {}
    completions = engine.generate(requests, tiny.plain(stop_ids=(1, 2)), on_done=lambda i, j, c: seen.setdefault((i, j), c))
    assert seen == {(i, j): c for i, group in enumerate(completions) for j, c in enumerate(group)}


def test_publish_changes_the_policy_and_keeps_no_reference(engine, params):
    requests = tiny.make_requests([6])
    before = engine.generate(requests, tiny.plain())[0][0]
    other = tiny.random_params(seed=1)
    compilations = engine.metrics()["engine/compilations"]
    published = jax.tree.map(jnp.copy, other)
    engine.publish(published, version=7)
    jax.tree.map(lambda leaf: leaf.delete(), published)  # as a donating learner step does
    after = engine.generate(requests, tiny.plain())[0][0]
    assert (before.version, after.version, engine.version) == (0, 7, 7)
    assert before.ids.tolist() != after.ids.tolist()
    np.testing.assert_allclose(after.logps, tiny.learner_logps(other, requests[0], after, tiny.plain()), rtol=0, atol=1e-4)
    assert engine.metrics()["engine/compilations"] == compilations, "publishing must not recompile"
    engine.publish(params, version=0)


def test_few_shapes_are_compiled_whatever_the_lengths(params):
    engine = tiny.make_engine(params, slots=8)
    engine.generate(tiny.make_requests([1, 9, 66]), tiny.plain(128, stop_ids=(1,)))
    compilations = engine.metrics()["engine/compilations"]
    for n in range(2, 6):
        engine.generate(tiny.make_requests([n, n + 11, n + 60]), tiny.plain(128, stop_ids=(1,), temperature=0.5 + n / 8))
    assert engine.metrics()["engine/compilations"] <= compilations + 4


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 4, 2)])
def test_on_a_mesh_it_samples_the_same(engine, params, shape):
    requests, sampling = tiny.make_requests([3, 12], samples=4), tiny.plain()
    expected = flat(engine.generate(requests, sampling))
    mesh = make_mesh(shape)
    sharded = tiny.make_engine(place(params, parameter_shardings(params, mesh)), slots=8)
    for a, b in zip(expected, flat(sharded.generate(requests, sampling)), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-4)


def test_bfloat16_engine_stays_near_the_float32_learner(params):
    engine, requests = tiny.make_engine(params, dtype=jnp.bfloat16), tiny.make_requests([10])
    for completion in engine.generate(requests, tiny.plain())[0]:
        gap = np.abs(completion.logps - tiny.learner_logps(params, requests[0], completion, tiny.plain()))
        assert gap.mean() < 0.25 and completion.logps.dtype == np.float32


def test_errors_name_what_is_wrong(engine, params):
    with pytest.raises(ValueError, match="request 0: prompt id 97"):
        engine.generate([Request(as_ids([1, 97]), (0,))], tiny.plain())
    with pytest.raises(ValueError, match="request 1: the prompt is empty"):
        engine.generate([Request(as_ids([1]), (0,)), Request(as_ids([]), (0,))], tiny.plain())
    with pytest.raises(ValueError, match="top_p"):
        engine.generate([], tiny.plain(top_p=0.0))
    with pytest.raises(ValueError, match=r"\['norm'\]\['scale'\]"):
        engine.publish({**params, "norm": {"scale": jnp.ones(3)}}, 1)
    engine.publish({**params, "norm": {"scale": jnp.full(32, jnp.nan)}}, 1)
    with pytest.raises(FloatingPointError, match="log-prob nan"):
        engine.generate(tiny.make_requests([3]), tiny.plain())
    engine.publish(params, version=0)


def test_a_closed_engine_says_so(params):
    engine = tiny.make_engine(params)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([], tiny.plain())
