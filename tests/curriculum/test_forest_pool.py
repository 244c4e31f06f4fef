"""The pool against a naive scanning implementation, its bounds, and its behaviour under threads."""

import collections
import random
import threading

import pytest

from deepgrpo.curriculum.forest_order import SortedKeys
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import Annotation
from deepgrpo.types import Problem, as_ids
from tests.curriculum.forest_check import check
from tests.curriculum.forest_naive import NaiveForest

RESPONSE = as_ids([5, 6])


def problem(prompt=(1, 2)) -> Problem:
    return Problem(0, "test", as_ids(prompt), "", "")


def fail(pool: Forest, n: int, step: int = 1, prompt=(1, 2)) -> dict[str, int]:
    return pool.observe_root(problem(prompt), 0, max(n, 1), step, [RESPONSE] * n)


BOUNDS = (
    {},
    {"max_events_per_parent": 2},
    {"max_events": 5},
    {"max_nodes_per_tree": 3},
    {"max_events_per_parent": 3, "max_events": 9, "max_nodes_per_tree": 4, "drop_retired_events": True},
)


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: "+".join(bounds) or "none")
def test_random_operations_equal_the_naive_forest(bounds):
    rng = random.Random(str(bounds))
    pool = Forest(max_model_len=12, min_remaining_tokens=4, **bounds)
    naive = NaiveForest(12, 4, *[bounds.get(name, 0) for name in ("max_events_per_parent", "max_events", "max_nodes_per_tree")])
    naive.drop_retired = "drop_retired_events" in bounds
    states = [((1,), (1,))]  # (prompt, state) pairs that were seen
    step = 1
    for number in range(1500):
        step = max(0, step + rng.choice((0, 0, 0, 1, 1, -1)))
        actions = ("root", "node", "sample", "sft", "dispatch", "dispatch", "result", "result", "requeue", "cleanup")
        action = rng.choice(actions)
        if action in ("root", "node"):
            prompt, state = rng.choice(states)
            k_succ, n = rng.choice((0, 1, 1, 4)), rng.choice((0, 1, 3))
            failed = [RESPONSE] * n
            if action == "root":
                prompt = state = tuple(rng.choices((1, 2), k=rng.randint(1, 3)))
                counts = pool.observe_root(problem(prompt), k_succ, 4, step, failed)
            else:
                node = pool.find(prompt, state)
                if state == prompt:
                    continue  # a root addressed as a node cannot come back: the traces have that case
                counts = pool.observe_node(-1 if node is None else node, k_succ, 4, step, failed)
            assert counts["events_added"] == naive.observe(prompt, state, k_succ, 4, step, n), number
        elif action == "sample":
            assert [tuple(s.ids.tolist()) for s in pool.sample_rollout(2, step)] == naive.sample(2, step), number
        elif action == "sft":
            assert [tuple(e.state_ids.tolist()) for e in pool.sample_sft(2, step)] == naive.sample(2, step, "sft"), number
        elif action == "dispatch":
            n = rng.choice((1, 2, 50))
            assert [failure.event for failure in pool.dispatch_teacher(n, step)] == naive.dispatch(n, step), number
        elif action == "requeue":
            if "max_events" not in bounds:  # there, what is put back counts as the oldest whatever its number
                event = rng.choice([*[e["number"] for e in naive.events[-8:]], naive.number])
                pool.requeue(event)
                naive.requeue(event)
        elif action == "result":
            event = rng.choice([*[e["number"] for e in naive.events[-8:]], naive.number])
            parents = [e["node"] for e in naive.events if e["number"] == event]
            state = (*(parents[0]["state"] if parents else (1,)), *rng.choices((1, 2), k=rng.choice((0, 1, 1, 2))))
            suffix = rng.choice(((7,), (7,), (7, 0), ()))
            answer = rng.choice((None, *[Annotation(as_ids(state), as_ids(suffix))] * 3))
            outcome, _ = pool.teacher_result(event, answer, step)
            assert outcome == naive.result(event, None if answer is None else state, suffix, step), number
            if outcome == "child_created":
                states.append((parents[0]["prompt"], state))
        else:
            assert pool.cleanup() == naive.cleanup(), number
        if number % 20 == 0:
            check(pool)
    counters = pool._counters
    assert counters.dropped_capacity + counters.dropped_retired == naive.dropped
    assert len(pool) == len(naive.trees)
    assert counters.succeeded > 25 and counters.invalid and counters.stale_parent_inactive  # the test has met them


def test_bounds_keep_the_newest_and_count():
    pool = Forest(max_events_per_parent=2, max_events=3)
    assert fail(pool, 4)["events_added"] == 4  # events 2 and 3 stay
    fail(pool, 2, step=2, prompt=(3,))  # 4 and 5: one more than three in all, so the oldest, 2, goes
    assert sorted(failure.event for failure in pool.dispatch_teacher(None, 3)) == [3, 5]
    assert pool.metrics()["teacher/events_dropped_capacity"] == 3
    check(pool)


