"""Model FLOPs of the learner: what the mathematics asks for, whatever is recomputed, padded or skipped. Pure arithmetic.

A matrix product [m, k] x [k, n] is 2 m k n FLOPs. Forward, with the letters of the design (D width, N and K heads, H head size,
F mlp width, V vocabulary, L layers):

    a token              2 L (D N H + 2 D K H + N H D + 3 D F)      projections of attention, and the gated mlp
    a query and a key    4 L N H                                     that the query may look at: score and weighted value
    a scored token       2 D V                                       the head, on response tokens alone

Norms, softmax and rotary embeddings are left out, as is custom. Backward is twice the forward: one product for each operand.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from deepgrpo.learner.rows import Row
from deepgrpo.model.config import ModelConfig

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


def peak(device_kind: str, dtype: str) -> float:
    """FLOP/s of a device in bfloat16; 0 where it is not known, and for other dtypes, whose speed depends on XLA's settings."""
    if np.dtype(dtype).name != "bfloat16":
        return 0.0
    return next((flops for pattern, flops in PEAKS if re.search(pattern, device_kind)), 0.0)


def forward(config: ModelConfig, tokens: float, pairs: float, scored: float) -> float:
    """FLOPs of a forward pass over `tokens`, with `pairs` of query and key, of which `scored` tokens get a log-prob."""
    c = config
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    token = 2 * c.num_layers * (2 * c.width * q + 2 * c.width * kv + 3 * c.width * c.mlp_width)
    return token * tokens + 4 * c.num_layers * q * pairs + 2 * c.width * c.vocab_size * scored


def causal_pairs(lengths: Iterable[int]) -> float:
    """Pairs of query and key in sequences of these lengths, each token looking at itself and what is before it."""
    return float(sum(n * (n + 1) / 2 for n in lengths))


def of_update(config: ModelConfig, mini_batches: Sequence[Sequence[Row]], tokens: Sequence[int]) -> float:
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
        total += 3 * forward(config, entering, pairs, sum(len(row.response_ids) for row in rows))
    return total
