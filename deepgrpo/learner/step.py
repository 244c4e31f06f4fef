"""Optimizer steps on one mini-batch each. Pure, on plain trees; jitted by `programs`."""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from deepgrpo.learner import costs, packing, sharding
from deepgrpo.learner import objective as losses
from deepgrpo.learner.logprob import blocked_logps, target_logps
from deepgrpo.learner.minibatch import most_rows
from deepgrpo.learner.objective import BRANCH, MAIN, NO_LOSS, SUFFIX_SFT, TEACHER, Objective
from deepgrpo.learner.optim import Optim, adamw, init_adam
from deepgrpo.learner.packing import Shape
from deepgrpo.learner.report import peaks
from deepgrpo.model.attention import Context
from deepgrpo.model.transformer import Transformer
from deepgrpo.telemetry import waits


@dataclasses.dataclass(frozen=True)
class Policy:
    """How parameters become log-probabilities.

    block: columns of a micro-batch whose logits exist at once.
    """

    model: Transformer
    mesh: Mesh
    temperature: float
    block: int

    def compute_params(self, params: Any) -> Any:
        """Parameters as matmuls want them: the layers' kernels and biases in the model's dtype. Once an optimizer step, before
        the loop over micro-batches. Embedding, head and norms stay as they are: their gradients are sums over tokens, or over
        blocks of tokens, which want float32."""

        def one(path: tuple, x: jax.Array) -> jax.Array:
            name = sharding.path_name(path)
            return x.astype(self.model.dtype) if name.startswith("layers/") and not name.endswith("scale") else x

        return jax.tree_util.tree_map_with_path(one, params)

    def logps(
        self, params: Any, micro: dict[str, jax.Array], with_entropy: bool, entropy_gradient: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(logp, entropy) of a micro-batch's scored tokens, float32[B, T] each, from its arrays [B, T] (packing.Batch)."""
        by_row, context = sharding.rows(self.mesh), None
        if "context" in micro:  # a cell a batch shard
            index = micro["context"].reshape(sharding.batch_shards(self.mesh), -1)
            context = Context(jax.lax.with_sharding_constraint(index, by_row), micro["context_segments"], micro["prefixes"])
        inputs = (micro[name] for name in ("tokens", "positions", "segments"))
        hidden, _ = self.model.apply({"params": params}, *inputs, context=context)
        hidden = jax.lax.with_sharding_constraint(hidden, by_row)
        hidden = jnp.take_along_axis(hidden, micro["index"][..., None], axis=1)  # response positions only, first columns first
        hidden = jax.lax.with_sharding_constraint(hidden, by_row)
        head = {name: params[name] for name in ("embed_tokens", "lm_head") if name in params}

        def blocks(head, hidden, targets, scored):
            def logps_of(hidden, targets):
                logits = self.model.apply({"params": head}, hidden, method="logits")
                return target_logps(
                    logits, targets, self.temperature, self.model.config.num_real_ids, with_entropy, entropy_gradient
                )

            return blocked_logps(logps_of, hidden, targets, scored, self.block)

        # By hand over the batch's axes: the head is gathered and its gradient summed over devices once, not once a block, and a
        # device skips the blocks in which it has nothing to score.
        local = jax.shard_map(
            blocks,
            mesh=self.mesh,
            in_specs=(P(), by_row.spec, by_row.spec, by_row.spec),
            out_specs=by_row.spec,
            axis_names=set(sharding.BATCH_AXES),
            check_vma=False,
        )
        return local(head, hidden, micro["targets"], micro["source"] != NO_LOSS)


def micro_batch(arrays: dict[str, jax.Array], i: jax.Array) -> dict[str, jax.Array]:
    """Micro-batch i of arrays [A, B, T]: arrays [B, T]."""
    return {name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in arrays.items()}


def score(policy: Policy, params: Any, arrays: dict[str, jax.Array], used: jax.Array) -> jax.Array:
    """Log-probabilities of all scored tokens, float32[A, B, T]; 0 in micro-batches from `used` (int32[]) on."""

    params = policy.compute_params(params)

    def body(i, out):
        return jax.lax.dynamic_update_index_in_dim(out, policy.logps(params, micro_batch(arrays, i), False)[0], i, 0)

    return jax.lax.fori_loop(0, used, body, jnp.zeros(arrays["tokens"].shape, jnp.float32))


######################################################################################################################
#  Optimizer steps on one mini-batch each
######################################################################################################################


def mismatch(old_logp: jax.Array, rollout_logp: jax.Array, source: jax.Array) -> dict[str, jax.Array]:
    """How far the learner's log-probs are from those of the engine that sampled, over student tokens that have both.

    Sums: |d|, k3 = exp(d) - 1 - d (of KL(engine || learner), tokens being the engine's samples), ratios outside [0.5, 2], tokens;
    and the largest |d|; d = old - rollout.
    """
    known = ((source == MAIN) | (source == BRANCH)) & ~jnp.isnan(rollout_logp)
    d = jnp.where(known, old_logp - rollout_logp, 0.0)
    outside = jnp.abs(d) > jnp.log(2.0)
    sums = {"abs": jnp.abs(d), "k3": jnp.expm1(d) - d, "outside": outside, "tokens": known}
    return {name: jnp.sum(x.astype(jnp.float32)) for name, x in sums.items()} | {"max": jnp.max(jnp.abs(d))}


def gradients(
    policy: Policy,
    o: Objective,
    params: Any,
    arrays: dict[str, jax.Array],
    on_policy: jax.Array,
    used: jax.Array,
    auto_coef: jax.Array | float = 1.0,
):
    """Gradient of a mini-batch's loss, and the sums that its metrics are made of.

    Micro-batches accumulate in a loop inside the compiled step, with an argument as its length: a padded A costs nothing.

    Args:
      arrays: packing.Batch arrays [A, B, T] and old_logp, ref_logp float32[A, B, T].
      on_policy: bool[], the parameters are those that the batch is scored with: old log-probs are the current ones (ratio 1).
      used: int32[], micro-batches that hold anything. auto_coef: see `losses.stream_weights`.

    Returns:
      (gradients, float32 like params; sums {"loss", "mismatch": dicts, "tokens", "totals": float32[3]}; old log-probs
      float32[A, B, T]).
    """
    tokens = losses.count_tokens(arrays["source"]).astype(jnp.float32)
    totals = losses.denominators(arrays["source"], arrays["row_share"], o)  # of the mini-batch, over all devices
    weights = losses.stream_weights(totals, o, auto_coef)
    shardings = sharding.parameter_shardings(params, policy.mesh)
    params = policy.compute_params(params)

    def share(params, micro):
        logp, entropy = policy.logps(params, micro, True, entropy_gradient=o.entropy_coef != 0.0)
        old_logp = jnp.where(on_policy, jax.lax.stop_gradient(logp), micro["old_logp"])
        value, sums = losses.loss_share(logp, entropy, old_logp, micro, weights, o)
        return value, (sums, mismatch(old_logp, micro["rollout_logp"], micro["source"]), old_logp)

    def body(i, carry):
        grads, sums, distance, old_logps = carry
        (_, (s, m, old_logp)), g = jax.value_and_grad(share, has_aux=True)(params, micro_batch(arrays, i))
        grads = jax.lax.with_sharding_constraint(jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, g), shardings)
        largest = jnp.maximum(distance.pop("max"), m.pop("max"))
        distance = jax.tree.map(jnp.add, distance, m) | {"max": largest}
        old_logps = jax.lax.dynamic_update_index_in_dim(old_logps, old_logp, i, 0)
        return grads, jax.tree.map(jnp.add, sums, s), distance, old_logps

    _, (sums, distance, _) = jax.eval_shape(share, params, micro_batch(arrays, jnp.int32(0)))
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)  # noqa: E731
    start = (jax.lax.with_sharding_constraint(zeros(params), shardings), zeros(sums), zeros(distance), zeros(arrays["tokens"]))
    grads, sums, distance, old_logps = jax.lax.fori_loop(0, used, body, start)
    return grads, {"loss": sums, "mismatch": distance, "tokens": tokens, "totals": totals}, old_logps


