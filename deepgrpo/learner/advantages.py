"""Advantages and teacher weights of a step's rewards: on the host, in float64."""

from collections.abc import Sequence

import numpy as np

MODES = ("group_mean", "grpo_std", "grpo_nostd", "rloo")
EPS = 1e-8


def group_advantages(rewards: Sequence[float], group_ids: Sequence, mode: str) -> np.ndarray:
    """Advantage of each reward within its group of n: float64[len(rewards)].

    group_mean: A = r - mean(group); also the advantage of Dr. GRPO (Liu et al. 2025).
    grpo_std: A = (r - mean) / (std + 1e-6), std unbiased; a group of one has mean 0 and std 1 (Shao et al. 2024).
    grpo_nostd: the same without the division.
    rloo: A = r - mean of the others = n / (n - 1) * (r - mean); a group of one has none, A = 0 (Ahmadian et al. 2024).

    Equal rewards give exactly 0.

    Raises:
      ValueError: unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"advantage mode {mode!r}, expected one of {', '.join(MODES)}")
    rewards = np.asarray(rewards, np.float64)
    _, first, group = np.unique(np.asarray(group_ids), return_index=True, return_inverse=True)
    size = np.bincount(group)
    shifted = rewards - rewards[first][group]  # a group's own reward as origin: the mean of equal rewards is then exact
    advantages = shifted - (np.bincount(group, shifted) / size)[group]
    if mode == "group_mean":
        return advantages
    if mode == "rloo":
        return advantages * (size / np.maximum(size - 1, 1))[group]
    advantages = np.where((size == 1)[group], rewards, advantages)
    if mode == "grpo_nostd":
        return advantages
    variance = np.bincount(group, advantages**2) / np.maximum(size - 1, 1)
    std = np.where(size == 1, 1.0, np.sqrt(variance))
    return advantages / (std[group] + 1e-6)


def whiten(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(A - mean) / (std + 1e-8) * mask over the valid tokens, std unbiased, 0 for fewer than two of them; float64[n, T]."""
    valid = advantages[mask > 0]
    if valid.size < 2:
        return np.zeros_like(advantages)
    return (advantages - valid.mean()) / (valid.std(ddof=1) + EPS) * mask


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft punishment of long answers (Yu et al. 2025, equation 13), to be added to the reward: in [-factor, 0].

    0 up to limit - buffer tokens, then linear, -factor at the limit. The paper counts response tokens against a response limit;
    here both include the prompt, since only their sum is limited (rollout.max_model_len).
    """
    return -factor * min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def snis_weight(student_rewards: Sequence[float], teacher_reward: float, beta: float) -> float:
    """Self-normalised importance weight of a teacher row, > 0.

    c = exp(A*/beta) / mean_j exp(A_j/beta), j over students and teacher, A = r - mean; invariant to a shift of all rewards.
    """
    scaled = np.asarray([*student_rewards, teacher_reward], np.float64) / beta
    weights = np.exp(scaled - scaled.max())  # the maximum cancels in the quotient and keeps exp in range
    return float(weights[-1] / weights.mean())
