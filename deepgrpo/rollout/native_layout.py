"""Where the native engine's arrays live: one device, or the learner's mesh with weights gathered once a publish.

Decoding reads every weight for every token. On a mesh, weights therefore stay split along `tensor` only, and the slots are
spread over the axes along which the learner replicates or shards parameters.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepgrpo.model.config import ModelConfig

TENSOR_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Layout:
    """mesh: None for one device. slot_axes: mesh axes that divide the slots. heads_axis: the one that divides K, or None."""

    mesh: Mesh | None = None
    slot_axes: tuple[str, ...] = ()
    heads_axis: str | None = None

    @classmethod
    def of(cls, params: Any, config: ModelConfig, slots: int) -> "Layout":
        """The layout for a tree of parameters: its mesh, if any leaf lives on several devices."""
        shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
        spread = next((s for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1), None)
        if spread is None:
            return cls()
        shape = spread.mesh.shape
        chosen: tuple[str, ...] = ()
        for axis in spread.mesh.axis_names:
            if axis != TENSOR_AXIS and slots % (math.prod(shape[a] for a in chosen) * shape[axis]) == 0:
                chosen += (axis,)
        splits_heads = TENSOR_AXIS in shape and config.num_kv_heads % shape[TENSOR_AXIS] == 0
        return cls(spread.mesh, chosen, TENSOR_AXIS if splits_heads else None)

    @property
    def slot_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.slot_axes) if self.mesh else 1

    def weights(self, params: Any) -> Any:
        """Shardings of the engine's stacked copy of `params`: theirs, without all axes but `tensor`. None on one device."""
        if self.mesh is None:
            return None

        def one(leaf: jax.Array) -> NamedSharding:
            spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
            return NamedSharding(self.mesh, P(*(TENSOR_AXIS if names_tensor(entry) else None for entry in spec)))

        return jax.tree.map(one, params)

    def constrain(self, caches: tuple, split_slots: bool = True) -> tuple:
        """Fixes the sharding of caches [B, K, ...] inside a compiled function: every call gives and takes the same one."""
        if self.mesh is None:
            return caches
        slots = self.slot_axes if split_slots and self.slot_axes else None
        return jax.lax.with_sharding_constraint(caches, NamedSharding(self.mesh, P(slots, self.heads_axis)))


def names_tensor(entry: Any) -> bool:
    return TENSOR_AXIS in (entry if isinstance(entry, tuple) else (entry,))