def train_step(
    policy: Policy,
    o: Objective,
    optim: Optim,
    state: dict[str, Any],
    arrays: dict[str, jax.Array],
    on_policy: jax.Array,
    lr: jax.Array,
    used: jax.Array,
):
    """One optimizer step on one mini-batch.

    With kl_stop set, a mini-batch whose KL to the policy that it was sampled with (`token_losses.moved_token`) is above it ends
    the update: neither it nor a later mini-batch changes anything, and the later ones are not computed. The flag stays on the
    device, in state["kl_stopped"] (int32[]); an update's first mini-batch, which is on policy, clears it.

    Args:
      state: {"params": tree, "adam": {"count", "mu", "nu"}} and what else `optimizer_state` makes; donated. lr: float32[].

    Returns:
      (state, results {"actor": metrics of `loss_metrics`, "mismatch", "tokens", "grad_norm", "kl_stopped" if kl_stop is set}, old
      log-probs float32[A, B, T]).
    """
    auto_coef = state["auto_coef"] if o.auto_teacher_coef else 1.0
    stopped = None
    if o.kl_stop:
        stopped = (state["kl_stopped"] > 0) & ~on_policy
        used = jnp.where(stopped, 0, used)
    grads, sums, old_logps = gradients(policy, o, state["params"], arrays, on_policy, used, auto_coef)
    if o.kl_stop:
        stopped |= losses.student_mean(sums["loss"]["moved"], sums["tokens"]) > o.kl_stop
    params, adam, norm = adamw(state["params"], state["adam"], grads, lr, optim, skip=stopped)
    actor = losses.loss_metrics(sums["loss"], sums["tokens"], sums["totals"], o, auto_coef)
    results = {"actor": actor, "mismatch": sums["mismatch"], "tokens": sums["tokens"], "grad_norm": norm}
    new = state | {"params": params, "adam": adam}
    if o.auto_teacher_coef:
        parts = losses.coef_parts(sums["loss"]["loss"], sums["totals"], o)
        moved = losses.auto_teacher_coef(auto_coef, *parts, o.auto_coef_decay)
        new["auto_coef"] = jnp.where(jnp.isfinite(norm) & jnp.isfinite(moved), moved, auto_coef)
    if o.kl_stop:
        new["kl_stopped"] = stopped.astype(jnp.int32)
        results["kl_stopped"] = stopped
    return new, results, old_logps


