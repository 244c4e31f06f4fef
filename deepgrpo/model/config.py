"""Shape of a decoder, read from a Hugging Face `config.json`."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder: Qwen2/2.5 (`qkv_bias`), Qwen3 (`qk_norm`), Llama and SmolLM2 (neither).

    vocab_size counts the embedding's rows; ids at or above `len(tokenizer)` are phantom and never sampled.
    rope_scaling is a mapping as Hugging Face writes it, frozen into sorted items, or None.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    rope_scaling: tuple[tuple[str, Any], ...] | None = None
