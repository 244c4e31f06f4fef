"""How a step's rows are cut into optimizer steps: in which order they come, and how many each step gets."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepgrpo.curriculum import pool_class, replaces_prompts
from deepgrpo.curriculum.base import injection_count
from deepgrpo.learner.objective import STREAMS

SHUFFLE = 1  # purpose of this module's randomness in (seed, step, purpose)


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """One optimizer step. kind: "ppo", or "sft" (teacher rows alone, after the PPO steps). rows: of (main, branch, teacher)."""

    kind: str
    rows: tuple[int, int, int]


def balanced(n: int, parts: int) -> list[int]:
    """Sizes of `parts` slices of n rows that differ by at most one, larger ones first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def responses_per_prompt(config: Any) -> int:
    """Rollouts of a dataset prompt."""
    M, N, L, T = config.treerl
    return M * (1 + N * L * T) if config.loop == "treerl" else config.rollout.n


def step_rows(config: Any) -> tuple[int, int]:
    """The most (students' main, other) rows that a training step of a configuration has: every rollout has a gradient, and every
    state a teacher row."""
    batch, n, curriculum = config.data.batch_size, responses_per_prompt(config), config.curriculum
    if not pool_class(curriculum.pool).by_ratio:
        return batch * n, branch_rows(config)
    states = injection_count(batch, curriculum.injection_ratio, batch)
    extra = states * (curriculum.rollout_n or n)
    dataset = (batch - states if curriculum.injection_mode == "replace" else batch) * n
    return max(batch * n, dataset + extra), states if config.objective.teacher_loss != "null" else 0


def branch_rows(config: Any) -> int:
    """The most branch and teacher rows of a training step. Of inline branches, whose number depends on how many responses fail, a
    mini-batch's share when all of them do and all train: more in one mini-batch cost a compilation then, less would cost memory
    always."""
    pool = pool_class(config.curriculum.pool)
    groups, n = pool.branch_groups(config, config.optim.mini_batch_prompts * config.rollout.n)
    return groups * (n + (pool.keeps_suffixes and config.objective.teacher_loss != "null"))


def most_rows(main: int, other: int, mini_batch_rows: int) -> int:
    """Rows of the largest mini-batch that `partition` makes of at most so many main and other (branch, teacher) rows: one step
    takes up to twice `mini_batch_rows` less one, and all the other rows."""
    return min(main, 2 * mini_batch_rows - 1) + other


def shuffled(group_ids: Sequence[str], by: str, seed: int, step: int) -> list[int]:
    """The order in which the rows of a step are cut into mini-batches: indices of rows, a function of its arguments.

    Args:
      group_ids: of each row. by: "groups": whole groups change places, so that the prompt that a group shares is computed in one
        mini-batch, or in two where the cut goes through it; "rows": every row by itself (the reference).
    """
    random = np.random.default_rng((seed, step, SHUFFLE))
    if by == "rows":
        return [int(i) for i in random.permutation(len(group_ids))]
    members: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        members.setdefault(group, []).append(i)
    groups = list(members.values())
    return [i for g in random.permutation(len(groups)) for i in groups[g]]


def least_prompts(config: Any) -> int:
    """The fewest dataset prompts of a training step: fewer than a batch where hard states take their places."""
    batch, curriculum = config.data.batch_size, config.curriculum
    if not replaces_prompts(config):
        return batch
    return batch - injection_count(batch, curriculum.injection_ratio, batch, config.strict_reference)


def partition(
    counts: tuple[int, int, int],
    mini_batch_rows: int,
    *,
    strict_reference: bool = False,
    teacher_mini_batch_rows: int = 64,
    post_ppo: bool = False,
    mixed: bool = True,
    allow_partial: bool = False,
    ppo_epochs: int = 1,
) -> list[MiniBatch]:
    """Cuts the rows of a step into optimizer steps.

    There are M = max(1, floor(n_main / mini_batch_rows)) steps, and each stream is spread over all of them in balanced slices, so
    that no row is ever lost; no rows, no steps. With `strict_reference` the reference's hazards return: M = floor(...) may be 0,
    which loses all rows; branches reach only the first floor(n_branch / mini_batch_rows) steps, and outside the mixed
    reduction teacher rows only the first floor(n_teacher / teacher_mini_batch_rows).

    Args:
      counts: rows of the main, branch and teacher streams.
      mini_batch_rows: rows of an optimizer step (prompts times rollouts a prompt).
      post_ppo: teacher rows form `sft` steps of their own after the PPO steps: floor (`allow_partial`: ceil) of
        n_teacher / teacher_mini_batch_rows of them.
      mixed: the teacher shares the students' denominator (mixed_token_mean).
      ppo_epochs: how often the PPO steps are repeated, over the same mini-batches.
    """
    n_main, n_branch, n_teacher = counts
    joint_teacher = 0 if post_ppo else n_teacher
    steps = n_main // mini_batch_rows
    if not strict_reference:
        steps = max(1, steps) if n_main + n_branch + joint_teacher else 0

    def spread(n: int, rows: int, partial: bool) -> list[int]:
        parts = min(steps, n // rows) if strict_reference and not partial else steps
        return (balanced(n, parts) if parts else []) + [0] * (steps - parts)

    streams = zip(
        balanced(n_main, steps) if steps else [],
        spread(n_branch, mini_batch_rows, False),
        spread(joint_teacher, teacher_mini_batch_rows, mixed),
        strict=True,
    )
    plan = [MiniBatch("ppo", rows) for rows in streams] * ppo_epochs
    if post_ppo and n_teacher:
        parts = -(-n_teacher // teacher_mini_batch_rows) if allow_partial else n_teacher // teacher_mini_batch_rows
        plan += [MiniBatch("sft", (0, 0, size)) for size in (balanced(n_teacher, parts) if parts else [])]
    return plan


def cut(rows: Sequence[Any], config: Any, step: int) -> list[list[Any]]:
    """The rows of each optimizer step of one epoch of training step `step`: `shuffled` by group, or by row as in the reference,
    then cut by `partition`. config: of the run."""
    order = shuffled([row.group_id for row in rows], "rows" if config.strict_reference else "groups", config.seed, step)
    streams = [[rows[i] for i in order if rows[i].source == source] for source in STREAMS]
    plan = partition(
        tuple(map(len, streams)),
        config.optim.mini_batch_prompts * config.rollout.n,
        strict_reference=config.strict_reference,
        teacher_mini_batch_rows=config.optim.teacher.mini_batch_rows,
        mixed=config.objective.teacher_reduction == "mixed_token_mean",
    )
    parts = [iter(stream) for stream in streams]
    return [[next(part) for part, n in zip(parts, mini_batch.rows, strict=True) for _ in range(n)] for mini_batch in plan]


def interleave(counts: tuple[int, int, int], world_size: int) -> list[int]:
    """The reference's row order: indices into main|branch|teacher such that its W workers get equal parts of every stream.

    The learner itself needs no such order (its denominators are global); this serves comparisons with the reference. Each count
    must be divisible by `world_size`.
    """
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    parts = [np.split(np.arange(n) + start, world_size) for n, start in zip(counts, starts, strict=True)]
    return [int(i) for worker in range(world_size) for stream in parts for i in stream[worker]]
