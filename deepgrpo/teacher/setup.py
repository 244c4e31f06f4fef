"""Puts the teacher together from the configuration: endpoint (or oracle), client, annotator, worker."""

import contextlib
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections

from deepgrpo.curriculum import pool_class
from deepgrpo.curriculum.base import Curriculum
from deepgrpo.endpoint.cache import ReplyCache
from deepgrpo.endpoint.client import open_client
from deepgrpo.rewards.grade import leaks_answer, missing_form
from deepgrpo.rewards.rubric import Rubric
from deepgrpo.teacher import oracle
from deepgrpo.teacher.annotate import Annotator, Grader
from deepgrpo.teacher.splice import Codec, Limits
from deepgrpo.teacher.worker import TeacherWorker


def open_teacher(
    config: ml_collections.ConfigDict,
    stack: contextlib.ExitStack,
    *,
    curriculum: Curriculum,
    grader: Grader,
    tokenizer: Any,
    stop_ids: Sequence[int],
    folder: pathlib.Path,
) -> TeacherWorker:
    """Returns the worker, not yet started; what it needs is closed with `stack`.

    Args:
      config: the whole configuration. tokenizer: an instance that nothing else uses. folder: of the replies' cache.
    """
    teacher = config.teacher
    if teacher.base_url == "oracle":  # also when replaying, where nobody asks it: a request's key must stay the same
        served = stack.enter_context(
            oracle.Oracle(
                teacher.oracle, solutions=teacher.oracle_solutions, error_rate=teacher.oracle_error_rate, seed=config.seed
            )
        )
        config = config.copy_and_resolve_references()
        config.teacher.base_url, config.teacher.model = served.base_url, oracle.MODEL
    cache = stack.enter_context(contextlib.closing(ReplyCache(folder, teacher.replay)))
    client = open_client(config, "teacher", cache)
    annotator = Annotator(
        client=client,
        grader=grader,
        codec=Codec(tokenizer),
        leaks=leaks_answer,
        form=functools.partial(missing_form, rubric=Rubric.from_config(config.rewards)),
        limits=Limits(
            min_prefix_match_tokens=teacher.min_prefix_match_tokens,
            min_prefix_match_ratio=teacher.min_prefix_match_ratio,
            min_suffix_len=teacher.min_suffix_len,
            max_model_len=config.rollout.max_model_len,
            min_remaining_tokens=config.curriculum.min_remaining_tokens,
        ),
        threshold=config.rewards.threshold,
        stop_ids=stop_ids,
        splice="tokens" if config.strict_reference else "text",
        place=config.curriculum.cut,
        prefix_aware=not pool_class(config.curriculum.pool).branches,  # then all failures start from plain problems
        seed=config.seed,
        deadline=client.deadline,
        strict_reference=config.strict_reference,
    )
    return TeacherWorker(
        curriculum,
        annotator,
        max_concurrent=teacher.max_concurrent,
        synchronous=teacher.synchronous,
        strict_reference=config.strict_reference,
    )
