"""The learner's compiled programs: what is lowered for a batch shape, compiled once, ahead of its use, timed and counted."""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from deepgrpo.learner import memory, packing, sharding, step
from deepgrpo.learner import policy as policies
from deepgrpo.learner.minibatch import most_rows
from deepgrpo.learner.objective import SUFFIX_SFT, Objective
from deepgrpo.learner.optim import Optim
from deepgrpo.learner.packing import Shape
from deepgrpo.model.transformer import Transformer
from deepgrpo.telemetry import waits

THREADS = 4  # that compile at once: XLA uses a few cores for one program, and each program has serial parts

log = logging.getLogger(__name__)


def batch_shapes(
    objective: Objective,
    optim: Mapping[str, Any],
    learner: Mapping[str, Any],
    rollout_n: int,
    max_rows: tuple[int, int] | None,
    shards: int,
) -> list[Shape]:
    """The shapes that a run compiles, from its configuration; arguments as those of `Learner`. shards: of the batch."""
    mini_batch_rows = optim["mini_batch_prompts"] * rollout_n
    rows = most_rows(*(max_rows or (2 * mini_batch_rows, 0)), mini_batch_rows)
    if objective.teacher_update == "post_ppo":
        rows = max(rows, 2 * optim["teacher"]["mini_batch_rows"])
    sizes = (learner["buckets"], learner["micro_batch_tokens"], shards, rows)
    return packing.shapes(*sizes, share_prefix=learner["share_prefix"])


def abstract_state(params: Any, mesh: Mesh, objective: Objective, reference_dtype: Any = None) -> dict[str, Any]:
    """A learner's state as ShapeDtypeStructs with shardings, from its parameters' shapes; nothing is allocated.

    reference_dtype: of the reference policy; None: there is none.
    """
    parameters, scalar = sharding.parameter_shardings(params, mesh), sharding.replicated(mesh)

    def at(tree: Any, shardings: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=to), tree, shardings)

    adam = {"count": scalar, "mu": parameters, "nu": parameters}
    state = {"params": at(params, parameters, jnp.float32)}
    for name, part in jax.eval_shape(functools.partial(step.optimizer_state, o=objective), state["params"]).items():
        state[name] = at(part, adam if name.endswith("adam") else scalar)
    if reference_dtype is not None:
        state["reference"] = at(params, parameters, reference_dtype)
    return state


