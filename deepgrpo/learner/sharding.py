"""The device mesh and where every array of the learner lives on it.

Axes: `data` replicates parameters, `fsdp` shards them and the batch, `tensor` splits heads, mlp and vocabulary. The batch is
sharded over (data, fsdp). Axes are Auto: XLA propagates the shardings given here through the step.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# The first pattern found in a parameter's path decides. Kernels are [L, in, out]; attention and mlp split their inner side.
PARAMETER_RULES: tuple[tuple[str, P], ...] = (
    (r"embed_tokens/embedding$", P("tensor", "fsdp")),
    (r"lm_head/kernel$", P("fsdp", "tensor")),
    (r"(q|k|v|gate|up)_proj/kernel$", P(None, "fsdp", "tensor")),
    (r"(o|down)_proj/kernel$", P(None, "tensor", "fsdp")),
    (r"(q|k|v)_proj/bias$", P(None, "tensor")),
    (r"norm/scale$", P()),
)


def make_mesh(shape: Sequence[int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of `shape` over (data, fsdp, tensor); one size may be -1 and takes the devices that are left.

    `train.main` also hands it to `jax.set_mesh`, once.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(shape, len(devices))
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def mesh_sizes(shape: Sequence[int], devices: int) -> dict[str, int]:
    """Sizes of a mesh by axis, without any device; see `make_mesh`."""
    sizes = [int(size) for size in shape]
    if len(sizes) != len(AXES) or sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"learner.mesh is {tuple(shape)}, expected sizes along {AXES}, positive, at most one of them -1")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    if math.prod(sizes) != devices:
        raise ValueError(
            f"learner.mesh {tuple(shape)} does not fit {devices} devices: the sizes along {AXES} must multiply to that"
            f" number; set learner.mesh, e.g. (1, -1, 1)"
        )
    return dict(zip(AXES, sizes, strict=True))


def batch_shards(mesh: Mesh) -> int:
    """Number of parts that the batch is split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def path_name(path: tuple) -> str:
    """A key path of a nested dict as `layers/self_attn/q_proj/kernel`."""
    return "/".join(str(key.key) for key in path)


def parameter_spec(
    name: str, shape: Sequence[int], sizes: Mapping[str, int], rules: Sequence[tuple[str, P]] = PARAMETER_RULES
) -> tuple[str | None, ...]:
    """The mesh axis of each leading dimension of a parameter, None where it is whole, by `(regex, PartitionSpec)` rules.

    A dimension that its axis does not divide is kept whole (and logged): odd vocabularies and few heads must not stop a run.

    Args:
      name: path of the parameter. sizes: of the mesh, by axis.

    Raises:
      ValueError: no rule matches it.
    """
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
    if spec is None:
        raise ValueError(f"no sharding rule matches parameter {name!r} {tuple(shape)}; add one to PARAMETER_RULES")
    whole = [axis for axis, size in zip(spec, shape, strict=False) if axis and size % sizes[axis]]
    if whole:
        logging.info("parameter %s %s: not divisible by mesh axes %s, kept whole along them", name, tuple(shape), whole)
    return tuple(None if axis in whole else axis for axis in spec)


def parameter_shardings(params: Any, mesh: Mesh, rules: Sequence[tuple[str, P]] = PARAMETER_RULES) -> Any:
    """Tree of NamedSharding for a tree of parameters (arrays or shapes); see `parameter_spec`."""

    def one(path: tuple, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*parameter_spec(path_name(path), leaf.shape, mesh.shape, rules)))

    return jax.tree_util.tree_map_with_path(one, params)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def micro_batches(mesh: Mesh) -> NamedSharding:
    """Of arrays [A, B, ...]: rows over (data, fsdp)."""
    return NamedSharding(mesh, P(None, BATCH_AXES))


def rows(mesh: Mesh) -> NamedSharding:
    """Of arrays [B, ...] inside the step: rows over (data, fsdp)."""
    return NamedSharding(mesh, P(BATCH_AXES))


def put(tree: Any, to: NamedSharding) -> Any:
    """Host arrays on the devices of `to`, without waiting. With several processes each must hold the same values, of which it
    takes its own part: nothing is sent, and nothing compared."""
    if to.is_fully_addressable:
        return jax.device_put(tree, to)
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), to, lambda index: np.asarray(x)[index]), tree)


def require_like(tree: Mapping[str, Any], like: Mapping[str, Any], what: str) -> None:
    """Raises ValueError, naming the first difference, unless both trees of arrays have one structure, shapes and dtypes."""
    mine, structure = jax.tree_util.tree_flatten_with_path(like)
    theirs, other = jax.tree_util.tree_flatten_with_path(tree)
    if structure != other:
        raise ValueError(f"{what} has parts {sorted(tree)}, expected {sorted(like)}")
    for (path, x), (_, y) in zip(mine, theirs, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(f"{path_name(path)}: stored {y.dtype}{y.shape}, expected {x.dtype}{x.shape}")


def place(tree: Any, shardings: Any) -> Any:
    """Copies a tree of host or device arrays to its shardings, leaf by leaf; the result shares no buffer with its source.

    A donated buffer must have one owner: policy, reference and the caller's tree may have started as the same arrays. The copy
    comes first because `device_put` reuses a buffer that already lies where a shard of the result belongs, `may_alias=False` or
    not.
    """

    def one(x: Any, to: NamedSharding) -> jax.Array:
        return jax.device_put(jnp.copy(x), to) if isinstance(x, jax.Array) else put(np.array(x), to)

    return jax.tree.map(one, tree, shardings)