def test_full_tree_refuses_children_and_events():
    pool = Forest(max_nodes_per_tree=2)
    fail(pool, 4)
    flying = [pool.dispatch_teacher(1, step)[0] for step in (1, 2)]
    assert pool.teacher_result(flying[0].event, Annotation(as_ids([1, 2, 5]), as_ids([9])), 3)[0] == "child_created"
    assert pool.teacher_result(flying[1].event, Annotation(as_ids([1, 2, 6]), as_ids([9])), 3)[0] == "refused"
    fail(pool, 2, step=4)
    metrics = pool.metrics()
    assert (metrics["forest/nodes_refused"], metrics["teacher/events_dropped_capacity"], pool.pending()) == (1, 4, 0)
    check(pool)


def test_dropping_a_retired_states_failures_frees_its_tree():
    for drop, removed in ((False, 0), (True, 1)):
        pool = Forest(drop_retired_events=drop)
        fail(pool, 3)
        pool.observe_root(problem(), 4, 4, 2, None)
        assert pool.pending() == 0
        assert pool.cleanup() == removed
        assert pool.metrics()["teacher/events_dropped_retired"] == 3 * drop


@pytest.mark.parametrize("arguments", [{"max_events": -1}, {"min_remaining_tokens": -1}, {"max_model_len": 32}])
def test_impossible_bounds_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Forest(**arguments)


def test_sorted_keys_equal_a_sorted_list():
    rng = random.Random(0)
    keys, plain = SortedKeys(), set()
    for _ in range(20_000):
        key = (rng.randrange(4000), "x")
        if key in plain and rng.random() < 0.8:
            keys.remove(key)
            plain.remove(key)
        elif key not in plain:
            keys.add(key)
            plain.add(key)
    expected = sorted(plain)
    assert list(keys) == expected and len(keys) == len(expected)
    assert list(keys.range((700,), (2900,))) == [key for key in expected if (700,) <= key < (2900,)]
    for key in expected:
        keys.remove(key)
    assert len(keys) == 0 and list(keys) == []
    with pytest.raises(KeyError):
        keys.remove((1, "x"))


def test_threads_keep_the_invariants(tmp_path):
    pool = Forest(max_model_len=16, min_remaining_tokens=4)
    added, dispatched, requeued, errors = [], [], [], []

    def work(seed: int) -> None:
        rng, flying = random.Random(seed), []
        try:
            for _ in range(2000):
                step, action = rng.randrange(20), rng.randrange(8)
                if action == 0:
                    prompt = tuple(rng.choices((1, 2, 3), k=3))
                    added.append(fail(pool, rng.choice((0, 2)), step, prompt)["events_added"])
                elif action == 1:
                    node, successes = rng.randrange(pool._next_node + 1), rng.choice((0, 2))
                    added.append(pool.observe_node(node, successes, 2, step, [RESPONSE])["events_added"])
                elif action == 2:
                    pool.sample_rollout(2, step)
                elif action == 3:
                    failures = pool.dispatch_teacher(rng.choice((1, 3)), step)
                    flying += failures
                    dispatched.extend(failure.event for failure in failures)
                elif action == 4 and flying:
                    failure = flying.pop()
                    if rng.random() < 0.2:
                        pool.requeue(failure.event)
                        requeued.append(failure.event)
                        continue
                    ids = as_ids([*failure.state_ids, *rng.choices((5, 6), k=2)])
                    pool.teacher_result(failure.event, rng.choice((None, Annotation(ids, RESPONSE))), step)
                elif action == 5:
                    pool.mark_sft([entry.node for entry in pool.sample_sft(2, step)], step)
                    pool.metrics()
                elif action == 6 and rng.random() < 0.02:
                    pool.freeze_sft_epoch(0, 20)
                elif action == 7:
                    pool.cleanup()
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which fails the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    folders = 0
    while any(thread.is_alive() for thread in threads):
        (tmp_path / str(folders)).mkdir()
        pool.state(tmp_path / str(folders))
        folders += 1
    for thread in threads:
        thread.join()
    assert not errors
    check(pool)
    assert sum(added) == pool._counters.enqueued and pool._counters.succeeded > 0
    assert len(dispatched) == pool._counters.dispatched
    twice = collections.Counter(dispatched) - collections.Counter(set(dispatched))
    assert not twice - collections.Counter(requeued)  # nothing is handed out again but what was put back
    for folder in range(folders):  # each snapshot is a forest that existed: totals, counters and invariants agree
        restored = Forest(max_model_len=16, min_remaining_tokens=4)
        restored.restore(tmp_path / str(folder))
        check(restored)
