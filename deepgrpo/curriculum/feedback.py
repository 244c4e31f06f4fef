"""What the curricula share in reading a step's groups: which failures the teacher gets, and what injection came to."""

from collections.abc import Sequence

import ml_collections

from deepgrpo.types import Group, Rollout

FAILURES = ("all", "longest_prefix", "none")

Judged = tuple[Group, int, int]  # a group with a verdict, its successes, its rollouts with a verdict


def check_step(step: int) -> None:
    """Raises:
    ValueError: `step` is negative (-1 means never).
    """
    if step < 0:
        raise ValueError(f"step must be >= 0 (-1 means never), got {step}")


def wanted_failures(config: ml_collections.ConfigDict) -> str:
    """`curriculum.failures`, or "none" without a teacher: nothing is queued for one that never comes."""
    return config.curriculum.failures if config.teacher.enabled else "none"


def check_failures(failures: str) -> None:
    """Raises:
    ValueError: it is none of `FAILURES`.
    """
    if failures not in FAILURES:
        raise ValueError(f"curriculum.failures must be one of {', '.join(FAILURES)}, got {failures!r}")


def judged_groups(groups: Sequence[Group], threshold: float, failing: bool = False) -> list[Judged]:
    """The groups that are judged, and their (k_succ, k_total).

    failing: also those with too few verdicts, if one of these is a failure: for pools that conclude from it nothing but that.
    """
    counted = [(group, *group.successes(threshold)) for group in groups]
    return [(g, k_succ, k_total) for g, k_succ, k_total in counted if g.judged or (failing and k_succ < k_total)]


def failures_for_teacher(group: Group, threshold: float, failures: str) -> list[Rollout]:
    """Of a group's failures "all", "none", or the one with the "longest_prefix" that a step-checking grader found right.

    Raises:
      ValueError: longest_prefix, and no failure of the group carries `right_prefix`.
    """
    failed = [] if failures == "none" else group.failures(threshold)
    if not failed or failures == "all":
        return failed
    graded = [rollout for rollout in failed if rollout.grade.right_prefix is not None]
    if not graded:
        raise ValueError(
            f"curriculum.failures=longest_prefix needs a step-checking grader, but no failure of group {group.prompt.group_id!r} "
            f"(data source {group.prompt.problem.data_source!r}) carries right_prefix; set curriculum.failures=all"
        )
    return [max(graded, key=lambda rollout: rollout.grade.right_prefix)]


def injection_metrics(groups: Sequence[Group], judged: Sequence[Judged]) -> dict[str, float]:
    """`synthetic_inject/*` that every pool of states reports."""
    injected = [group for group in groups if group.prompt.injected]
    return {
        "synthetic_inject/injected_count": float(len(injected)),
        "synthetic_inject/rollout_n": float(injected[0].prompt.n if injected else 0),
        "synthetic_inject/failed_collected": float(sum(k_total - k_succ for _, k_succ, k_total in judged)),
        "synthetic_inject/failure_feed_skipped": float(not judged),
    }
