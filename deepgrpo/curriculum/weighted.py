"""Random choices of the pools, each a function of a numpy Generator that is made from (seed, step, purpose, index)."""

from collections.abc import Hashable, Sequence

import numpy as np

STATES, FAILURES = 0x57A7E, 0xFA11  # purposes: states to roll out; failures for the teacher
STRATEGIES = ("stratified", "uniform")


def generator(seed: int, step: int, purpose: int, index: int = 0) -> np.random.Generator:
    """The randomness of one purpose in one step; `index` counts the draws that a step makes for it."""
    return np.random.default_rng((seed, step, purpose, index))


def weighted_sample(weights: Sequence[float] | np.ndarray, k: int, random: np.random.Generator) -> list[int]:
    """Draws `k` indices without replacement, with probability proportional to weight at each draw.

    Each item gets the key ln(u) / w, u uniform in (0, 1); the k largest keys are the sample (exponential keys: Efraimidis and
    Spirakis, Weighted random sampling with a reservoir, 2006). Items of weight 0 come last, in the order given.

    Args:
      weights: float64[N], >= 0.

    Returns:
      Indices, by descending key. All of them in the order given, without any randomness, if k >= N.
    """
    if k >= len(weights):
        return list(range(len(weights)))
    if k <= 0:
        return []
    weights = np.asarray(weights, np.float64)
    uniform = np.maximum(random.random(len(weights)), 1e-12)  # float64[N]; 0 is possible, its logarithm is not
    with np.errstate(divide="ignore"):
        keys = np.where(weights > 0, np.log(uniform) / weights, -np.inf)
    return np.argsort(-keys, kind="stable")[:k].tolist()


def stratified_sample(groups: Sequence[Hashable], n: int, random: np.random.Generator) -> list[int]:
    """Draws `n` indices without replacement, as evenly over the groups as their sizes allow.

    The groups are shuffled once, then visited in turn; each visit takes a random one of the group's remaining members.

    Args:
      groups: of each item.

    Returns:
      min(n, N) indices, in the order drawn.
    """
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    queues = [random.permutation(indices).tolist() for indices in members.values()]
    order = random.permutation(len(queues)).tolist()
    chosen: list[int] = []
    while order and len(chosen) < n:
        for group in order[: n - len(chosen)]:
            chosen.append(queues[group].pop())
        order = [group for group in order if queues[group]]
    return chosen


def sample(groups: Sequence[Hashable], n: int, strategy: str, random: np.random.Generator) -> list[int]:
    """Draws min(n, N) indices without replacement: "stratified" over the groups, or "uniform" over the items.

    Raises:
      ValueError: unknown strategy; or n is negative and the strategy uniform.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"sampling strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy == "stratified":
        return stratified_sample(groups, n, random)
    return random.choice(len(groups), size=min(n, len(groups)), replace=False).tolist()
