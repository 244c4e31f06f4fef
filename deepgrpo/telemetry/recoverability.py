"""Recoverability: from where in a failed answer the student still finds the right one (at which places it pays to branch).

A fixed random subset of the training set gets one sampled answer each. A failed answer is continued several times from every
place where it could be branched. Nothing of it is trained on, nothing enters a curriculum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from deepgrpo.curriculum.pivots import Partition, Pivot, candidates
from deepgrpo.types import Group, Problem, Prompt, as_ids

SEED = 42  # of the subset, the same in every run
CHUNK = 32  # failed answers whose branches are rolled out together: bounds what is in memory

Roll = Callable[[Sequence[Prompt], str], list[Group]]  # (prompts, purpose of their seeds)


def subset(problems: Sequence[Problem], n: int) -> list[Problem]:
    """min(n, all) different problems, in random order."""
    order = np.random.default_rng(SEED).permutation(len(problems))
    return [problems[i] for i in order[:n].tolist()]


def evaluate(
    problems: Sequence[Problem], roll: Roll, partition: Partition, *, branches: int, threshold: float, max_model_len: int
) -> Iterator[dict[str, Any]]:
    """Yields a record a place: the answer (uid), the place, and what the continuations from there came to.

    An answer without a verdict is left out: nobody knows whether it failed. Continuations without a verdict count neither way.

    Args:
      branches: continuations of a place. threshold: success is reward > threshold. max_model_len: tokens of prompt and response.
    """
    prompts = [Prompt(p.prompt_ids, p, 1, f"recoverability:{i}") for i, p in enumerate(problems)]
    failed = [group for group in roll(prompts, "recoverability") if group.failures(threshold)]
    for n in range(0, len(failed), CHUNK):
        chunk = failed[n : n + CHUNK]
        places = [(group, pivot) for group in chunk for pivot in pivots(group, partition, max_model_len)]
        made = roll([branch(group, pivot, branches) for group, pivot in places], f"recoverability:branches:{n}")
        for (group, pivot), branched in zip(places, made, strict=True):
            yield record(group, pivot, branched, threshold)


def pivots(group: Group, partition: Partition, max_model_len: int) -> list[Pivot]:
    """Every place where a group's only answer can be branched."""
    segments = partition.segments(group.rollouts[0].completion.ids)
    return candidates(len(group.prompt.ids), segments, max_model_len)


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


def metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`recoverability/*` of the records: failed answers, places, and where a success was found."""
    judged = [r for r in records if r["recoverability"] is not None]
    answers: dict[str, list[dict[str, Any]]] = {}
    for r in judged:
        answers.setdefault(r["uid"], []).append(r)
    values = {"answers": len(answers), "positions": len(judged)}
    if judged:
        values["recovered_share"] = sum(r["recoverability"] for r in judged) / len(judged)
        values["success_rate"] = sum(r["n_success"] for r in judged) / sum(r["n_branches"] for r in judged)
        values["recovered_answers_share"] = sum(any(r["n_success"] for r in rows) for rows in answers.values()) / len(answers)
    if found := [
        max(r["position_ratio"] for r in rows if r["n_success"]) for rows in answers.values() if any(r["n_success"] for r in rows)
    ]:
        values["last_recoverable_ratio"] = sum(found) / len(found)
    return {f"recoverability/{name}": float(value) for name, value in values.items()}
