"""One optimizer step on one mini-batch. Pure, on plain trees; jitted by `programs`."""

from typing import Any

import jax
import jax.numpy as jnp

from deepgrpo.learner import objective as losses
from deepgrpo.learner import sharding
from deepgrpo.learner.objective import BRANCH, MAIN, Objective
from deepgrpo.learner.optim import Optim, adamw
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


def gradients(policy: Policy, o: Objective, params: Any, arrays: dict[str, jax.Array], on_policy: jax.Array, used: jax.Array):
    """Gradient of a mini-batch's loss, and the sums that its metrics are made of.

    Micro-batches accumulate in a loop inside the compiled step, with an argument as its length: a padded A costs nothing.

    Args:
      arrays: packing.Batch arrays [A, B, T] and old_logp, ref_logp float32[A, B, T].
      on_policy: bool[], the parameters are those that the batch is scored with: old log-probs are the current ones (ratio 1).
      used: int32[], micro-batches that hold anything.

    Returns:
      (gradients, float32 like params; sums: dict of trees; old log-probs float32[A, B, T]).
    """
    tokens = losses.count_tokens(arrays["source"]).astype(jnp.float32)  # of the mini-batch, over all devices: global denominators
    weights = losses.stream_weights(tokens, o)
    shardings = sharding.parameter_shardings(params, policy.mesh)

    def share(params, micro):
        logp, entropy = policy.logps(params, micro, True)
        source = micro["source"]
        old_logp = jnp.where(on_policy, jax.lax.stop_gradient(logp), micro["old_logp"])
        values = (micro[name] for name in ("ref_logp", "advantages", "teacher_coef"))
        value, sums = losses.loss_share(logp, entropy, old_logp, *values, source, weights, o, micro["rollout_logp"])
        return value, (sums, mismatch(old_logp, micro["rollout_logp"], source), old_logp)

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
    return grads, {"loss": sums, "mismatch": distance, "tokens": tokens}, old_logps


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

    Args:
      state: {"params": tree, "adam": {"count", "mu", "nu"}}; donated. lr: float32[].

    Returns:
      (state, results {"actor": metrics of `loss_metrics`, "mismatch", "tokens", "grad_norm"}, old log-probs float32[A, B, T]).
    """
    grads, sums, old_logps = gradients(policy, o, state["params"], arrays, on_policy, used)
    params, adam, norm = adamw(state["params"], state["adam"], grads, lr, optim)
    actor = losses.loss_metrics(sums["loss"], sums["tokens"], o)
    results = {"actor": actor, "mismatch": sums["mismatch"], "tokens": sums["tokens"], "grad_norm": norm}
    return {"params": params, "adam": adam}, results, old_logps
