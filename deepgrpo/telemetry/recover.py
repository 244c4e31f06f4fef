"""What is rolled out beside training and never trained on: roots of hard states (pairs), and branches of failed answers.

Pairs measure what a hard state is worth: its problem is rolled out from the prompt in the same step, as often. These groups are
of the stream "paired" and leave the step before anything else sees its groups.

Recoverability measures from where in a failed answer the student still finds the right one, hence where it pays to branch. A
fixed random subset of the training set gets one sampled answer each; a failed answer is continued several times from every place
where it could be branched.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.curriculum.pivots import Pivot, candidates, create_partition
from deepgrpo.types import Group, Problem, Prompt, as_ids

PAIRED_STATES = 4  # states of a step that are compared with their roots
STREAM = "paired"
ROOT = ":root"  # ends the group_id of a paired group, which otherwise is its state's

RECOVER_PROBLEMS = 1000  # training problems whose failed answers are branched
SEED = 42  # of the subset, the same in every run
CHUNK = 32  # failed answers whose branches are rolled out together, which bounds what is in memory


#### Pairs


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


def pair_metrics(pairs: Sequence[Pair], threshold: float) -> dict[str, float]:
    """`prefix_paired_eval/*`. Rates of responses are over all rollouts with a verdict, shares are of the pairs with two such
    groups; what has no value is left out."""
    judged = [
        (pair, Counts(*pair.prefix.successes(threshold), *pair.root.successes(threshold), pair.about.get("depth_edges")))
        for pair in pairs
        if pair.prefix.judged and pair.root.judged
    ]
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


#### Recoverability


def subset(problems: Sequence[Problem], n: int) -> list[Problem]:
    """min(n, all) different problems, in random order."""
    order = np.random.default_rng(SEED).permutation(len(problems))
    return [problems[i] for i in order[:n].tolist()]


def recoverability(
    problems: Sequence[Problem], roll: Callable[[Sequence[Prompt], str], list[Group]], config: ml_collections.ConfigDict
) -> Iterator[dict[str, Any]]:
    """Yields a record for each place: the answer (uid), the place, and what the continuations from there came to.

    An answer without a verdict is left out: nobody knows whether it failed. Continuations without a verdict count neither way.

    Args:
      roll: (prompts, purpose of their seeds) -> groups. config: the whole configuration; `branches` says where an answer is
        branched, and how often.
    """
    threshold, segments = config.rewards.threshold, create_partition(config).segments
    prompts = [Prompt(p.prompt_ids, p, 1, f"recoverability:{i}") for i, p in enumerate(problems)]
    failed = [group for group in roll(prompts, "recoverability") if group.failures(threshold)]
    for n in range(0, len(failed), CHUNK):
        places = [
            (group, pivot)
            for group in failed[n : n + CHUNK]
            for pivot in candidates(
                len(group.prompt.ids), segments(group.rollouts[0].completion.ids), config.rollout.max_model_len
            )
        ]
        branches = [branch(group, pivot, config.branches.branches_per_point) for group, pivot in places]
        made = roll(branches, f"recoverability:branches:{n}")
        for (group, pivot), branched in zip(places, made, strict=True):
            yield record(group, pivot, branched, threshold)


def branch(group: Group, pivot: Pivot, n: int) -> Prompt:
    prompt = group.prompt
    ids = as_ids(np.concatenate([prompt.ids, group.rollouts[0].completion.ids[: pivot.kept]]))
    return Prompt(ids, prompt.problem, n, f"{prompt.group_id}:{pivot.index}", pivot)


def record(group: Group, pivot: Pivot, branched: Group, threshold: float) -> dict[str, Any]:
    k_succ, k_total = branched.successes(threshold)
    rewards = [rollout.reward for rollout in branched.verdicts()]
    problem = group.prompt.problem
    return {
        "uid": group.prompt.group_id,
        "data_source": problem.data_source,
        "task_id": problem.index,
        "position_index": pivot.index,
        "chain_length": pivot.chain_length,
        "position_ratio": pivot.ratio,
        "n_branches": k_total,
        "n_success": k_succ,
        "recoverability": float(k_succ > 0) if branched.judged or k_succ else None,
        "mean_branch_reward": sum(rewards) / len(rewards) if rewards else None,
        "main_chain_reward": group.rollouts[0].reward,
    }


def recoverability_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`recoverability/*` of the records: failed answers, places, and where a success was found."""
    judged = [r for r in records if r["recoverability"] is not None]
    answers: dict[str, list[float]] = {}  # ratios of the places of an answer from which a branch succeeded
    for r in judged:
        answers.setdefault(r["uid"], []).extend([r["position_ratio"]] if r["n_success"] else [])
    values = {"answers": len(answers), "positions": len(judged)}
    if judged:
        values["recovered_share"] = sum(r["recoverability"] for r in judged) / len(judged)
        values["success_rate"] = sum(r["n_success"] for r in judged) / sum(r["n_branches"] for r in judged)
        values["recovered_answers_share"] = share(map(bool, answers.values()))
    if found := [max(ratios) for ratios in answers.values() if ratios]:
        values["last_recoverable_ratio"] = sum(found) / len(found)
    return {f"recoverability/{name}": float(value) for name, value in values.items()}
