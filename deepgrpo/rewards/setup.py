"""The grading of a run, from its configuration."""

import contextlib
import pathlib
from collections.abc import Collection

from deepgrpo.rewards.grade import check_sources, external_sources, rubric_of
from deepgrpo.rewards.service import GradingService

MARKS_AN_ANSWER = 2  # at most: some answers are shown to two judges


def open_grading(config, stack: contextlib.ExitStack, sources: Collection[str], folder: pathlib.Path) -> GradingService:
    """The grading service for `sources`, with a judge and a sandbox where one of them needs it; closed with `stack`.

    Args:
      config: the whole configuration. folder: of the judge's replies.

    Raises:
      SystemExit, ValueError: a source has no grader, or a key is malformed or missing; says which.
      sandbox.SandboxUnavailable: a source runs code of the model's, which can't be isolated here.
    """
    rewards, rubric = config.rewards, rubric_of(config.rewards)
    check_sources(sources, rubric)
    external, deadline = None, 0.0
    if outside := external_sources(sources, rubric):
        from deepgrpo.endpoint.client import DEADLINE_SLACK
        from deepgrpo.rewards import ds1000, dsbench  # these bring the endpoint's client
        from deepgrpo.rewards import external as external_lib
        from deepgrpo.rewards.judges import open_judge

        judged = outside & external_lib.JUDGED.keys() - external_lib.NO_JUDGE_NEEDED
        judge_deadline = MARKS_AN_ANSWER * (config.judge.timeout + DEADLINE_SLACK)
        judge_deadline = MARKS_AN_ANSWER * (config.judge.timeout + DEADLINE_SLACK)
        external = external_lib.ExternalGrading(
            outside,
            judge=open_judge(config, stack, folder) if judged else None,
            allow_network=config.sandbox.allow_network,
            judge_deadline=judge_deadline,
            strict=rewards.grader != "typed",
        )
        stack.enter_context(external)
        deadline = max(judge_deadline * bool(judged), ds1000.SECONDS, dsbench.SECONDS)
    service = GradingService(rewards.workers, rewards.deadline, sources, rubric, external=external, external_deadline=deadline)
    return stack.enter_context(service)