def teacher_step(
    policy: Policy, optim: Optim, state: dict[str, Any], arrays: dict[str, jax.Array], lr: jax.Array, used: jax.Array
):
    """One optimizer step on teacher rows alone, with Adam moments of their own: the mean of -logp over their tokens.

    Args:
      state: {"params", "teacher_adam", ...}; donated. arrays, lr, used: as in `train_step`; student tokens have no effect.

    Returns:
      (state, results {"actor": {"post_sft_loss", "mean_logp", "entropy"}, "tokens": float32[3], "grad_norm"}).
    """
    grads, sums, _ = gradients(policy, losses.SUFFIX_SFT, state["params"], arrays, jnp.bool_(False), used)
    params, adam, norm = adamw(state["params"], state["teacher_adam"], grads, lr, optim)
    mean = {name: x[TEACHER] / (sums["tokens"][TEACHER] + losses.EPS) for name, x in sums["loss"].items()}
    actor = {"post_sft_loss": mean["loss"], "mean_logp": mean["logp"], "entropy": mean["entropy"]}
    return state | {"params": params, "teacher_adam": adam}, {"actor": actor, "tokens": sums["tokens"], "grad_norm": norm}


def explain(policy: Policy, o: Objective, state: dict[str, Any], arrays: dict[str, jax.Array], used: jax.Array) -> dict[str, Any]:
    """What `report.first_of_step` looks at: loss sums and gradient peaks of a mini-batch, on policy; nothing is trained."""
    grads, sums, _ = gradients(policy, o, state["params"], arrays, jnp.bool_(True), used, state.get("auto_coef", 1.0))
    norm = optax.tree.norm(grads)
    return {"ref_logp": jnp.sum(arrays["ref_logp"]), "sums": sums["loss"], "gradient": peaks(grads), "norm": norm}


def optimizer_state(params: Any, o: Objective) -> dict[str, Any]:
    """What resumes besides the parameters, at the start of a run: {"adam"}, and only where the objective needs it

    teacher_adam (teacher_update=post_ppo): moments of `teacher_step`. auto_coef: float32[], the automatic teacher coefficient.
    kl_stopped: int32[], see `train_step`.
    """
    state = {"adam": init_adam(params)}
    if o.teacher_update == "post_ppo":
        state["teacher_adam"] = init_adam(params)
    if o.auto_teacher_coef:
        state["auto_coef"] = jnp.float32(o.auto_coef_init)
    if o.kl_stop:
        state["kl_stopped"] = jnp.int32(0)
    return state


######################################################################################################################
#  Compiled programs: lowered for a batch shape, compiled once, timed and counted
######################################################################################################################

THREADS = 4  # that compile at once: XLA uses a few cores for one program, and each program has serial parts

log = logging.getLogger(__name__)


def batch_shapes(config: Any, max_rows: tuple[int, int] | None, shards: int) -> list[Shape]:
    """The shapes that a run compiles, from its configuration. max_rows: see `Learner`. shards: of the batch."""
    optim, learner = config.optim, config.learner
    mini_batch_rows = optim.mini_batch_prompts * config.rollout.n
    rows = most_rows(*(max_rows or (2 * mini_batch_rows, 0)), mini_batch_rows)
    if config.objective.teacher_update == "post_ppo":
        rows = max(rows, 2 * optim.teacher.mini_batch_rows)
    return packing.shapes(learner.buckets, learner.micro_batch_tokens, shards, rows, learner.share_prefix)


