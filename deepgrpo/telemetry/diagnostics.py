"""Diagnostics of a training run: they look at what a step rolled out and trained, and change nothing about it.

One object: it adds paired prompts to a step's, takes their groups out again before anything else sees them, looks at the others
before they are learned from, has failed answers branched now and then, and completes the step's metrics.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.curriculum.pivots import create_partition
from deepgrpo.learner.learner import Learner
from deepgrpo.learner.rows import Row
from deepgrpo.learner.sharding import batch_shards
from deepgrpo.telemetry import alerts, dumps, generation, machine, nodes, paired, prefix_dump, recoverability, teacher_table
from deepgrpo.telemetry.dumps import Decode
from deepgrpo.types import Group, Problem, Prompt

STREAMS = ("main_chain", "main_chain_original", "main_chain_synthetic", "branch_chain", "teacher_chain")
OF_STEP = ("attempted", "succeeded")  # of teacher_worker/total_*, also counted a step
TURNS = ("min", "max", "mean")

Loop = Callable[[Any, Sequence[Prompt], int, str], list[Group]]


class Diagnostics:
    """Used by the training thread; `timed` loops and `without_pairs` may run in another."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        run: pathlib.Path,
        curriculum: Curriculum,
        learner: Learner,
        decode: Decode,
        stop_ids: Sequence[int],
        problems: Sequence[Problem],
        teacher: Any,
        step: int,
    ):
        """Args:
        config: the whole configuration. run: the run's folder.
        learner: gives log-probs (`start_score`). decode: ids to text. problems: the training set.
        teacher: the teacher's worker, restored. step: the last one that is done.
        """
        self._keys, self._config, self._run, self._curriculum, self._learner = (
            config.diagnostics,
            config,
            run,
            curriculum,
            learner,
        )
        self._threshold, self._decode = config.rewards.threshold, decode
        self._problems = recoverability.subset(problems, self._keys.recover_problems)
        self._dump = prefix_dump.create(config, decode, stop_ids)
        self._clock = generation.Clock()
        before = teacher.metrics()
        self._totals = {name: before.get(f"teacher_worker/total_{name}", 0.0) for name in OF_STEP}
        self._table = run / "teacher_comparison"
        written = [int(path.stem) for path in self._table.glob("*.jsonl") if path.stem.isdigit()]
        self._compared = max((at for at in written if at <= step), default=0)
        self._roots: dict[int, dict[str, Group]] = {}  # paired groups by step and state: steps may overlap
        self._states: list[nodes.Rolled] = []
        self._fetch: nodes.Fetch | None = None
        self._drops = alerts.Drops()
        self._found: dict[str, float] = {}  # metrics of the step's groups

    def timed(self, loop: Loop) -> Loop:
        """The loop, with the responses of its training steps timed."""
        return self._clock.timed(loop)

    def with_pairs(self, prompts: list[Prompt], step: int) -> list[Prompt]:
        """A step's prompts and, where a paired evaluation is due, the roots of some of its states behind them."""
        return prompts + (paired.root_prompts(prompts, self._keys.paired_states) if due(self._keys.paired_every, step) else [])

    def without_pairs(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups without the paired ones, which are kept for `look`."""
        rest, roots = paired.split(groups)
        if roots:
            self._roots[step] = roots
        return rest

    def look(self, groups: Sequence[Group], step: int) -> None:
        """Looks at a step's groups, before the curriculum observes them and before the policy is updated."""
        roots = self._roots.pop(step, {})
        look_up, threshold, keys = self._curriculum.look_up, self._threshold, self._keys
        pairs = [
            paired.Pair(group, roots[group.prompt.group_id], look_up(group.prompt.node))
            for group in groups
            if group.prompt.group_id in roots
        ]
        self._states = nodes.rolled(groups, look_up)
        self._found = nodes.ages(self._states, step, threshold) | nodes.hint_reliance(self._states, threshold)
        if due(keys.paired_every, step):
            self._found |= paired.metrics(pairs, threshold)
        if due(keys.dump_every, step):
            folder = pathlib.Path(keys.dump_folder) if keys.dump_folder else self._run / "prefix_debug"
            records = self._dump.records(groups, pairs, self._curriculum, step)
            self._found |= prefix_dump.write(folder / f"{step}.jsonl", records)
        self._compare(groups, step)
        scored = self._states if due(keys.score_every, step) else []
        self._fetch = self._learner.start_score(nodes.sequences(scored)) if scored else None

    def _compare(self, groups: Sequence[Group], step: int) -> None:
        """Writes the table of the teacher's continuations at the first step that has some, once one is due."""
        every = self._keys.compare_every
        if not every or step // every <= self._compared // every:
            return
        arguments = (self._curriculum, step, self._decode, self._threshold, self._keys.compare_states)
        if table := teacher_table.records(groups, *arguments):
            dumps.show(self._table / f"{step}.jsonl", table)
            self._compared = step

    def recovers(self, step: int) -> bool:
        """Whether failed answers are branched after this step; nothing may be rolled out ahead of that."""
        return due(self._keys.recover_every, step)

    def recover(
        self, loop: Loop, setting: Any, step: int, timer: Callable[[str], contextlib.AbstractContextManager]
    ) -> dict[str, float]:
        """Branches failed answers of the training set, if that is due; writes `recoverability/<step>.jsonl`."""
        if not self.recovers(step):
            return {}
        folder = pathlib.Path(self._keys.recover_folder) if self._keys.recover_folder else self._run / "recoverability"
        with timer("recoverability_eval"):
            records = list(
                recoverability.evaluate(
                    self._problems,
                    lambda prompts, purpose: loop(setting, prompts, step, purpose),
                    create_partition(self._config),
                    branches=self._config.branches.branches_per_point,
                    threshold=self._threshold,
                    max_model_len=self._config.rollout.max_model_len,
                )
            )
            dumps.show(folder / f"{step}.jsonl", records)
        return recoverability.metrics(records)

    def metrics(self, rows: Sequence[Row], known: Mapping[str, float], step: int) -> dict[str, float]:
        """What diagnostics add to a step's metrics.

        Args:
          rows: that trained. known: the step's other metrics, of the curriculum and the teacher among them.
        """
        found, self._found = self._found, {}
        self._drops.look(known)
        if self._fetch:
            found |= nodes.scores(self._states, self._fetch(), step)
        self._states, self._fetch = [], None
        found |= nodes.gradient_shares(rows) | machine.sequence_lengths(rows, batch_shards(self._learner.mesh)) | machine.memory()
        found |= {f"num_turns/{p}/{x}": 1.0 for p in STREAMS if f"critic/{p}/rewards/mean" in known for x in TURNS}
        return found | self._of_teacher(known) | self._clock.metrics(step)

    def _of_teacher(self, known: Mapping[str, float]) -> dict[str, float]:
        """Corrections of this step; what a mastered state has cost; how often a failure had to be asked about."""
        attempted = known.get("teacher_worker/total_attempted")
        if attempted is None:
            return {}
        metrics = {}
        for name in OF_STEP:
            total = known[f"teacher_worker/total_{name}"]
            metrics[f"teacher_worker/step_{name}"] = total - self._totals[name]
            self._totals[name] = total
        metrics["teacher/http_retries_per_failure"] = known["teacher/http_retries"] / max(attempted, 1.0)
        if mastered := known.get("mastery/nodes", known.get("chain_pool/masters")):
            metrics["mastery/teacher_tokens_per_node"] = known["teacher/tokens"] / mastered
            metrics["mastery/money_per_node"] = known["teacher/money"] / mastered
        worker = {**{k: v for k, v in known.items() if k.startswith("teacher_worker/")}, **metrics}
        shown = ("total_attempted", "total_succeeded", "success_rate", "step_attempted", "step_succeeded")
        return metrics | {f"teacher_suffix/{name}": worker[f"teacher_worker/{name}"] for name in shown}


def due(every: int, step: int) -> bool:
    """Every so many steps; 0: never."""
    return every > 0 and step % every == 0
