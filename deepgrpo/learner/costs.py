"""How much memory the learner needs on each device, from shapes alone. Pure arithmetic: no array is made, nothing is compiled.

What is held all the time is exact: parameters, moments, reference, the arrays of a batch. What a step needs on top is a sum over
the buffers that live together at its worst moment, which is one of three: the head's logits of a block, a layer's backward pass,
or the optimizer, where XLA copies the moments before it overwrites them.
`compiled(...)` is what XLA says of the finished program; a test holds the two within 15 % at the shapes of a 1.5B model.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.learner import sharding
from deepgrpo.learner.packing import Shape, array_shapes
from deepgrpo.learner.rows import Row
from deepgrpo.model.attention import QUERY_CHUNK
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params

BLOCKS = 4  # [block, V] float32 arrays at once: logits, their exponentials, their gradient, and what is being summed
HEADS = 4  # [V, D] float32 arrays meanwhile, not divided by fsdp: the head, its gradient of a block, that of all, the embedding's


def plan_memory(
    model: ModelConfig,
    shape: Shape,
    config: Any,
    mesh: Mapping[str, int],
    attention: str,
    *,
    reference: bool,
    mini_batches: int = 1,
) -> dict[str, int]:
    """Bytes on one device by part; their sum is the peak of a train step.

    Args:
      shape: of a batch (packing.shapes; the largest is the worst). config: of the run (its sections model,
        learner and objective). mesh: sizes along data, fsdp and tensor. attention: the backend in use.
      reference: whether a reference policy is held. mini_batches: of a step, whose arrays are on the devices together.

    Returns:
      parameters, moments, reference, batch: held all the time. gradients: float32, summed over micro-batches. compute_copy: of
      the layers' parameters in `dtype`. activations: kept from forward to backward. working: the rest of the worst moment, such
      as the gradients of one micro-batch.
    """
    remat, size, tensor = config.model.remat, jnp.dtype(config.model.dtype).itemsize, mesh["tensor"]
    shards = mesh["data"] * mesh["fsdp"]
    everything, layers, largest = _parameters(model, mesh)
    rows = shape.B // shards
    tokens = rows * shape.T
    block = min(max(1, config.learner.logprob_block // rows), shape.T) * rows
    vocabulary = -(-model.vocab_size // tensor)
    activations = model.num_layers * tokens * size * _kept(model, remat, tensor)
    if remat == "none" and shape.T <= QUERY_CHUNK:  # else they are computed again
        activations += model.num_layers * tokens * _scores(model, attention, shape, size, tensor)
    logits = 4 * BLOCKS * block * vocabulary + (4 * HEADS + size) * vocabulary * model.width
    scores = _scores(model, attention, shape, size, tensor)
    layer = size * layers + 4 * largest + tokens * (2 * size * _kept(model, "none", tensor) + scores)
    copy = size * layers if size < 4 else 0
    bias = tokens * (shape.T + shape.C) * size if attention == "cudnn" else 0  # its mask, which all layers share
    batch = sum(math.prod(s) * 4 // shards for s, _ in array_shapes(shape).values()) + 2 * 4 * shape.A * tokens
    parts = {
        "parameters": 4 * everything,
        "moments": 8 * everything * (2 if config.objective.teacher_update == "post_ppo" else 1),
        "reference": size * everything if reference else 0,
        "batch": batch * mini_batches,
        "gradients": 4 * everything,
        "compute_copy": copy,
        "activations": activations,
        "working": max(logits, layer, 8 * everything - copy - activations) + bias,
    }
    return {name: int(part) for name, part in parts.items()}


def describe(parts: Mapping[str, int]) -> str:
    """A plan as a line for the log."""
    return f"{sum(parts.values()) / 1e9:.2f} GB: " + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)


def compiled(program: Any) -> int:
    """Bytes on one device that XLA has planned for a compiled program: arguments, and temporaries."""
    analysis = program.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def _kept(c: ModelConfig, remat: str, tensor: int) -> float:
    """Numbers of `dtype` that a token keeps in a layer from its forward to its backward pass, by the policy of model.remat.

    full: the layer's input. dots: also the results of its projections. none: also what norms, rotary embedding and activation
    function have made.
    """
    q, kv, F = c.num_heads * c.head_size / tensor, c.num_kv_heads * c.head_size / tensor, c.mlp_width / tensor
    if remat == "full":
        return c.width
    dots = c.width + q + 2 * kv + 2 * c.width + 2 * F
    return dots if remat == "dots" else dots + 4 * c.width + 2 * q + 2 * F


def _scores(c: ModelConfig, attention: str, shape: Shape, size: int, tensor: int) -> float:
    """Bytes a token of a layer's attention without a fused kernel: scores of every head and their softmax, in float32 and in
    `dtype`, over the keys that its chunk of queries looks at. XLA for CPUs has those of all chunks at once; it may need less
    elsewhere."""
    keys = shape.C + (shape.T + min(shape.T, QUERY_CHUNK)) / 2
    return c.num_heads / tensor * keys * (12 + size) if attention == "xla" else 0.0


@functools.cache
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    return {sharding.path_name(path): leaf.shape for path, leaf in leaves}


def _parameters(config: ModelConfig, mesh: Mapping[str, int]) -> tuple[int, int, int]:
    """Numbers on one device: of all parameters, of the layers', of the largest of the others (the embedding or the head)."""
    everything = layers = largest = 0
    for name, shape in _shapes(config).items():
        spec = sharding.parameter_spec(name, shape, mesh)
        count = math.prod(shape) // math.prod(mesh[axis] for axis in spec if axis)
        everything += count
        if name.startswith("layers/"):
            layers += count
        else:
            largest = max(largest, count)
    return everything, layers, largest


