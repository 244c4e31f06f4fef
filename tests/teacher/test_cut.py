"""Places of the cut other than the teacher's, and a rule-based teacher that errs: controls of the method's two ingredients."""

import numpy as np
import pytest

from deepgrpo.data import carry_chain
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.steps import grade_carry_chain as grade
from deepgrpo.teacher.annotate import ACCEPTED
from deepgrpo.teacher.oracle import misled
from deepgrpo.teacher.splice import PLACES, Limits, move, splice_text
from deepgrpo.types import Grade, as_ids
from tests.teacher.fakes import InstantGrader
from tests.teacher.test_annotate import CODEC, STOP, annotate, made, says, written

STATE = as_ids(range(5, 12))
LIMITS = Limits(0, 0.0, 0, 200, 8)
STUDENT = as_ids([*CODEC.encode("The sum is 12 + 30 = 43 units, more or less."), STOP])
SOLUTION = "The sum is 12 + 30 = 42 units."
CUT = splice_text(CODEC, STUDENT, SOLUTION, len(STATE), [STOP], LIMITS)


def moved(place: str, seed: int = 0, state=STATE, limits=LIMITS):
    return move(CUT, STUDENT, state, place, codec=CODEC, limits=limits, seed=seed)


def test_the_teachers_own_cut_stays():
    assert moved("teacher") is CUT and not CUT.reason


@pytest.mark.parametrize("place", PLACES[1:])
def test_places(place):
    cuts = [moved(place, seed) for seed in range(200)]
    source = CUT.body() if place == "solution" else STUDENT
    lengths = {len(cut.prefix_ids) for cut in cuts}
    last = {"own": len(CUT.prefix_ids) - 1, "random": len(STUDENT) - 1, "solution": len(CUT.body()) - 1}[place]
    ends = {k: CODEC.decode(source[k - 1 : k + 1]) for k in range(1, last + 1)}
    inside = {k for k, pair in ends.items() if pair.strip().isdigit() and " " not in pair and len(pair) > 1}
    assert inside or place != "random"
    assert lengths == ends.keys() - inside  # every place but those in a number comes up; none is empty or keeps the stop id
    for cut in cuts:
        k = len(cut.prefix_ids)
        np.testing.assert_array_equal(cut.prefix_ids, source[:k])
        np.testing.assert_array_equal(cut.failed_suffix_ids, STUDENT[k:])
        assert cut.suffix_ids[-1] == STOP and cut.body_len == len(cut.suffix_ids) - 1 > 0
        if place != "random" or k <= len(CUT.prefix_ids):
            assert CODEC.decode(cut.body()) == SOLUTION  # what follows still completes the teacher's answer
    assert [c.prefix_ids.tolist() for c in cuts] == [moved(place, seed).prefix_ids.tolist() for seed in range(200)]


def test_room_bounds_the_place():
    whole = len(STATE) + len(CUT.body()) + 1
    tight = Limits(0, 0.0, 0, whole, whole - len(STATE) - 3)
    assert {len(moved("random", seed, limits=tight).prefix_ids) for seed in range(50)} == {1, 2, 3}
    assert {moved("random", seed, limits=Limits(0, 0.0, 0, whole - 1, 8)).reason for seed in range(50)} == {"too_long"}
    full = Limits(0, 0.0, 0, len(STATE) + 8, 8)
    assert moved("solution", limits=full).reason == "no_room_for_rollouts"


def test_the_teachers_whole_answer_is_verified_whatever_the_place():
    grader = InstantGrader(Grade(1.0, True, "right"))
    failed = written("The sum is 12 + 30 = 43 units.")
    outcome = annotate(made(says(SOLUTION), grader, curriculum__cut="random", seed=3), failed)
    assert outcome.reason == ACCEPTED and grader.answers[0].response == SOLUTION
    kept = outcome.correction.prefix_ids
    np.testing.assert_array_equal(kept, failed.response_ids[: len(kept)])
    leaking = made(says(SOLUTION), grader, curriculum__cut="random", seed=3, leaks=lambda source, text: True)
    assert annotate(leaking, failed).reason == "answer_leak"  # of the prefix at the new place


def test_a_misled_solution_differs_in_one_digit_and_is_noticed():
    question = carry_chain.problems("train", 1)[0]
    right = carry_chain.solution(question["question"])
    for seed in range(20):
        wrong = misled(right, np.random.default_rng(seed))
        assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
        answer = Answer("carry_chain", question["question"], "", wrong, "stop", question["answer"], {})
        assert grade(answer).reward == 0.0
    assert misled("no digits", np.random.default_rng(0)) == "no digits"
