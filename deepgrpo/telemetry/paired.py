"""Paired evaluation: what a hard state is worth, measured by rolling its problem out from the prompt in the same step.

The further groups are of the stream "paired": they leave the step before anything else sees its groups.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepgrpo.types import Group, Prompt

STREAM = "paired"
ROOT = ":root"  # ends the group_id of a paired group, which otherwise is its state's


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A state's group and its root's, of the same policy. about: `Curriculum.look_up` of the state before the step."""

    prefix: Group
    root: Group
    about: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Counts:
    """A pair's successes and rollouts with a verdict."""

    prefix_succ: int
    prefix_total: int
    root_succ: int
    root_total: int
    depth: int | None

    @property
    def difference(self) -> float:
        return self.prefix_succ / self.prefix_total - self.root_succ / self.root_total


BUCKETS: dict[str, Callable[[Counts], bool]] = {
    "root_zero": lambda c: c.root_succ == 0,
    "root_at_most_one_success": lambda c: c.root_succ <= 1,
    "root_nonzero": lambda c: c.root_succ > 0,
    "depth1": lambda c: c.depth == 1,
    "depth_ge2": lambda c: c.depth is not None and c.depth >= 2,
}


def root_prompts(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """The roots of the first `n` hard states among a step's prompts, each as often as its state is rolled out."""
    states = [prompt for prompt in prompts if prompt.injected and prompt.stream == "main" and prompt.locked]
    return [Prompt(p.problem.prompt_ids, p.problem, p.n, p.group_id + ROOT, stream=STREAM) for p in states[:n]]


def split(groups: Sequence[Group]) -> tuple[list[Group], dict[str, Group]]:
    """A step's groups without the paired ones, and those by the group_id of their state."""
    rest = [group for group in groups if group.prompt.stream != STREAM]
    paired = [group for group in groups if group.prompt.stream == STREAM]
    return rest, {group.prompt.group_id.removesuffix(ROOT): group for group in paired}


def metrics(pairs: Sequence[Pair], threshold: float) -> dict[str, float]:
    """`prefix_paired_eval/*`. Rates of responses are over all rollouts with a verdict, shares are of the pairs with two such
    groups; what has no value is left out."""
    judged = [(pair, counts) for pair in pairs if (counts := count(pair, threshold))]
    counts = [c for _, c in judged]
    values = {
        "pairs": len(judged),
        "requested_pairs": len(pairs),
        "filtered_rollouts": sum(len(pair.root.rollouts) for pair in pairs),
        **rates(counts),
    }
    if judged:
        values |= {
            "root_any_success_rate": share(c.root_succ > 0 for c in counts),
            "prefix_minus_root_any_success": share(c.prefix_succ > 0 for c in counts) - share(c.root_succ > 0 for c in counts),
            "root_better_frac": share(c.difference < 0 for c in counts),
            "equal_frac": share(c.difference == 0 for c in counts),
            "any_prefix_only_frac": share(c.prefix_succ > 0 and not c.root_succ for c in counts),
            "any_root_only_frac": share(c.root_succ > 0 and not c.prefix_succ for c in counts),
            "any_both_success_frac": share(c.root_succ > 0 and c.prefix_succ > 0 for c in counts),
            "any_both_fail_frac": share(not c.root_succ and not c.prefix_succ for c in counts),
            "prefix_depth_tokens_mean": sum(pair.prefix.prompt.locked for pair, _ in judged) / len(judged),
        }
    if placed := [pair.about for pair, c in judged if c.depth is not None]:
        values |= {
            "prefix_depth_edges_mean": sum(about["depth_edges"] for about in placed) / len(placed),
            "prefix_depth_ge2_frac": share(about["depth_edges"] >= 2 for about in placed),
            "prefix_has_descendant_frac": share(about["descendants"] > 0 for about in placed),
        }
    for bucket, belongs in BUCKETS.items():
        members = [c for c in counts if belongs(c)]
        values |= {f"{bucket}_{name}": value for name, value in {"pairs": len(members), **rates(members)}.items()}
    return {f"prefix_paired_eval/{name}": float(value) for name, value in values.items()}


def count(pair: Pair, threshold: float) -> Counts | None:
    """None where one of the groups is not judged."""
    prefix, root = pair.prefix.successes(threshold), pair.root.successes(threshold)
    return Counts(*prefix, *root, pair.about.get("depth_edges")) if pair.prefix.judged and pair.root.judged else None


def rates(counts: Sequence[Counts]) -> dict[str, float]:
    """What is reported of all pairs and of every bucket; empty without a pair."""
    if not counts:
        return {}
    root = sum(c.root_succ for c in counts) / sum(c.root_total for c in counts)
    prefix = sum(c.prefix_succ for c in counts) / sum(c.prefix_total for c in counts)
    return {
        "root_response_success_rate": root,
        "prefix_response_success_rate": prefix,
        "prefix_minus_root_response_success": prefix - root,
        "prefix_any_success_rate": share(c.prefix_succ > 0 for c in counts),
        "prefix_better_frac": share(c.difference > 0 for c in counts),
    }


def share(truths: Iterable[bool]) -> float:
    truths = list(truths)
    return sum(truths) / len(truths)
