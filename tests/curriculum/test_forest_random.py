"""The forest against a naive scanning implementation, and its behaviour under threads."""

import collections
import random
import threading

import pytest

from deepgrpo.curriculum.base import Correction, Failure
from deepgrpo.types import as_ids
from tests.curriculum.forest_naive import NaiveForest
from tests.curriculum.made import check, forest, problem

RESPONSE = as_ids([5, 6])
BOUNDS = (
    {},
    {"max_events": 5},
    {"max_nodes": 3},
    {"max_events_per_state": 3, "max_events": 9, "max_nodes": 4},
)


def failure(event, state_ids=(1,)) -> Failure:
    return Failure(event, problem(), as_ids(state_ids), RESPONSE, 0)


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: "+".join(bounds) or "none")
def test_random_operations_equal_the_naive_forest(bounds):
    rng = random.Random(str(bounds))
    pool = forest(max_model_len=12, min_remaining_tokens=4, **bounds)
    naive = NaiveForest(12, 4, *[bounds.get(name, 0) for name in ("max_events_per_state", "max_events", "max_nodes")])
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
                counts = pool.observe_root(problem(0, prompt), k_succ, 4, step, failed)
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
            assert [failed.failure_id for failed in pool.dispatch(n, step)] == naive.dispatch(n, step), number
        elif action == "requeue":
            event = rng.choice([*[e["number"] for e in naive.events[-8:]], naive.number])
            pool.requeue(failure(event))
            naive.requeue(event)
        elif action == "result":
            event = rng.choice([*[e["number"] for e in naive.events[-8:]], naive.number])
            parents = [e["node"] for e in naive.events if e["number"] == event]
            known = parents[0]["state"] if parents else (1,)
            further = tuple(rng.choices((1, 2), k=rng.choice((0, 1, 1, 2))))
            suffix = rng.choice(((7,), (7,), (7, 0), ()))
            answer = rng.choice((None, *[Correction(as_ids(further), as_ids(suffix), 1.0, RESPONSE)] * 3))
            outcome = pool.resolve(failure(event, known), answer, step)
            assert outcome == naive.result(event, None if answer is None else (*known, *further), suffix, step), number
            if outcome == "child_created":
                states.append((parents[0]["prompt"], (*known, *further)))
        else:
            assert pool.cleanup() == naive.cleanup(), number
        if number % 20 == 0:
            check(pool)
    counters = pool.counters
    assert counters.dropped_capacity == naive.dropped and len(pool) == len(naive.trees)
    assert counters.succeeded > 25 and counters.invalid and counters.stale_parent_inactive  # the test has met them


def test_threads_keep_the_invariants(tmp_path):
    pool = forest(max_model_len=16, min_remaining_tokens=4)
    added, dispatched, requeued, errors = [], [], [], []

    def work(seed: int) -> None:
        rng, flying = random.Random(seed), []
        try:
            for _ in range(1000):
                step, action = rng.randrange(20), rng.randrange(8)
                if action == 0:
                    prompt, n = tuple(rng.choices((1, 2, 3), k=3)), rng.choice((0, 2))
                    added.append(pool.observe_root(problem(0, prompt), 0, 2, step, [RESPONSE] * n)["events_added"])
                elif action == 1:
                    node, successes = rng.randrange(pool.counters.next_node + 1), rng.choice((0, 2))
                    added.append(pool.observe_node(node, successes, 2, step, [RESPONSE])["events_added"])
                elif action == 2:
                    pool.sample_rollout(2, step)
                elif action == 3:
                    failures = pool.dispatch(rng.choice((1, 3)), step)
                    flying += failures
                    dispatched.extend(failed.failure_id for failed in failures)
                elif action == 4 and flying:
                    failed = flying.pop()
                    if rng.random() < 0.2:
                        pool.requeue(failed)
                        requeued.append(failed.failure_id)
                        continue
                    answer = Correction(as_ids(rng.choices((5, 6), k=2)), RESPONSE, 1.0, RESPONSE)
                    pool.resolve(failed, rng.choice((None, answer)), step)
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
    assert sum(added) == pool.counters.enqueued and pool.counters.succeeded > 0
    assert len(dispatched) == pool.counters.dispatched
    twice = collections.Counter(dispatched) - collections.Counter(set(dispatched))
    assert not twice - collections.Counter(requeued)  # nothing is handed out again but what was put back
    for folder in range(folders):  # each snapshot is a forest that existed: totals, counters and invariants agree
        restored = forest(max_model_len=16, min_remaining_tokens=4)
        restored.restore(tmp_path / str(folder))
        check(restored)
