"""Which server a prompt goes to: where its beginning is cached, unless that one is much busier than the least loaded."""

import types

import numpy as np

from deepgrpo.rollout import vllm_fleet
from deepgrpo.rollout.vllm_fleet import Router
from deepgrpo.types import as_ids


def replicas(*generating):
    return [types.SimpleNamespace(index=i, generating=n) for i, n in enumerate(generating)]


TREE = as_ids(np.arange(20))
DEEPER = as_ids([*TREE, 7, 7, 7, 7, 7])


def test_the_least_loaded_gets_what_nobody_knows():
    router = Router(block=8)
    assert router.choose(TREE, 8, replicas(9, 4, 5)).index == 1
    assert router.choose(as_ids(np.arange(7)), 8, replicas(9, 4, 2)).index == 2  # shorter than a block: nothing to reuse


def test_a_known_beginning_of_whole_blocks_attracts_its_continuations():
    router = Router(block=8)
    assert router.choose(TREE, 8, replicas(5, 5, 0)).index == 2
    assert router.choose(DEEPER, 8, replicas(3, 3, 8)).index == 2
    assert router.choose(as_ids([1, *TREE]), 8, replicas(3, 2, 0)).index == 2  # another text; merely the least loaded
    assert router.choose(as_ids([1, *TREE]), 8, replicas(3, 2, 90)).index == 1


def test_not_for_the_price_of_an_idle_server():
    router = Router(block=8)
    router.choose(TREE, 8, replicas(5, 5, 0))
    assert router.choose(DEEPER, 8, replicas(20, 20, 60)).index == 0
    assert router.choose(DEEPER, 8, replicas(20, 20, 20)).index == 0  # it is known there by now
    router.forget()
    assert router.choose(DEEPER, 8, replicas(20, 19, 20)).index == 1


def test_a_server_that_is_away_is_not_missed_and_memory_is_bounded(monkeypatch):
    router = Router(block=8)
    router.choose(TREE, 8, replicas(5, 5, 0))
    assert router.choose(DEEPER, 8, replicas(9, 4)).index == 1
    monkeypatch.setattr(vllm_fleet, "REMEMBERED", 3)
    for start in range(5):
        router.choose(as_ids(np.arange(start, start + 16)), 8, replicas(1, 1))
    assert len(router._served) == 3
