"""Diagnostics of a training run: they look at what a step rolled out and trained, and change nothing about it.

`Diagnostics` adds paired prompts to a step's, takes their groups out again before anything else sees them, looks at the others
before they are learned from, has failed answers branched now and then, and completes the step's metrics.
"""

import collections
import contextlib
import dataclasses
import heapq
import logging
import pathlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.learner.learner import Learner
from deepgrpo.learner.objective import BRANCH, MAIN
from deepgrpo.learner.rows import STREAM_NAMES, Row
from deepgrpo.learner.sharding import batch_shards
from deepgrpo.rollout.engine import Engine, Feed, OnDone, Request, Sampling
from deepgrpo.telemetry import dumps, recover
from deepgrpo.types import Completion, Group, Ids, Problem, Prompt

STREAMS = ("main_chain", "main_chain_original", "main_chain_synthetic", "branch_chain", "teacher_chain")
OF_STEP = ("attempted", "succeeded")  # of teacher_worker/total_*, also counted a step
TURNS = ("min", "max", "mean")
COMPARE_EVERY = 20  # steps between two tables of the teacher's continuations
AGES = ((0, 1), (2, 4), (5, 9), (10, 19), (20, 49), (50, None))  # steps since a state was made, inclusive

# Mean |log-prob difference| between engine and learner that rounding explains, by the coarser dtype of the two.
EXPECTED_MISMATCH = {"float32": 1e-3, "bfloat16": 0.05}
STALE_MISMATCH = 0.2  # of rollouts by an older policy, which differ by what it has learned since

DROPS = {  # counters of what a bound has dropped, and what raises it
    "teacher/events_dropped_capacity": "failures: MAX_EVENTS_PER_STATE, MAX_EVENTS, Forest.max_nodes",
    "forest/nodes_refused": "states: Forest.max_nodes",
    "failed_pool/dropped_capacity": "failures: MAX_EVENTS_PER_STATE, MAX_EVENTS; suffixes: MAX_SIZE",
    "failed_pool/dropped_age": "failures: curriculum/failed_pool.py MAX_AGE",
    "synthetic_pool/dropped_capacity": "states: flat.FlatPool.max_size",
    "teacher_pool/dropped_capacity": "corrected failures: suffixes.MAX_SIZE",
    "buffer/dropped_capacity": "places to branch: branches.MAX_SIZE",
}

Loop = Callable[[Any, Sequence[Prompt], int, str], list[Group]]

log = logging.getLogger(__name__)


