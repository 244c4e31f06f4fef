"""Advantages against the formulas, by hand and in float64 NumPy."""

import numpy as np
import pytest

from deepgrpo.learner.rows import group_advantages, overlong_penalty, snis_weight, whiten

REWARDS, GROUPS = [1.0, 0.0, 0.3, 0.3, 0.3, 5.0], ["a", "a", "b", "b", "b", "c"]


def test_by_hand():
    np.testing.assert_array_equal(group_advantages(REWARDS, GROUPS, "group_mean"), [0.5, -0.5, 0, 0, 0, 0])
    std = group_advantages(REWARDS, GROUPS, "grpo_std")
    np.testing.assert_allclose(std, [0.5**0.5, -(0.5**0.5), 0, 0, 0, 5.0], rtol=1e-5)
    np.testing.assert_array_equal(group_advantages(REWARDS, GROUPS, "rloo"), [1.0, -1.0, 0, 0, 0, 0])
    assert snis_weight([0.0] * 8, 1.0, 1.0) == pytest.approx(9 * np.e / (8 + np.e))
    with pytest.raises(ValueError, match="advantage mode 'median'"):
        group_advantages(REWARDS, GROUPS, "median")


def test_leave_one_out():
    """RLOO (Ahmadian et al. 2024): each reward against the mean of the others."""
    rewards = np.random.default_rng(0).random(7)
    expected = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(group_advantages(rewards, [4] * 7, "rloo"), expected, atol=1e-12)


def test_no_contrast_is_exactly_zero():
    for mode in ("group_mean", "grpo_std", "rloo"):
        assert not group_advantages([0.1] * 7, [0] * 7, mode).any()


def test_soft_penalty_of_long_answers():
    """DAPO's equation 13 with L_max 100 and L_cache 20."""
    assert [overlong_penalty(n, 100, 20, 1.0) for n in (1, 80, 85, 90, 100, 300)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(90, 100, 20, 0.5) == -0.25


def test_whitening_of_one_token_is_no_number_by_zero():
    assert whiten(np.array([[3.0, 7.0]]), np.array([[1.0, 0.0]])).tolist() == [[0.0, 0.0]]
    assert not whiten(np.full((2, 3), 0.5), np.ones((2, 3))).any()
