"""A step's scored groups in, the rows that train out: advantages, teacher rows, rows without a gradient left out."""

import logging
from collections.abc import Mapping, Sequence

import ml_collections

from deepgrpo.curriculum import pool_class
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.attach import Continuation, attach, join
from deepgrpo.learner.rows import Overlong, Row
from deepgrpo.types import Group

IDLE_STEPS = 20  # in a row whose groups are all alike, before it is said: of a few, plain GRPO has plenty

log = logging.getLogger(__name__)


class Idle:
    """Says, once for each stretch of steps without an update, why there is none."""

    def __init__(self):
        self._steps, self._said = 0, False

    def look(self, reason: str, patience: int) -> None:
        """reason: why a step's groups gave no rows to train on, "" if they did. patience: how often in a row that is ordinary."""
        if not reason:
            if self._said:
                log.warning("there are rows to train on again, after %d steps without", self._steps)
            self._steps, self._said = 0, False
            return
        self._steps += 1
        if self._steps >= patience and not self._said:
            self._said = True
            steps = "this step" if self._steps == 1 else f"the last {self._steps} steps"
            log.warning("no update in %s: %s (said again only after an update)", steps, reason)


def training_rows(
    groups: Sequence[Group],
    continuations: Mapping[str, Continuation],
    config: ml_collections.ConfigDict,
    stop_ids: Sequence[int],
    idle: Idle,
) -> tuple[list[Row], dict[str, float]]:
    """The rows of a training step by the rules of the whole configuration.

    Args:
      groups: those that may train. continuations: the teacher's, of the injected ones (`attach.find_continuations`).
      stop_ids: of the student; the first one closes a teacher's suffix. idle: of the run.

    Returns:
      (rows, metrics of all rows before and after some leave: `critic/*`, `data/*`, lengths, `prefix_luffy/*`, `treerl/*`).
    """
    o, limit = config.objective, config.rollout.max_model_len
    overlong, pool = Overlong.from_config(o, limit), pool_class(config.curriculum.pool)
    every, metrics = rows_lib.rows_from_groups(groups, o.advantage, overlong), {}
    if pool.keeps_suffixes and pool.by_ratio and config.curriculum.teacher_rows:
        every, metrics = attach(
            every,
            groups,
            continuations,
            teacher_loss=o.teacher_loss,
            threshold=config.rewards.threshold,
            snis_beta=o.snis_beta,
            stop_ids=stop_ids,
            max_model_len=limit,
        )
    elif pool.keeps_suffixes and pool.branches:
        every, metrics = join(
            every,
            groups,
            continuations,
            teacher_loss=o.teacher_loss,
            advantage=o.advantage,
            stop_ids=stop_ids,
            max_model_len=limit,
            overlong=overlong,
        )
    rows = rows_lib.keep_rows(every, o.zero_gradient_rows)
    idle.look("" if rows else rows_lib.skip_reason(groups, overlong), IDLE_STEPS if every else 1)
    metrics |= rows_lib.overlong_metrics(groups, overlong) | rows_lib.data_metrics(every, limit) | rows_lib.tree_metrics(groups)
    metrics |= rows_lib.filter_metrics(every, rows)
    return rows_lib.whiten_rows(rows) if o.whiten else rows, metrics