class Diagnostics:
    """Used by the training thread; `timed` loops and `without_pairs` may run in another."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        run: pathlib.Path,
        curriculum: Curriculum,
        learner: Learner,
        state_dump: dumps.StateDump,
        problems: Sequence[Problem],
        teacher: Any,
        step: int,
    ):
        """Args:
        config: the whole configuration. run: the run's folder. learner: gives log-probs (`start_score`).
        problems: the training set. teacher: the teacher's worker, restored. step: the last one that is done.
        """
        self._config, self._run, self._curriculum, self._learner = config, run, curriculum, learner
        self._keys, self._threshold, self._dump = config.diagnostics, config.rewards.threshold, state_dump
        self._problems = recover.subset(problems, recover.RECOVER_PROBLEMS)
        self._clock = Clock()
        before = teacher.metrics()
        self._totals = {name: before.get(f"teacher_worker/total_{name}", 0.0) for name in OF_STEP}
        self._table = run / "teacher_comparison"
        written = [int(path.stem) for path in self._table.glob("*.jsonl") if path.stem.isdigit()]
        self._compared = max((at for at in written if at <= step), default=0)
        self._roots: dict[int, dict[str, Group]] = {}  # paired groups by step and state: steps may overlap
        self._states: list[Rolled] = []
        self._fetch: Callable[[], list[np.ndarray]] | None = None  # log-probs of sequences that were enqueued for scoring
        self._drops = Drops()
        self._found: dict[str, float] = {}  # metrics of the step's groups

    def timed(self, loop: Loop) -> Loop:
        """The loop, with the responses of its training steps timed."""
        return self._clock.timed(loop)

    def with_pairs(self, prompts: list[Prompt], step: int) -> list[Prompt]:
        """A step's prompts and, where a paired evaluation is due, the roots of some of its states behind them."""
        return prompts + recover.root_prompts(prompts, recover.PAIRED_STATES if due(self._keys.paired_every, step) else 0)

    def without_pairs(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups without the paired ones, which are kept for `look`."""
        rest, roots = recover.split(groups)
        if roots:
            self._roots[step] = roots
        return rest

    def look(self, groups: Sequence[Group], step: int) -> None:
        """Looks at a step's groups, before the curriculum observes them and before the policy is updated."""
        roots, look_up = self._roots.pop(step, {}), self._curriculum.look_up
        pairs = [
            recover.Pair(group, roots[group.prompt.group_id], look_up(group.prompt.node))
            for group in groups
            if group.prompt.group_id in roots
        ]
        self._states = rolled(groups, look_up)
        self._found = ages(self._states, step, self._threshold) | hint_reliance(self._states, self._threshold)
        if due(self._keys.paired_every, step):
            self._found |= recover.pair_metrics(pairs, self._threshold)
        if due(self._keys.dump_every, step):
            records = self._dump.records(groups, pairs, self._curriculum, step)
            self._found |= dumps.show_states(self._run / "prefix_debug" / f"{step}.jsonl", records)
        if step // COMPARE_EVERY > self._compared // COMPARE_EVERY:  # at the first step from then on that has continuations
            if table := self._dump.teacher_table(groups, self._curriculum, step):
                dumps.show(self._table / f"{step}.jsonl", table)
                self._compared = step
        scored = self._states if due(self._keys.score_every, step) else []
        self._fetch = self._learner.start_score(sequences(scored)) if scored else None

    def recovers(self, step: int) -> bool:
        """Whether failed answers are branched after this step; nothing may be rolled out ahead of that."""
        return due(self._keys.recover_every, step)

    def recover(
        self, loop: Loop, context: Any, step: int, timer: Callable[[str], contextlib.AbstractContextManager]
    ) -> dict[str, float]:
        """Branches failed answers of the training set, if that is due; writes `recoverability/<step>.jsonl`."""
        if not self.recovers(step):
            return {}
        with timer("recoverability_eval"):
            roll = lambda prompts, purpose: loop(context, prompts, step, purpose)  # noqa: E731
            records = list(recover.recoverability(self._problems, roll, self._config))
            dumps.show(self._run / "recoverability" / f"{step}.jsonl", records)
        return recover.recoverability_metrics(records)

    def metrics(self, rows: Sequence[Row], known: Mapping[str, float], step: int) -> dict[str, float]:
        """What diagnostics add to a step's metrics.

        Args:
          rows: that trained. known: the step's other metrics, of the curriculum and the teacher among them.
        """
        found, self._found = self._found, {}
        self._drops.look(known)
        if self._fetch:
            found |= scores(self._states, self._fetch(), step)
        self._states, self._fetch = [], None
        found |= gradient_shares(rows) | sequence_lengths(rows, batch_shards(self._learner.mesh)) | memory()
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
        worker = {**known, **metrics}
        shown = ("total_attempted", "total_succeeded", "success_rate", "step_attempted", "step_succeeded")
        return metrics | {f"teacher_suffix/{name}": worker[f"teacher_worker/{name}"] for name in shown}


def due(every: int, step: int) -> bool:
    """Every so many steps; 0: never."""
    return every > 0 and step % every == 0


#### Warnings: numbers that are out of range are logged, once a step


def rollout_mismatch(metrics: Mapping[str, float], dtype: str) -> dict[str, float]:
    """`rollout_mismatch/alert`: 1 where engine and learner disagree by more than rounding explains, which is also logged.

    Empty when the step has no measurement. dtype: of learner and engine.
    """
    mean = metrics.get("rollout_mismatch/abs_mean")
    if mean is None:
        return {}
    limit = STALE_MISMATCH if metrics.get("rollout_mismatch/staleness") else EXPECTED_MISMATCH[dtype]
    if mean > limit:
        log.warning(
            "engine and learner disagree about the sampled tokens: |log-prob difference| is %.2g on average (largest %.2g), "
            "above %.2g; %.1f %% of the ratios are outside [0.5, 2]. Gradients are biased: "
            "compare vllm.extra_args with what the learner assumes, or set objective.tis_cap=2",
            *(mean, metrics["rollout_mismatch/abs_max"], limit, 100 * metrics["rollout_mismatch/ratio_outside"]),
        )
    return {"rollout_mismatch/alert": float(mean > limit)}


class Drops:
    """Says what bounds drop: the first time, and each time that it has grown tenfold."""

    def __init__(self):
        self._next = dict.fromkeys(DROPS, 1.0)

    def look(self, metrics: Mapping[str, float]) -> None:
        for name, what in DROPS.items():
            count = metrics.get(name, 0.0)
            if count >= self._next[name]:
                log.warning(
                    "a bound has dropped %d %s (%s). The teacher may be too slow for the failures that come", count, what, name
                )
                while self._next[name] <= count:
                    self._next[name] *= 10


#### Hard states by their age: steps since they were made


@dataclasses.dataclass(frozen=True, eq=False)
class Rolled:
    """A hard state that a step rolled out. about: `Curriculum.look_up` of it, before the step's groups were observed."""

    group: Group
    about: Mapping[str, Any]


def rolled(groups: Sequence[Group], look_up: Callable[[Any], Mapping[str, Any]]) -> list[Rolled]:
    """The step's hard states that are judged, as far as the curriculum knows them."""
    found = [Rolled(g, look_up(g.prompt.node)) for g in groups if g.prompt.injected and g.judged]
    return [state for state in found if "created_step" in state.about]


def bucket(age: int) -> str:
    low, high = next((low, high) for low, high in AGES if high is None or age <= high)
    return f"from_{low}" if high is None else f"{low}_to_{high}"


def by_age(states: Sequence[Rolled], step: int) -> dict[str, list[Rolled]]:
    found: dict[str, list[Rolled]] = {}
    for state in states:
        found.setdefault(bucket(step - state.about["created_step"]), []).append(state)
    return found


def ages(states: Sequence[Rolled], step: int, threshold: float) -> dict[str, float]:
    """`node_age/*`: steps since the states were made, and by bucket of these, groups and successes over rollouts."""
    if not states:
        return {}
    steps = [step - state.about["created_step"] for state in states]
    metrics = {"node_age/mean": sum(steps) / len(steps), "node_age/max": float(max(steps))}
    for name, members in by_age(states, step).items():
        counts = [state.group.successes(threshold) for state in members]
        metrics[f"node_age/{name}/groups"] = float(len(members))
        metrics[f"node_age/{name}/success_rate"] = sum(k for k, _ in counts) / sum(n for _, n in counts)
    return metrics


def hint_reliance(states: Sequence[Rolled], threshold: float) -> dict[str, float]:
    """`transfer/hint_reliance`: success at the states minus the newest known success at their roots, a mean over states whose
    root was observed."""
    gaps = [
        k_succ / k_total - state.about["root_success_rate"]
        for state in states
        if state.about.get("root_success_rate") is not None
        for k_succ, k_total in [state.group.successes(threshold)]
    ]
    return {"transfer/hint_reliance": sum(gaps) / len(gaps)} if gaps else {}


def sequences(states: Sequence[Rolled]) -> list[tuple[Ids, Ids]]:
    """(the problem's prompt, locked prefix and response) of every rollout, for `Learner.start_score`."""
    pairs = []
    for state in states:
        start = len(state.group.prompt.problem.prompt_ids)
        prompt, locked = state.group.prompt.ids[:start], state.group.prompt.ids[start:]
        pairs += [(prompt, np.concatenate([locked, r.completion.ids])) for r in state.group.rollouts]
    return pairs


def scores(states: Sequence[Rolled], logps: Sequence[np.ndarray], step: int) -> dict[str, float]:
    """How far the policy has moved from what it once wrote, and from what the engine sampled now.

    `node_age/<bucket>/{mismatch,prefix_logp}`: mean |learner - engine| log-prob of the sampled tokens; mean log-prob that the
    present policy gives the tokens of the locked prefixes, one rollout of an older policy each.

    logps: float32[tokens] each, of `sequences(states)`.
    """
    found = iter(logps)
    of_state = {id(state): [next(found) for _ in state.group.rollouts] for state in states}
    metrics = {}
    for name, members in by_age(states, step).items():
        prefixes, gaps = [], []
        for state in members:
            locked, mine, observed = state.group.prompt.locked, of_state[id(state)], state.group.prompt.observed
            prefixes += mine[:1] and [mine[0][:locked] if observed is None else mine[0][:locked][~observed]]
            gaps += [np.abs(m[locked:] - r.completion.logps) for m, r in zip(mine, state.group.rollouts, strict=True)]
        gaps = [gap[~np.isnan(gap)] for gap in gaps]  # what an environment wrote was not sampled
        for key, values in (("prefix_logp", prefixes), ("mismatch", gaps)):
            tokens = np.concatenate(values).astype(np.float64) if values else np.zeros(0)
            if len(tokens):
                metrics[f"node_age/{name}/{key}"] = float(tokens.mean())
    return metrics


#### The step's rows, and what they ask of the machine


def gradient_shares(rows: Sequence[Row]) -> dict[str, float]:
    """`data/gradient_share_{original,synthetic,branch}`: parts of the students' sum of |advantage| over the tokens that train."""
    parts = dict.fromkeys(("original", "synthetic", "branch"), 0.0)
    for row in rows:
        if row.source in (MAIN, BRANCH):
            name = "branch" if row.source == BRANCH else "synthetic" if row.injected else "original"
            parts[name] += float(np.abs(row.token_advantages).sum())
    total = sum(parts.values())
    return {f"data/gradient_share_{name}": value / total for name, value in parts.items()} if total else {}


def sequence_lengths(rows: Sequence[Row], shards: int) -> dict[str, float]:
    """`{main,branch,teacher}_seqlen/*`: tokens that each of the learner's `shards` would get of a stream's training rows.

    min, max, minmax_diff, mean: dealt in their order, in equal numbers. balanced_min, balanced_max: the longest first, each to
    whoever has least.
    """
    metrics = {}
    for source, name in STREAM_NAMES.items():
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows if row.source == source]
        if not lengths:
            continue
        bounds = [len(lengths) * shard // shards for shard in range(shards + 1)]
        dealt = [sum(lengths[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        even = [0] * shards
        for length in sorted(lengths, reverse=True):
            heapq.heapreplace(even, even[0] + length)
        values = {"min": min(dealt), "max": max(dealt), "minmax_diff": max(dealt) - min(dealt), "mean": sum(dealt) / shards}
        values |= {"balanced_min": min(even), "balanced_max": max(even)}
        metrics |= {f"{name}_seqlen/{key}": float(value) for key, value in values.items()}
    return metrics


def memory() -> dict[str, float]:
    """`perf/max_memory_{allocated,reserved}_gb`, the most of any local device since the start, where its backend tells;
    `perf/cpu_memory_used_gb` of this process: now on Linux, elsewhere the most that it had."""
    table = pathlib.Path("/proc/self/statm")
    if table.exists():
        resident = int(table.read_text().split()[1]) * resource.getpagesize()
    else:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    metrics = {"perf/cpu_memory_used_gb": resident / 1e9}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name, keys in (("allocated", ("peak_bytes_in_use",)), ("reserved", ("peak_pool_bytes", "peak_bytes_reserved"))):
        if found := [s[key] for s in stats for key in keys if key in s]:
            metrics[f"perf/max_memory_{name}_gb"] = max(found) / 1e9
    return metrics


#### Seconds from a call of the engine to each finished response, by what was rolled out

MAIN_CHAIN, BRANCH_CHAIN, STATE = "main_chain", "branch_chain", "synthetic"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One finished response: seconds since the engine was asked, and its tokens."""

    seconds: float
    prompt_length: int
    response_length: int


class Clock:
    """Times the responses of the training steps. Steps may overlap, each in a thread of its own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._samples: dict[int, dict[str, list[Sample]]] = {}
        self._calls: dict[int, collections.Counter[str]] = {}  # prompts rolled out

    def timed(self, loop: Loop) -> Loop:
        """The same loop; what it samples for a training step (whose purpose begins with "train" or "branches") is timed."""

        def run(context: Any, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
            if not purpose.startswith(("train", "branches")):
                return loop(context, prompts, step, purpose)
            kinds = {id(prompt.ids): kind(prompt) for prompt in prompts}
            self._calls.setdefault(step, collections.Counter()).update(map(kind, prompts))
            engine = Timed(context.engine, self._clock, kinds, self._samples.setdefault(step, {}))
            return loop(dataclasses.replace(context, engine=engine), prompts, step, purpose)

        return run

    def metrics(self, step: int) -> dict[str, float]:
        """`timing_s/agent_loop/*` and `timing_s/one_stage/*` of a step, which is then forgotten."""
        samples, counts = self._samples.pop(step, {}), self._calls.pop(step, collections.Counter())
        main, branches = samples.get(MAIN_CHAIN, []) + samples.get(STATE, []), samples.get(BRANCH_CHAIN, [])
        values: dict[str, float] = {}
        for name, members in (("generate_main_chain", main), ("generate_branch_chain", branches)):
            if seconds := [sample.seconds for sample in members]:
                summary = {"min": min(seconds), "max": max(seconds), "mean": sum(seconds) / len(seconds)}
                values |= {f"agent_loop/{name}/{key}": value for key, value in summary.items()}
        if main or branches:
            slowest = max(main + branches, key=lambda sample: sample.seconds)
            values |= {f"agent_loop/slowest/{key}": float(value) for key, value in dataclasses.asdict(slowest).items()}
        for name, kinds in (("main_chain", MAIN_CHAIN), ("synthetic", STATE), ("buffer_branch", BRANCH_CHAIN)):
            values[f"one_stage/{name}_wall"] = max((sample.seconds for sample in samples.get(kinds, [])), default=0.0)
            if kinds != MAIN_CHAIN:
                values[f"one_stage/{name}_count"] = float(counts[kinds])
        return {f"timing_s/{name}": value for name, value in values.items()}


class Timed:
    """An engine that notes when each sample is there. kinds: of the requests, by the identity of their ids; others are main."""

    def __init__(self, engine: Engine, clock: Callable[[], float], kinds: dict[int, str], samples: dict[str, list[Sample]]):
        self._engine, self._clock, self._kinds, self._samples = engine, clock, kinds, samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None, feed: Feed | None = None
    ) -> list[list[Completion]]:
        begun = self._clock()

        def done(i: int, j: int, completion: Completion) -> None:
            if i < len(requests):  # of several turns the first
                sample = Sample(self._clock() - begun, len(requests[i].prompt_ids), len(completion.ids))
                self._samples.setdefault(self._kinds.get(id(requests[i].prompt_ids), MAIN_CHAIN), []).append(sample)
            if on_done is not None:
                on_done(i, j, completion)

        return self._engine.generate(requests, sampling, done, feed)


def kind(prompt: Prompt) -> str:
    return BRANCH_CHAIN if prompt.stream == "branch" else STATE if prompt.injected else MAIN_CHAIN
