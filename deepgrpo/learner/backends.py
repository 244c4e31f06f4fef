"""Which attention backend a learner uses: the configured one, after it has agreed with `xla` on this run's own devices.

A fused kernel is the vendor's code: what a version of it does with segments, shared prefixes, padding and a mesh's split is only
known where it runs. So before the first step both backends compute one micro-batch of the run's largest shape, forward and
backward. Where `xla` is chosen anyway, nothing is computed.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepgrpo.config.errors import ConfigError
from deepgrpo.learner import packing, sharding
from deepgrpo.learner.objective import MAIN
from deepgrpo.learner.packing import Shape, groups, prompt_groups
from deepgrpo.learner.packing import place as place_pieces
from deepgrpo.learner.rows import Row
from deepgrpo.model.attention import Context, Sight, choose_backend, packed_attention, prepare
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Placement
from deepgrpo.types import as_ids

TOLERANCE = 0.03  # largest difference over largest value; bfloat16 takes 0.005, a wrong mask 1
PARTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")

log = logging.getLogger(__name__)


def settle(name: str, config: ModelConfig, mesh: Mesh, dtype: Any, shape: Shape) -> str:
    """The backend for `model.attention` = name: what `choose_backend` says, or xla where that one errs.

    shape: the largest of the run's batches.

    Raises:
      ConfigError: xla's own result is not finite: the devices do not compute.
    """
    backend = choose_backend(name, mesh.devices.flat[0], dtype)
    if backend == "xla":
        return backend
    case = make_case(config, mesh, dtype, shape, backend)
    kind = mesh.devices.flat[0].device_kind
    plain = compute("xla", mesh, *case)
    if not all(finite for _, finite in compare(mesh, plain, plain)):
        raise ConfigError(
            f"attention by xla is not finite on {kind}, from finite numbers: look at the device, its driver and jax's version"
        )
    try:
        gaps = compare(mesh, compute(backend, mesh, *case), plain)
    except (NotImplementedError, ValueError, RuntimeError) as error:  # JAX's own rules, the compiler's, the driver's
        reason = str(error).partition("\n")[0][:300]
        log.warning("attention: %s does not run on %s (%s: %s); this run uses xla", backend, kind, type(error).__name__, reason)
        return "xla"
    worst, part = max((gap if finite else float("inf"), part) for (gap, finite), part in zip(gaps, PARTS, strict=True))
    if worst > TOLERANCE:
        log.warning(
            "attention: %s is wrong on %s: its %s differs from xla's by %.2g of the largest value, expected at most %g, at"
            " [B, T] = [%d, %d] with a context of %d tokens; this run uses xla (model.attention=xla skips the comparison)",
            *(backend, kind, part, worst, TOLERANCE, shape.B, shape.T, shape.C),
        )
        return "xla"
    log.info("attention: %s agrees with xla on %s, forward and backward, within %.2g of the largest value", backend, kind, worst)
    return backend


def make_case(
    config: ModelConfig, mesh: Mesh, dtype: Any, shape: Shape, backend: str
) -> tuple[list[jax.Array], jax.Array, Sight]:
    """([q, k, v], weights of the output, who sees whom); every shard has the same two packed rows: three responses to one prompt,
    a row with a prompt of its own, and padding."""
    shards, T, C = sharding.batch_shards(mesh), shape.T, shape.C
    sizes = ((T // 3, T // 4), (T // 3, T // 5), (T // 3, T // 6), (T // 8, T // 5))
    ids = [(as_ids(np.zeros(max(1, prompt))), as_ids(np.zeros(max(1, size)))) for prompt, size in sizes]
    rows = [Row(*pair, 1.0, MAIN, 0.0, None, "", 0, False, 1.0) for pair in ids]
    cells = place_pieces(prompt_groups(rows, groups(rows), C), 2, T, C, 0.0, backend == "splash", False)
    built = packing.build(rows, cells, dataclasses.replace(shape, A=len(cells), B=2), 1).arrays
    arrays = {key: np.tile(x[0], (shards, 1)) for key, x in built.items()}
    place = functools.partial(sharding.put, to=sharding.rows(mesh))
    context = None
    if shape.C:
        index = arrays["context"].reshape(shards, -1)
        context = Context(place(index), place(arrays["context_segments"]), place(arrays["prefixes"]))
    random, heads = np.random.default_rng(0), (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    normal = [random.normal(size=(2 * shards, T, n, config.head_size)).astype(np.float32) for n in (*heads, config.num_heads)]
    weights = normal.pop() * (arrays["segments"] > 0)[..., None, None]
    qkv = [place(np.asarray(x, jnp.dtype(dtype))) for x in normal]
    return qkv, place(weights), Sight(place(arrays["segments"]), context)


def compute(backend: str, mesh: Mesh, qkv: list[jax.Array], weights: jax.Array, sight: Sight) -> tuple[jax.Array, ...]:
    """Output and gradients of q, k, v by a backend, split over the mesh as in a step; see `PARTS`. What padding puts out is 0, or
    NaN where it is not finite: NaN reaches the weights' gradients though nothing sees it."""
    place = Placement(backend, sharding.rows(mesh))

    def loss(qkv, weights, sight):
        q, k, v = (place(x, 2) for x in qkv)
        out = packed_attention(q, k, v, sight, prepare(sight, backend, q.dtype), backend, place.of(q, 2))
        return jnp.sum(out.astype(jnp.float32) * weights), jnp.where(sight.segments[..., None, None] > 0, out, 0 * out)

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv, weights, sight)
    return out, *gradients


def compare(mesh: Mesh, found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> list[tuple[float, bool]]:
    """For each part the largest difference over the largest value, and whether all of it is finite."""

    def one(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-9), jnp.all(jnp.isfinite(a))

    whole = sharding.replicated(mesh)
    results = jax.jit(lambda a, b: [one(*pair) for pair in zip(a, b, strict=True)], out_shardings=whole)(found, expected)
    return [(float(gap), bool(finite)) for gap, finite in jax.device_get(results)]