def abstract_state(params: Any, mesh: Mesh, objective: Objective, reference_dtype: Any = None) -> dict[str, Any]:
    """A learner's state as ShapeDtypeStructs with shardings, from its parameters' shapes; nothing is allocated.

    reference_dtype: of the reference policy; None: there is none.
    """
    parameters, scalar = sharding.parameter_shardings(params, mesh), sharding.replicated(mesh)

    def at(tree: Any, shardings: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=to), tree, shardings)

    adam = {"count": scalar, "mu": parameters, "nu": parameters}
    state = {"params": at(params, parameters, jnp.float32)}
    for name, part in jax.eval_shape(functools.partial(optimizer_state, o=objective), state["params"]).items():
        state[name] = at(part, adam if name.endswith("adam") else scalar)
    if reference_dtype is not None:
        state["reference"] = at(params, parameters, reference_dtype)
    return state


@dataclasses.dataclass
class Programs:
    """Programs by (name, shape): `train_step`, `teacher_step`, `score`, `score_at_1` (temperature 1), `score_reference` (the
    reference's dtype), and, when a step was refused, `explain` or `explain_teacher`.

    abstract_state: the learner's state as ShapeDtypeStructs with shardings. config: of the run.
    waited: seconds that callers have waited for a compilation so far.
    """

    model: Transformer
    mesh: Mesh
    abstract_state: dict[str, Any]
    config: Any
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
        gigabytes = costs.compiled(program) / 1e9
        log.info("compiled %s %s: traced in %.1f s, compiled in %.1f s, %.2f GB a device", name, shape, *seconds, gigabytes)
        return program

    def memory_plan(self, shapes: Iterable[Shape]) -> dict[str, int]:
        """Bytes on a device by part, of the shape that needs most; see `costs.plan_memory`."""
        plans = [
            costs.plan_memory(
                self.model.config,
                shape,
                self.config,
                self.mesh.shape,
                self.model.placement.attention,
                reference="reference" in self.abstract_state,
            )
            for shape in shapes
        ]
        return max(plans, key=lambda parts: sum(parts.values()))

    def lower(self, name: str, shape: Shape) -> Any:
        """A program lowered for a batch shape, from shapes alone: nothing is allocated."""
        mesh, whole, batch = self.mesh, sharding.replicated(self.mesh), sharding.micro_batches(self.mesh)
        block = max(1, self.config.learner.logprob_block * sharding.batch_shards(mesh) // shape.B)
        temperature = 1.0 if name == "score_at_1" else self.config.rollout.temperature
        policy = Policy(self.model, mesh, temperature, block)

        def scalar(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((), dtype, sharding=whole)

        scored = ((shape.A, shape.B, shape.T), jnp.float32)
        sizes = packing.array_shapes(shape) | {"old_logp": scored, "ref_logp": scored}
        arrays = {key: jax.ShapeDtypeStruct(*size, sharding=batch) for key, size in sizes.items()}
        state, objective = dict(self.abstract_state), Objective.from_config(self.config.objective)
        reference = state.pop("reference", None)
        if name == "train_step":
            shardings = (jax.tree.map(lambda x: x.sharding, state), whole, batch)

            function = jax.jit(
                functools.partial(train_step, policy, objective, Optim.from_config(self.config.optim)),
                donate_argnums=0,
                out_shardings=shardings,
            )
            return function.lower(state, arrays, scalar(jnp.bool_), scalar(jnp.float32), scalar(jnp.int32))

        if name == "teacher_step":
            shardings = (jax.tree.map(lambda x: x.sharding, state), whole)

            function = jax.jit(
                functools.partial(teacher_step, policy, Optim.of_teacher(self.config.optim)),
                donate_argnums=0,
                out_shardings=shardings,
            )
            return function.lower(state, arrays, scalar(jnp.float32), scalar(jnp.int32))

        if name.startswith("explain"):
            objective = SUFFIX_SFT if name == "explain_teacher" else objective

            return jax.jit(functools.partial(explain, policy, objective), out_shardings=whole).lower(
                state, arrays, scalar(jnp.int32)
            )

        params = reference if name == "score_reference" else state["params"]
        return jax.jit(functools.partial(score, policy), out_shardings=batch).lower(params, arrays, scalar(jnp.int32))
