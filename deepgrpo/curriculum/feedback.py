"""What the curricula share in reading a step's groups: which failures the teacher gets, and what injection came to."""

from collections.abc import Sequence

from deepgrpo.types import Group, Rollout

FAILURES = ("all", "longest_prefix")

Judged = tuple[Group, int, int]  # a group with a verdict, its successes, its rollouts with a verdict


def check_step(step: int) -> None:
    """Raises:
    ValueError: `step` is negative (-1 means never).
    """
    if step < 0:
        raise ValueError(f"step must be >= 0 (-1 means never), got {step}")


def check_failures(failures: str) -> None:
    """Raises:
    ValueError: it is none of `FAILURES`.
    """
    if failures not in FAILURES:
        raise ValueError(f"curriculum.failures must be one of {', '.join(FAILURES)}, got {failures!r}")


def judged_groups(groups: Sequence[Group], threshold: float) -> list[Judged]:
    """The groups with any verdict, and their (k_succ, k_total)."""
    return [(group, *group.successes(threshold)) for group in groups if group.verdicts()]


def failures_for_teacher(group: Group, threshold: float, failures: str) -> list[Rollout]:
    """Of a group's failures "all", or those with the "longest_prefix" that a step-checking grader found right: the one.

    Raises:
      ValueError: longest_prefix, and no failure of the group carries `right_prefix`.
    """
    failed = group.failures(threshold)
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
