"""AdamW with global-norm clipping, as PyTorch computes it, on a state of plain dicts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Optim:
    """Hyper-parameters of the optimizer; each is described at its key in configs/common.py, section `optim`."""

    lr: float
    schedule: str  # constant | cosine
    warmup_steps: int
    b2: float
    weight_decay: float
    grad_clip: float
    b1: float = 0.9
    eps: float = 1e-8

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "Optim":
        return cls(**{field.name: section[field.name] for field in dataclasses.fields(cls) if field.name in section})

    @classmethod
    def of_teacher(cls, section: Mapping[str, Any]) -> "Optim":
        """Of teacher steps: `optim` at the constant rate `optim.teacher.lr` (-1: optim.lr)."""
        lr = section["teacher"]["lr"] if section["teacher"]["lr"] >= 0 else section["lr"]
        return dataclasses.replace(cls.from_config(section), lr=lr, schedule="constant", warmup_steps=0)

    def __post_init__(self):
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"optim.schedule is {self.schedule!r}, expected constant or cosine")


def learning_rate(o: Optim, step: int, total_steps: int) -> float:
    """Rate of training step `step` (0, 1, ... counts the steps that trained, so a skipped one does not advance the schedule).

    Warm-up is linear and never 0: (step + 1) / (warmup_steps + 1). Cosine falls from the peak at its end to 0 at `total_steps`.
    """
    if step < o.warmup_steps:
        return o.lr * (step + 1) / (o.warmup_steps + 1)
    if o.schedule == "constant":
        return o.lr
    progress = (step - o.warmup_steps) / max(1, total_steps - o.warmup_steps)
    return o.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def init_adam(params: Any) -> dict[str, Any]:
    """Moments of zeros in the parameters' dtype and sharding, and a step count: {"count": int32[], "mu": tree, "nu": tree}."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"count": jnp.zeros([], jnp.int32), "mu": zeros, "nu": jax.tree.map(jnp.zeros_like, params)}


def clip_by_global_norm(grads: Any, max_norm: float) -> tuple[Any, jax.Array]:
    """Scales grads by min(1, max_norm / (norm + 1e-6)); also returns the norm before clipping."""
    norm = optax.tree.norm(grads)
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * factor, grads), norm


def adamw(
    params: Any, adam: dict[str, Any], grads: Any, lr: jax.Array, o: Optim, skip: jax.Array | None = None
) -> tuple[Any, dict[str, Any], jax.Array]:
    """One step: clip, Adam moments, decoupled weight decay on all parameters.

    A gradient whose norm is not finite changes nothing: neither parameters nor moments nor the count. Nor does any with `skip`
    (bool[]) true.

    Returns:
      (params, adam, norm of the gradient before clipping).
    """
    clipped, norm = clip_by_global_norm(grads, o.grad_clip)
    transform = optax.scale_by_adam(o.b1, o.b2, o.eps)
    direction, new = transform.update(clipped, optax.ScaleByAdamState(**adam))
    new_params = jax.tree.map(lambda p, d: p - lr * (d + o.weight_decay * p), params, direction)
    valid = jnp.isfinite(norm) if skip is None else jnp.isfinite(norm) & ~skip

    def keep(new_tree: Any, old_tree: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(valid, a, b), new_tree, old_tree)

    return keep(new_params, params), keep({"count": new.count, "mu": new.mu, "nu": new.nu}, adam), norm
