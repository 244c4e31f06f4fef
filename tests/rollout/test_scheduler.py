"""Continuous batching without a device."""

import numpy as np
import pytest

from deepgrpo.rollout.scheduler import Scheduler, length_buckets, slot_buckets, smallest
from tests.rollout import tiny


def decoded(tokens):
    """What the device returns where slot b decodes the list tokens[b]."""
    counts = np.array([len(row) for row in tokens], np.int32)
    array = np.zeros((max(counts), len(tokens)), np.int32)
    for slot, row in enumerate(tokens):
        array[: len(row), slot] = row
    return array, np.full(array.shape, -1.0, np.float32), counts


def queued(requests, sampling):
    scheduler = Scheduler(sampling)
    assert scheduler.add(requests) == []
    return scheduler


def test_shorter_prompts_go_first_and_freed_slots_are_refilled():
    scheduler = queued(tiny.make_requests([9, 4], samples=2), tiny.plain(stop_ids=(1,)))
    scheduler.resize(3)
    assert [(slot, s.request, s.index) for slot, s in scheduler.refill()] == [(0, 1, 0), (1, 1, 1), (2, 0, 0)]
    ended = scheduler.record(*decoded([[5, 6], [7, 1], [8, 9]]))
    assert [(s.request, s.index, s.ids) for s in ended] == [(1, 1, [7, 1])]
    assert [(slot, s.request, s.index) for slot, s in scheduler.refill()] == [(1, 0, 1)]
    slots = scheduler.slots()
    assert slots.tokens[0] == 6 and slots.positions.tolist() == [5, 8, 10] and slots.indices.tolist() == [2, 0, 2]
    assert slots.seeds.dtype == np.uint32 and slots.active.all()


def test_shrinking_keeps_active_samples():
    scheduler = queued(tiny.make_requests([2], samples=4), tiny.plain(stop_ids=(1,)))
    scheduler.resize(4)
    scheduler.refill()
    scheduler.record(*decoded([[1], [5], [1], [6]]))
    assert scheduler.unfinished == 2 and scheduler.resize(2).tolist() == [1, 3]
    assert [s.ids for s in scheduler.rows] == [[5], [6]]


def test_a_stop_in_the_last_place_is_a_stop():
    scheduler = queued(tiny.make_requests([3], samples=2), tiny.plain(5, stop_ids=(1,)))
    scheduler.resize(2)
    scheduler.refill()
    ended = scheduler.record(*decoded([[4, 1], [4, 4]]))
    assert [s.completion(scheduler.sampling, 0, 100).finish_reason for s in ended] == ["stop", "length"]


def test_prompts_without_room_never_wait():
    scheduler = Scheduler(tiny.plain(5))
    left = scheduler.add(tiny.make_requests([4, 5, 6], samples=1) + tiny.make_requests([1], max_tokens=0))
    assert [s.request for s in left] == [1, 2, 3, 3, 3] and scheduler.unfinished == 1


@pytest.mark.parametrize("length, expected", [(40, (64,)), (256, (64, 128, 192, 256)), (4096, (512, 1024, 2048, 3072, 4096))])
def test_length_buckets_hold_the_context(length, expected):
    assert length_buckets(length) == expected
    assert smallest(expected, length) == expected[-1] >= length


def test_slot_buckets_divide_among_devices():
    assert slot_buckets(128, 1) == (8, 32, 128) and slot_buckets(64, 8) == (16, 64)[-2:] and slot_buckets(6, 1) == (6,)