######################################################################################################################
#  Model FLOPs of the learner: what the mathematics asks for, whatever is recomputed, padded or skipped. Pure arithmetic.
######################################################################################################################

# Dense bfloat16 FLOP/s of one device as its vendor states them; the first pattern found in JAX's device_kind decides.
PEAKS = (
    (r"B200", 2250e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835e12),
    (r"H100|H200|GH200", 989e12),
    (r"A100", 312e12),
    (r"L40S", 362e12),
    (r"TPU v4", 275e12),
    (r"TPU v5 lite|TPU v5e", 197e12),
    (r"TPU v5", 459e12),
    (r"TPU v6", 918e12),
)


def peak_flops(device_kind: str, dtype: str) -> float:
    """FLOP/s of a device in bfloat16; 0 where it is not known, and for other dtypes, whose speed depends on XLA's settings."""
    if np.dtype(dtype).name != "bfloat16":
        return 0.0
    return next((flops for pattern, flops in PEAKS if re.search(pattern, device_kind)), 0.0)


def forward_flops(config: ModelConfig, tokens: float, pairs: float, scored: float) -> float:
    """FLOPs of a forward pass over `tokens`, with `pairs` of query and key, of which `scored` tokens get a log-prob."""
    c = config
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    token = 2 * c.num_layers * (2 * c.width * q + 2 * c.width * kv + 3 * c.width * c.mlp_width)
    return token * tokens + 4 * c.num_layers * q * pairs + 2 * c.width * c.vocab_size * scored


def causal_pairs(lengths: Iterable[int]) -> float:
    """Pairs of query and key in sequences of these lengths, each token looking at itself and what is before it."""
    return float(sum(n * (n + 1) / 2 for n in lengths))


def update_flops(config: ModelConfig, mini_batches: Sequence[Sequence[Row]], tokens: Sequence[int]) -> float:
    """Forward and backward over the rows of each mini-batch, once.

    tokens: that enter the network in each, without padding; fewer than the rows' own where prompts are computed once for several
    rows, whose pairs are then counted once, too (in proportion, where only a part of what could be shared is).
    """
    total = 0.0
    for rows, entering in zip(mini_batches, tokens, strict=True):
        lengths = [len(row.prompt_ids) + len(row.response_ids) - 1 for row in rows]  # the last token is never an input
        prompts: dict[bytes, list[int]] = {}
        for row in rows:
            prompts.setdefault(row.prompt_ids.tobytes(), []).append(len(row.prompt_ids) - 1)
        repeated = [n for same in prompts.values() for n in same[1:]]
        shared = (sum(lengths) - entering) / max(1, sum(repeated))
        pairs = causal_pairs(lengths) - shared * causal_pairs(repeated)
        total += 3 * forward_flops(config, entering, pairs, sum(row.num_scored for row in rows))
    return total
