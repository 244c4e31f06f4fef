"""From parameters to log-probabilities of a batch's scored tokens. Pure, on plain trees; jitted by `programs`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from deepgrpo.learner import sharding
from deepgrpo.learner.logprob import blocked_logps
from deepgrpo.learner.objective import NO_LOSS
from deepgrpo.model.attention import Context
from deepgrpo.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Policy:
    """How parameters become log-probabilities.

    block: columns of a micro-batch whose logits exist at once. num_real_ids: ids from here on are phantom.
    """

    model: Transformer
    mesh: Mesh
    temperature: float
    num_real_ids: int
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
            return blocked_logps(
                lambda block: self.model.apply({"params": head}, block, method="logits"),
                hidden,
                targets,
                scored,
                block=self.block,
                temperature=self.temperature,
                num_real_ids=self.num_real_ids,
                with_entropy=with_entropy,
                entropy_gradient=entropy_gradient,
            )

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
