"""The learner: owns policy, optimizer and reference, and turns a step's rows into optimizer steps."""

import collections
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepgrpo.learner import backends, costs, distributed, packing, report, sharding
from deepgrpo.learner import step as step_lib
from deepgrpo.learner.minibatch import cut, partition, shuffled
from deepgrpo.learner.objective import MAIN, TEACHER, Objective
from deepgrpo.learner.optim import Optim, learning_rate
from deepgrpo.learner.packing import Batch, Shape
from deepgrpo.learner.report import DeviceClock, PendingUpdate
from deepgrpo.learner.rows import Row, check_row
from deepgrpo.learner.step import Programs, abstract_state, batch_shapes
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Placement, Transformer
from deepgrpo.telemetry import waits
from deepgrpo.types import Ids, as_ids

log = logging.getLogger(__name__)

HOST_COUNTERS = ("schedule_step", "optimizer_steps", "nonfinite_steps", "skipped_updates")


class Learner:
    """Trains a policy on rows; see `update`. All arrays live sharded on `mesh`; master weights and moments are float32."""

    def __init__(
        self,
        model_config: ModelConfig,
        params: Any,
        config: Any,
        *,
        total_steps: int,
        max_rows: tuple[int, int] | None = None,
        mesh: Mesh | None = None,
        channel: distributed.Channel | None = None,
    ):
        """Args:
        model_config: of the policy. Ids from its `num_real_ids` on have probability 0, as in the rollout engine.
        params: initial policy, copied to the mesh as float32; also the reference policy if objective.kl_coef is not 0.
        config: of the run. Log-probs are taken at rollout.temperature.
        total_steps: of the run, for the cosine schedule.
        max_rows: the most (students' main, other) rows of a training step, which bounds what a mini-batch must hold; None: two
          mini-batches' worth.
        mesh: default: `learner.mesh` over all devices. channel: to (on process 0) and from the learner's other processes.
        """
        temperature, dtype, optim = config.rollout.temperature, jnp.dtype(config.model.dtype), config.optim
        if temperature <= 0:
            raise ValueError(f"rollout.temperature is {temperature}, expected > 0: ratios need a distribution")
        self.mesh = sharding.make_mesh(config.learner.mesh) if mesh is None else mesh
        self.config, self.temperature, self.total_steps = config, temperature, total_steps
        self.objective = Objective.from_config(config.objective)
        self.optim = Optim.from_config(optim)
        self.mini_batch_rows, self.ppo_epochs = optim.mini_batch_prompts * config.rollout.n, optim.ppo_epochs
        self.several_mini_batches = max_rows is None or max_rows[0] >= 2 * self.mini_batch_rows
        self.teacher_optim = Optim.of_teacher(optim)
        shards = sharding.batch_shards(self.mesh)
        self.shapes = batch_shapes(config, max_rows, shards)
        backend = backends.settle(config.model.attention, model_config, self.mesh, dtype, self.shapes[-1])
        self.model = Transformer(
            model_config, dtype=dtype, remat=config.model.remat, placement=Placement(backend, sharding.rows(self.mesh))
        )
        self.peak_flops = costs.peak_flops(self.mesh.devices.flat[0].device_kind, dtype)
        self._channel, self._clock = channel, DeviceClock()
        self._running: PendingUpdate | None = None
        self._leads = True  # False in every process but the first
        self._replicate = jax.jit(lambda x: x, out_shardings=sharding.replicated(self.mesh))
        self._peaks = jax.jit(report.peaks, out_shardings=sharding.replicated(self.mesh))
        self._nonfinite = report.RefusedSteps()
        self._newest: collections.deque[tuple[int, list[Batch]]] = collections.deque(maxlen=2)  # updates: at most two run

        self._shardings = sharding.parameter_shardings(params, self.mesh)
        self._state = {"params": sharding.place(jax.tree.map(lambda x: x.astype(np.float32), params), self._shardings)}
        optimizer_state = functools.partial(step_lib.optimizer_state, o=self.objective)
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state(params, self.mesh, self.objective))
        del shardings["params"]
        self._state |= jax.jit(optimizer_state, out_shardings=shardings)(self._state["params"])
        self._reference = None
        if self.objective.kl_coef:  # in compute precision: it is only ever run, never trained
            self._reference = sharding.place(jax.tree.map(lambda x: x.astype(dtype), self._state["params"]), self._shardings)
        self._host = dict.fromkeys(HOST_COUNTERS, 0)
        self.programs = Programs(self.model, self.mesh, self.abstract_state(), config)

    def prepare(self, ahead: bool = True) -> None:
        """Declares the programs of this learner's run, so that any other that has to be compiled is counted as a recompilation.

        ahead: compile those of the updates from now on, in the background; False: each when it is first needed.
        """
        update = {"train_step"}
        if self._reference is not None:
            update.add(self._score_program(self._reference))
        if self.several_mini_batches:
            update.add("score")
        if "teacher_adam" in self._state:
            update.add("teacher_step")
        log.info("memory planned on a device, of %s", costs.describe(self.programs.memory_plan(self.shapes)))
        keys = [(name, shape) for shape in reversed(self.shapes) for name in sorted(update)]
        self.programs.plan(keys + [(name, shape) for shape in self.shapes for name in ("score", "score_at_1")])
        if ahead:
            self.programs.compile_ahead(keys)

    #### State

    @property
    def policy(self) -> Any:
        """Master weights, float32, sharded. The next `update` donates these buffers: copy what must outlive it."""
        return self._state["params"]

    @property
    def state(self) -> dict[str, Any]:
        """Every array that resumes: {"params"}, what `step.optimizer_state` makes and, if there is one, "reference"."""
        return self._state if self._reference is None else self._state | {"reference": self._reference}

    def abstract_state(self) -> dict[str, Any]:
        """`state` as ShapeDtypeStructs with this learner's shardings: what to ask of Orbax on any mesh."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Replaces `state` by a tree of host or device arrays of the same structure, shapes and dtypes.

        Raises:
          ValueError: it differs; names the first difference.
        """
        hint = "a reference belongs to kl_coef > 0, teacher_adam to teacher_update=post_ppo"
        sharding.require_like(tree, self.state, f"learner state to restore ({hint})")
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        self._state, self._reference = {}, None  # freed first: the old state and a new one need not fit side by side
        placed = sharding.place(dict(tree), shardings)
        self._reference = placed.pop("reference", None)
        self._state = placed

    def host_state(self) -> dict[str, int]:
        """Counters that resume: training steps of the schedule, optimizer steps, steps and updates that were skipped. Waits for
        an update that is under way.

        Raises:
          ConfigError: the state that goes with them is not finite, so that nothing may be saved.
        """
        if self._running:
            self._running.metrics()
        if found := self._first_of_state():
            report.end_run(f"{found} are not finite, and a checkpoint of them would be of no use")
        return dict(self._host)

    def restore_host(self, counters: Mapping[str, int]) -> None:
        if set(counters) != set(HOST_COUNTERS):
            raise ValueError(f"learner counters to restore are {sorted(counters)}, expected {sorted(HOST_COUNTERS)}")
        self._host = dict(counters)

    #### Update

    def update(self, rows: Sequence[Row], step: int) -> dict[str, float]:
        """`start_update`, and waits for its metrics."""
        return self.start_update(rows, step).metrics()

    def start_update(self, rows: Sequence[Row], step: int) -> PendingUpdate:
        """Trains on the rows of training step `step`, without waiting for the devices: `policy` may be used at once, and
        `metrics()` of the result waits for what is then called `actor/*`, `rollout_mismatch/*`, `perf/*` and `timing_s/*`.

        The rows are cut at random, as a function of (seed, step), into mini-batches, one optimizer step each. Old log-probs are
        those of the policy before this call; reference log-probs are computed only for kl_coef > 0. Without rows nothing changes.

        Raises:
          ValueError: a row is empty, too long for learner.buckets, has a response id that the engine cannot have sampled, or a
            number that is not finite.
        """
        if self.objective.joint_loss == "null":
            rows = [row for row in rows if row.source != TEACHER]
        rows = [row for row in rows if row.num_scored]
        for row in rows:
            check_row(row, self.model.config.vocab_size, self.model.config.num_real_ids)
        if self._channel:
            fields, arrays = distributed.encode_rows(rows)
            self._channel.send("update", fields | {"step": step}, arrays)
        return self._start_update(rows, step)

    def _start_update(self, rows: Sequence[Row], step: int) -> PendingUpdate:
        mini_batches = cut(rows, self.config, step)
        if not mini_batches:
            self._host["skipped_updates"] += 1
            return PendingUpdate(functools.partial(report.skipped_update, not rows, self._host["skipped_updates"]))
        start = time.monotonic()
        batches = self._layout(mini_batches)
        self._newest.append((step, batches))
        device = [self._place(batch) for batch in batches]
        metrics = report.batch_metrics(batches) | {"timing_s/pack": time.monotonic() - start}
        metrics |= self._wait_for_programs(device)
        times = {"timing_s/ref": self._reference_pass(batches, device), "timing_s/old_log_prob": self._old_pass(batches, device)}
        lr = learning_rate(self.optim, self._host["schedule_step"], self.total_steps)
        self._host["schedule_step"] += 1
        begun = time.monotonic()
        results = self._optimizer_steps(batches, device, lr)
        times["timing_s/update_actor"] = self._clock.lap(begun, results[-1])
        metrics |= {
            "actor/lr": lr,
            "actor/lr_scheduler_step": 1.0,
            "actor/kl_coef": self.objective.kl_coef,
            "training/all_chains_empty_skip": 0.0,
            "training/skipped_updates": float(self._host["skipped_updates"]),
        }
        work = costs.update_flops(self.model.config, mini_batches, [batch.tokens for batch in batches])
        before = self._running
        self._running = PendingUpdate(functools.partial(self._finish, step, results, mini_batches, metrics, times, work))
        if before:
            before.metrics()  # at most two updates are under way: the host cannot run away from its devices
        return self._running

    def _wait_for_programs(self, device: list[dict[str, jax.Array]]) -> dict[str, float]:
        """Waits for what is not compiled yet, so that no clock of the devices counts it; returns metrics of that."""
        waited, count = self.programs.waited, self.programs.count
        for i, arrays in enumerate(device):
            self._program("train_step", arrays)
            if self._reference is not None:
                self._program(self._score_program(self._reference), arrays)
            if i:
                self._program("score", arrays)
        return {
            "perf/compilations": float(self.programs.count),
            "perf/new_compilations": float(self.programs.count - count),
            "perf/recompilations": float(self.programs.recompilations),
            "timing_s/compile": self.programs.waited - waited,
        }

    def _reference_pass(self, batches: list[Batch], device: list[dict[str, jax.Array]]) -> Future:
        """Enqueues the reference's log-probs of all mini-batches; a future of the seconds that they take."""
        begun = time.monotonic()
        if self._reference is None:
            return self._clock.lap(begun, ())
        for batch, arrays in zip(batches, device, strict=True):
            arrays["ref_logp"] = self._score(self._reference, arrays, batch.used)
        return self._clock.lap(begun, device[-1]["ref_logp"])

    def _old_pass(self, batches: list[Batch], device: list[dict[str, jax.Array]]) -> Future:
        """Likewise the old log-probs, of all mini-batches but the first: that one starts on policy, its ratio is 1."""
        begun = time.monotonic()
        for batch, arrays in zip(batches[1:], device[1:], strict=True):
            arrays["old_logp"] = self._score(self.policy, arrays, batch.used)
        return self._clock.lap(begun, device[-1]["old_logp"])

    def _finish(
        self, step: int, results: list, mini_batches: list[list[Row]], metrics: dict, times: dict[str, Future], work: float
    ) -> dict:
        """Waits for an update, counts what it did and returns its metrics."""
        with self._waiting(f"the update of step {step}"):
            results = jax.device_get(results)
        seconds = {name: future.result() for name, future in times.items()}
        done, nonfinite = report.count_steps(results)
        self._host["nonfinite_steps"] += nonfinite
        self._host["optimizer_steps"] += done
        if self._leads:
            n = len(mini_batches)
            self._nonfinite.look("update", step, results, lambda i: self._explain("explain", step, i % n, results[i]))
        rate = self.ppo_epochs / max(seconds["timing_s/update_actor"], 1e-9)
        metrics |= {"perf/flops": work * self.ppo_epochs, "perf/tokens_per_second": metrics["perf/tokens"] * rate}
        if self.peak_flops:
            metrics["perf/mfu/actor"] = work * rate / (self.peak_flops * self.mesh.size)
        mismatch = report.mismatch_metrics(results[: len(mini_batches)])
        return metrics | report.actor_metrics(results, mini_batches, self.optim.grad_clip) | mismatch | seconds

    def _layout(self, mini_batches: Sequence[Sequence[Row]]) -> list[Batch]:
        apart = self.model.placement.attention == "splash"
        return packing.layout(mini_batches, self.shapes, sharding.batch_shards(self.mesh), siblings_apart=apart)

    def _optimizer_steps(self, batches: list[Batch], device: list[dict[str, jax.Array]], lr: float) -> list[dict[str, Any]]:
        """Enqueues every epoch over the mini-batches; returns each step's results, on the devices."""
        results = []
        for epoch in range(self.ppo_epochs):
            for i, (batch, arrays) in enumerate(zip(batches, device, strict=True)):
                function = self._program("train_step", arrays)
                first = epoch == 0 and i == 0
                scalars = self._scalars(np.bool_(first), np.float32(lr), np.int32(batch.used))
                self._state, result, old_logp = function(self._state, arrays, *scalars)
                if first and self.ppo_epochs > 1:
                    arrays["old_logp"] = old_logp
                results.append(result)
        return results

    #### Update on teacher rows alone

    def update_teacher(self, rows: Sequence[Row], step: int) -> tuple[dict[str, float], list[bool]]:
        """Trains on the teacher rows among `rows` by their mean -logp, with the optimizer of `optim.teacher` and a constant rate.

        There are floor(rows / optim.teacher.mini_batch_rows) optimizer steps on balanced slices, or their ceiling with
        allow_partial. Neither the PPO optimizer's moments nor its schedule move.

        Returns:
          (`actor/teacher_chain/*` and `actor/post_sft_*` metrics; for each optimizer step whether it changed the policy). Waits
          for the devices.

        Raises:
          ValueError: objective.teacher_update is not post_ppo; or as in `start_update`.
        """
        if "teacher_adam" not in self._state:
            raise ValueError("teacher rows have no optimizer of their own; set objective.teacher_update=post_ppo")
        rows = [row for row in rows if row.source == TEACHER and row.num_scored]
        for row in rows:
            check_row(row, self.model.config.vocab_size, self.model.config.num_real_ids)
        if self._channel:
            fields, arrays = distributed.encode_rows(rows)
            self._channel.send("update_teacher", fields | {"step": step}, arrays)
        return self._update_teacher(rows, step)

    def _update_teacher(self, rows: Sequence[Row], step: int) -> tuple[dict[str, float], list[bool]]:
        teacher = self.config.optim.teacher
        plan = partition(
            (0, 0, len(rows)),
            self.mini_batch_rows,
            teacher_mini_batch_rows=teacher.mini_batch_rows,
            allow_partial=teacher.allow_partial,
            post_ppo=True,
        )
        order = iter(shuffled([row.group_id for row in rows], "rows", self.config.seed, step))
        mini_batches = [[rows[next(order)] for _ in range(part.rows[TEACHER])] for part in plan]
        results, lr = [], self.teacher_optim.lr
        batches = self._layout(mini_batches) if mini_batches else []
        self._newest.append((step, batches))
        for batch in batches:
            arrays = self._place(batch)
            scalars = self._scalars(np.float32(lr), np.int32(batch.used))
            self._state, result = self._program("teacher_step", arrays)(self._state, arrays, *scalars)
            results.append(result)
        with self._waiting(f"the teacher's update of step {step}"):
            results = jax.device_get(results)
        if self._leads:
            explain = lambda i: self._explain("explain_teacher", step, i, results[i])  # noqa: E731
            self._nonfinite.look("update_teacher", step, results, explain)
        return report.teacher_metrics(results, mini_batches, lr), [bool(np.isfinite(r["grad_norm"])) for r in results]

    def _waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Of what the devices compute. One CPU process may take as long as it likes: its device is itself."""
        alone = self._channel is None and self.mesh.devices.flat[0].platform == "cpu"
        behind = (lambda: what) if self._channel is None else lambda: f"{what}, from the devices; {self._channel.behind()}"
        return waits.on(behind, math.inf if alone else distributed.HANGS)

    #### What is not finite

    def _first_of_state(self) -> str:
        self.announce("peaks")
        return report.first_of_state(jax.device_get(self._peaks(self._state)))

    def _explain(self, program: str, step: int, number: int, result: Mapping[str, Any]) -> tuple[str, bool]:
        """What was not finite first when mini-batch `number` of the update at `step` gave `result`; whether that will last."""
        if found := self._first_of_state():
            return found, True
        self.announce("explain", program=program, step=step, number=number)
        found = report.first_of_step(jax.device_get(self._start_explaining(program, step, number)))
        reported = [name for name, value in result["actor"].items() if not np.isfinite(value)]
        return found or f"{(reported or ['the gradient'])[0]} (with the present weights all of it is finite)", False

    def _start_explaining(self, program: str, step: int, number: int) -> dict[str, Any]:
        batch = next(batches for at, batches in reversed(self._newest) if at == step)[number]
        arrays = self._place(batch)
        if self._reference is not None:
            arrays["ref_logp"] = self._score(self._reference, arrays, batch.used)
        self.programs.plan([(program, Shape.of(arrays))])
        return self._program(program, arrays)(self._state, arrays, *self._scalars(np.int32(batch.used)))

    #### Scoring

    def score(self, sequences: Sequence[tuple[Ids, Ids]], at_temperature_1: bool = False) -> list[np.ndarray]:
        """The policy's log-prob of every response token of (prompt_ids, response_ids): float32[R] each, at the rollouts'
        temperature, or at 1 (as an engine scores text that it has not sampled)."""
        return self.start_score(sequences, at_temperature_1)()

    def start_score(self, sequences: Sequence[tuple[Ids, Ids]], at_temperature_1: bool = False) -> Callable[[], list[np.ndarray]]:
        """Enqueues `score` of the present policy, which may be updated meanwhile; the result fetches it, in any thread."""
        rows = [
            Row(as_ids(prompt), as_ids(response), 0.0, MAIN, 0.0, None, f"score/{i}", -1, False, 0.0)
            for i, (prompt, response) in enumerate(sequences)
        ]
        for row in rows:
            if len(row.response_ids):
                check_row(row, self.model.config.vocab_size, self.model.config.num_real_ids)
        if self._channel:
            fields, arrays = distributed.encode_rows(rows)
            self._channel.send("score", fields | {"at_temperature_1": at_temperature_1}, arrays)
        return self._start_score(rows, at_temperature_1)

    def _start_score(self, rows: Sequence[Row], at_temperature_1: bool) -> Callable[[], list[np.ndarray]]:
        name = "score_at_1" if at_temperature_1 and self.temperature != 1 else "score"
        filled = [row for row in rows if len(row.response_ids)]
        started = []
        for begin in range(0, len(filled), self.mini_batch_rows):  # what a mini-batch holds, the compiled shapes hold
            part = [filled[begin : begin + self.mini_batch_rows]]
            (batch,) = self._layout(part)
            arrays = self._place(batch)
            logp = self._program(name, arrays)(self.policy, arrays, *self._scalars(np.int32(batch.used)))
            started.append((batch.slots, self._gather(logp)))

        def fetch() -> list[np.ndarray]:
            with self._waiting(f"the log-probs of {len(rows)} texts"):
                fetched = [(slots, jax.device_get(logp)) for slots, logp in started]
            found = iter([(host[a, b], start) for slots, host in fetched for a, b, start in slots])
            results = []
            for row in rows:
                n = len(row.response_ids)
                columns, start = next(found) if n else (np.zeros(0, np.float32), 0)
                results.append(np.array(columns[start : start + n]))
            return results

        return fetch

    def _score(self, params: Any, arrays: dict[str, jax.Array], used: int) -> jax.Array:
        return self._program(self._score_program(params), arrays)(params, arrays, *self._scalars(np.int32(used)))

    def _score_program(self, params: Any) -> str:
        same = params is not self._reference or self.model.dtype == jnp.float32  # one program serves trees of one dtype
        return "score" if same else "score_reference"

    def _program(self, name: str, arrays: dict[str, jax.Array]) -> Callable:
        return self.programs(name, Shape.of(arrays))

    def _scalars(self, *values: np.generic) -> tuple[jax.Array, ...]:
        """Explicit transfers: the training loop may forbid the implicit ones."""
        return sharding.put(values, sharding.replicated(self.mesh))

    def _gather(self, x: jax.Array) -> jax.Array:
        """The same array where every process can fetch all of it."""
        return x if x.is_fully_addressable else self._replicate(x)

    def _place(self, batch: Batch) -> dict[str, jax.Array]:
        zeros = np.zeros(batch.arrays["tokens"].shape, np.float32)
        arrays = batch.arrays | {"old_logp": zeros, "ref_logp": zeros}
        return sharding.put(arrays, sharding.micro_batches(self.mesh))

    #### Several processes

    def announce(self, name: str, **fields: Any) -> None:
        """On process 0, before work on the learner's arrays that is not the learner's own: the others begin handler `name`."""
        if self._channel:
            self._channel.send(name, fields, {})

    def follow(self, handlers: Mapping[str, Callable[..., None]]) -> None:
        """The life of every process but the first: repeats what process 0 does to the learner, until that ends.

        handlers: what `announce` starts, by name.

        Raises:
          ConnectionError: process 0 is gone.
        """
        self._leads = False
        while True:
            name, fields, arrays = self._channel.receive()
            if name == "stop":
                return
            if name == "update":
                self._start_update(distributed.decode_rows(fields, arrays), fields["step"])
            elif name == "update_teacher":
                self._update_teacher(distributed.decode_rows(fields, arrays), fields["step"])
            elif name == "score":
                self._start_score(distributed.decode_rows(fields, arrays), fields["at_temperature_1"])
            elif name == "peaks":
                self._peaks(self._state)
            elif name == "explain":
                self._start_explaining(**fields)
            else:
                handlers[name](**fields)
