"""The numbers of TreeRL (Hou et al. 2025): where a tree of responses is forked, and what its tokens earned.

Computed on the host, in float64.

A tree's nodes are *segments*: runs of response tokens between forks. A leaf ends a response; what is above it is its path.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

MIN_PREFIX_RATIO = 0.05  # of a response that has no fork yet, tokens before its first fork
MIN_SUFFIX_TOKENS = 10  # of the old continuation that lie after a fork, and fewest tokens that a new one has room for


@dataclasses.dataclass(frozen=True)
class Segment:
    """A node of the trees of one prompt.

    parent: index of the segment before it, which comes earlier in the list; -1: it is a tree's first. length: tokens.
    leaf: it ends a response. reward: of that response; None: it has no verdict, or the segment is no leaf.
    """

    parent: int
    length: int
    leaf: bool = False
    reward: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What the segments of a prompt's trees are worth.

    root: V_root, mean reward of all judged leaves. value: float64[n], V. leaves: int64[n], judged leaves below. advantage:
    float64[n], R. Segments above no judged leaf have 0 of each.
    """

    root: float
    value: np.ndarray
    leaves: np.ndarray
    advantage: np.ndarray


def fork_candidates(
    logps: np.ndarray, min_prefix_ratio: float = MIN_PREFIX_RATIO, min_suffix_tokens: int = MIN_SUFFIX_TOKENS
) -> np.ndarray:
    """Positions p of a segment's tokens before which it may be forked: int64[m], rising.

    max(1, int(min_prefix_ratio * n)) <= p <= n - min_suffix_tokens. In the trees, the ratio counts for a response without a fork
    only: below one it is 0.

    Args:
      logps: float[n], log-probs of the segment's tokens.
    """
    n = len(logps)
    return np.arange(max(1, int(min_prefix_ratio * n)), n - min_suffix_tokens + 1)


def most_surprising(scores: np.ndarray, n: int) -> np.ndarray:
    """Indices of the at most n highest scores (-log p of sampled tokens), highest first, of equals the first: int64[<= n]."""
    return np.argsort(-np.asarray(scores, np.float64), kind="stable")[:n]


def values(segments: Sequence[Segment]) -> Values:
    """V and R of every segment.

        V(s) = mean reward of the judged leaves below s
        R(s) = (V(s) - V_root + V(s) - V(parent)) / sqrt(judged leaves below s)      the second difference is 0 for a tree's first

    A leaf without a verdict counts nowhere. Equal rewards give exactly 0.

    Args:
      segments: of all trees of one prompt.
    """
    rewards = [s.reward for s in segments if s.leaf and s.reward is not None]
    origin = rewards[0] if rewards else 0.0  # a reward of their own as origin: the means of equal rewards are then exact
    leaves, total = np.zeros(len(segments), np.int64), np.zeros(len(segments))
    for i, segment in reversed(list(enumerate(segments))):
        if segment.leaf and segment.reward is not None:
            leaves[i], total[i] = 1, segment.reward - origin
        if segment.parent >= 0:
            leaves[segment.parent] += leaves[i]
            total[segment.parent] += total[i]
    V = total / np.maximum(leaves, 1)
    parent = np.array([s.parent for s in segments], np.int64)
    root = float(total[parent < 0].sum()) / max(len(rewards), 1)
    local = np.where(parent >= 0, V - V[parent], 0.0)
    R = np.where(leaves > 0, (V - root + local) / np.sqrt(np.maximum(leaves, 1)), 0.0)
    return Values(root + origin, np.where(leaves > 0, V + origin, 0.0), leaves, R)


def token_advantages(segments: Sequence[Segment]) -> list[np.ndarray]:
    """For each judged leaf, in their order, R of the segment that each token of its path belongs to: float64[path length]."""
    R, paths, found = values(segments).advantage, [], []
    for segment, advantage in zip(segments, R, strict=True):
        before = [paths[segment.parent]] if segment.parent >= 0 else []
        paths.append(np.concatenate([*before, np.full(segment.length, advantage)]))
        if segment.leaf and segment.reward is not None:
            found.append(paths[-1])
    return found
