"""Random choices follow their formulas, and pools' records survive the way through their files."""

import dataclasses
import itertools

import numpy as np
import pytest

from deepgrpo.curriculum.base import generator, sample, weighted_sample
from deepgrpo.curriculum.saved import Saved, read_saved, write_saved
from deepgrpo.curriculum.suffixes import AnnotatedEntry, AnnotatedPool
from deepgrpo.types import Problem, as_ids
from tests.curriculum.replay import inclusion


@pytest.mark.parametrize(("weights", "k"), [([1.0, 0.36, 0.2, 0.01], 2), ([3.0, 1.0, 0.0, 2.0, 1e-5], 3)])
def test_frequencies_are_those_of_successive_draws(weights, k):
    random = np.random.default_rng(0)
    counts = np.zeros(len(weights))
    for _ in range(4000):
        counts[weighted_sample(weights, k, random)] += 1
    np.testing.assert_allclose(counts / 4000, inclusion(weights, k), atol=0.04)  # five standard deviations


def test_edges_of_weighted_sampling():
    class Zero:
        def random(self, n):
            return np.zeros(n)

    assert weighted_sample([0.0, 2.0, 1.0], 3, np.random.default_rng(0)) == [0, 1, 2]  # all, in the order given
    assert weighted_sample([0.0, 1.0, 0.0, 0.0], 3, np.random.default_rng(0)) == [1, 0, 2]  # no weight: last, in order
    assert weighted_sample([1.0, 2.0], 0, np.random.default_rng(0)) == weighted_sample([], 2, np.random.default_rng(0)) == []
    assert weighted_sample([1.0, 2.0], 1, Zero()) == [1]  # a uniform number of exactly 0 has a logarithm all the same


def test_a_draw_is_a_function_of_seed_step_purpose_and_index():
    keys = [(0, 1, 2, 0), (1, 1, 2, 0), (0, 2, 2, 0), (0, 1, 3, 0), (0, 1, 2, 1)]
    draws = [generator(*key).random() for key in keys]
    assert draws == [generator(*key).random() for key in keys] and len(set(draws)) == len(keys)


@pytest.mark.parametrize("n", range(12))
def test_strata_are_as_even_as_their_sizes_allow(n):
    groups = ["a"] * 5 + ["b"] * 2 + ["c"] * 3
    chosen = sample(groups, n, np.random.default_rng(n))
    assert len(chosen) == len(set(chosen)) == min(n, 10)
    counts = [sum(groups[i] == group for i in chosen) for group in "abc"]
    full = max(r for r in range(6) if sum(min(size, r) for size in (5, 2, 3)) <= n)
    extra = [count - min(size, full) for count, size in zip(counts, (5, 2, 3), strict=True)]
    assert set(extra) <= {0, 1} and sum(extra) == min(n, 10) - sum(min(size, full) for size in (5, 2, 3))


def test_every_member_of_a_stratum_has_its_chance():
    draws = [tuple(sample(["a", "a", "b", "b"], 2, np.random.default_rng(i))) for i in range(400)]
    assert set(draws) == set(itertools.product([0, 1], [2, 3])) | set(itertools.product([2, 3], [0, 1]))
    assert {tuple(sample(range(3), 2, np.random.default_rng(i), "uniform")) for i in range(60)} == set(
        itertools.permutations(range(3), 2)
    )


def entry(group: str, problem: Problem, number: int) -> AnnotatedEntry:
    ids = as_ids(range(number))
    return AnnotatedEntry(problem, group, ids, ids[:1], as_ids([9]), 1 / 3, ids, number)


def test_records_survive_their_files_and_equal_content_makes_equal_bytes(tmp_path):
    def problem():
        return Problem(3, "s", as_ids([1, 2]), {"x": [1.5, None]}, "é\n?", {"k": "v"})

    one = problem()
    rows = [entry("g1", one, 0), entry("g2", one, 3), entry("g2", problem(), 2)]
    for name, content in (("a", rows), ("b", [dataclasses.replace(row, problem=problem()) for row in rows])):
        (tmp_path / name).mkdir()
        write_saved(str(tmp_path / name), "pool", AnnotatedEntry, Saved(content, {"n": 2}))
    for file in ("pool.json", "pool.npz"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    found = read_saved(str(tmp_path / "a"), "pool", AnnotatedEntry)
    assert found.numbers == {"n": 2} and found.rows[0].problem is found.rows[2].problem
    for row, back in zip(rows, found.rows, strict=True):
        for field in dataclasses.fields(row):
            value, read = getattr(row, field.name), getattr(back, field.name)
            if field.name == "problem":
                assert (read.question, read.ground_truth, read.extra) == (value.question, value.ground_truth, value.extra)
            elif isinstance(value, np.ndarray):
                np.testing.assert_array_equal(read, value)
                assert not read.flags.writeable and read.dtype == np.int32
            else:
                assert read == value
    with pytest.raises(ValueError, match="row 3 of 's'"):
        write_saved(str(tmp_path), "pool", AnnotatedEntry, Saved([entry("g", dataclasses.replace(one, ground_truth={1j}), 1)]))


def test_an_annotated_pool_counts_what_it_drops():
    pool = AnnotatedPool(max_size=2)
    one = Problem(0, "s", as_ids([1]), "", "")
    assert pool.add([entry("g", one, number) for number in range(5)]) == 2
    assert pool.metrics() == {"teacher_pool/size": 2, "teacher_pool/dropped_capacity": 3, "teacher_pool/unique_trees": 1}
