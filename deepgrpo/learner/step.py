"""Optimizer steps on one mini-batch each. Pure, on plain trees; jitted by `programs`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from deepgrpo.learner import objective as losses
from deepgrpo.learner import sharding
from deepgrpo.learner.nonfinite import peaks
from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER, Objective
from deepgrpo.learner.optim import Optim, adamw, init_adam
from deepgrpo.learner.policy import Policy, micro_batch


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
    """What `nonfinite.first_of_step` looks at: loss sums and gradient peaks of a mini-batch, on policy; nothing is trained."""
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