@dataclasses.dataclass
class Programs:
    """Programs by (name, shape): `train_step`, `teacher_step`, `score`, `score_at_1` (temperature 1), `score_reference` (the
    reference's dtype), and, when a step was refused, `explain` or `explain_teacher`.

    abstract_state: the learner's state as ShapeDtypeStructs with shardings. block: see learner.logprob_block.
    waited: seconds that callers have waited for a compilation so far.
    """

    model: Transformer
    mesh: Mesh
    abstract_state: dict[str, Any]
    objective: Objective
    optim: Optim
    teacher_optim: Optim
    temperature: float
    num_real_ids: int
    block: int
    waited: float = 0.0
    _planned: set[tuple[str, Shape]] = dataclasses.field(default_factory=set)
    _futures: dict[tuple[str, Shape], concurrent.futures.Future] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return sum(future.done() and not future.cancelled() for future in self._futures.values())

    @property
    def recompilations(self) -> int:
        """Programs that were compiled although no plan held them: the training loop had to wait for each."""
        return len(self._futures.keys() - self._planned)

    def plan(self, keys: Iterable[tuple[str, Shape]]) -> None:
        """Declares programs that the run will use, in the order of their first use. They are compiled when they are called."""
        self._planned |= set(keys)

    def compile_ahead(self, keys: Iterable[tuple[str, Shape]]) -> None:
        """`plan`, and starts to compile in the background; returns at once."""
        keys = list(keys)
        self.plan(keys)
        pool = concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "compile")
        with self._lock:
            for key in keys:
                if key not in self._futures:
                    self._futures[key] = pool.submit(self._compile, *key)
        pool.shutdown(wait=False)  # what was submitted still runs

    def close(self) -> None:
        """Gives up what has not begun to compile."""
        for future in self._futures.values():
            future.cancel()

    def __call__(self, name: str, shape: Shape) -> Callable:
        """The compiled program. What waits its turn in the background is compiled here instead."""
        start = time.monotonic()
        with self._lock:
            future = self._futures.get((name, shape))
            mine = future is None or future.cancel()
            if mine:
                future = self._futures[name, shape] = concurrent.futures.Future()
                future.set_running_or_notify_cancel()  # whoever calls next waits for this one
        if mine:
            try:
                future.set_result(self._compile(name, shape))
            except BaseException as error:
                future.set_exception(error)
        with waits.on(f"the compiler, for {name} at {shape}"):
            program = future.result()
        self.waited += time.monotonic() - start
        return program

    def _compile(self, name: str, shape: Shape) -> Callable:
        start = time.monotonic()
        with jax.set_mesh(self.mesh):  # a matter of the thread
            lowered = self.lower(name, shape)
            traced = time.monotonic()
            program = lowered.compile()
        seconds = traced - start, time.monotonic() - traced
        gigabytes = memory.compiled(program) / 1e9
        log.info("compiled %s %s: traced in %.1f s, compiled in %.1f s, %.2f GB a device", name, shape, *seconds, gigabytes)
        return program

    def memory_plan(self, shapes: Iterable[Shape]) -> dict[str, int]:
        """Bytes on a device by part, of the shape that needs most; see `memory.plan_memory`."""
        plans = [
            memory.plan_memory(
                self.model.config,
                shape,
                dtype=self.model.dtype,
                remat=self.model.remat,
                mesh=self.mesh.shape,
                logprob_block=self.block,
                reference="reference" in self.abstract_state,
                attention=self.model.placement.attention,
                teacher_optimizer="teacher_adam" in self.abstract_state,
            )
            for shape in shapes
        ]
        return max(plans, key=lambda parts: sum(parts.values()))

    def lower(self, name: str, shape: Shape) -> Any:
        """A program lowered for a batch shape, from shapes alone: nothing is allocated."""
        mesh, whole, batch = self.mesh, sharding.replicated(self.mesh), sharding.micro_batches(self.mesh)
        block = max(1, self.block * sharding.batch_shards(mesh) // shape.B)
        temperature = 1.0 if name == "score_at_1" else self.temperature
        policy = policies.Policy(self.model, mesh, temperature, self.num_real_ids, block)

        def scalar(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((), dtype, sharding=whole)

        scored = ((shape.A, shape.B, shape.T), jnp.float32)
        sizes = packing.array_shapes(shape) | {"old_logp": scored, "ref_logp": scored}
        arrays = {key: jax.ShapeDtypeStruct(*size, sharding=batch) for key, size in sizes.items()}
        state = dict(self.abstract_state)
        reference = state.pop("reference", None)
        if name == "train_step":
            shardings = (jax.tree.map(lambda x: x.sharding, state), whole, batch)

            def train_step(*args):
                return step.train_step(policy, self.objective, self.optim, *args)

            function = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
            return function.lower(state, arrays, scalar(jnp.bool_), scalar(jnp.float32), scalar(jnp.int32))

        if name == "teacher_step":
            shardings = (jax.tree.map(lambda x: x.sharding, state), whole)

            def teacher_step(*args):
                return step.teacher_step(policy, self.teacher_optim, *args)

            function = jax.jit(teacher_step, donate_argnums=0, out_shardings=shardings)
            return function.lower(state, arrays, scalar(jnp.float32), scalar(jnp.int32))

        if name.startswith("explain"):
            objective = SUFFIX_SFT if name == "explain_teacher" else self.objective

            def explain(*args):
                return step.explain(policy, objective, *args)

            return jax.jit(explain, out_shardings=whole).lower(state, arrays, scalar(jnp.int32))

        def score(*args):
            return policies.score(policy, *args)

        params = reference if name == "score_reference" else state["params"]
        return jax.jit(score, out_shardings=batch).lower(params, arrays, scalar(jnp.int32))
