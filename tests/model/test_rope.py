"""Rotary embeddings against the formula in float64 and against transformers' own tables."""

import dataclasses

import numpy as np
import pytest

from deepgrpo.model import transformer
from deepgrpo.model.config import ModelConfig

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=16,
    num_layers=1,
    width=128,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    mlp_width=16,
    rope_theta=500000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    max_position_embeddings=131072,
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.5, "truncate": False},
]


def scaled(scaling: dict | None) -> ModelConfig:
    return dataclasses.replace(CONFIG, rope_scaling=scaling and tuple(sorted(scaling.items())))


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=lambda s: s["rope_type"] if s else "default")
def test_frequencies_equal_transformers(scaling):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = scaled(scaling)
    hf = transformers.LlamaConfig.from_dict(config.to_hf_dict())
    theirs = LlamaRotaryEmbedding(hf)
    ours, factor = transformer.frequencies(config)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=3e-7, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_llama3_against_the_published_rule():
    """A pair keeps its frequency above `high` turns over the context, is divided by `factor` below `low`, blends between."""
    ours, _ = transformer.frequencies(scaled({"rope_type": "llama3", **LLAMA3}))
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    turns = 8192 * plain / (2 * np.pi)
    blend = np.clip((turns - 1) / (4 - 1), 0, 1)
    np.testing.assert_allclose(ours, plain * (blend + (1 - blend) / 8), rtol=1e-6)


@pytest.mark.parametrize("scaling", [None, SCALINGS[3]], ids=["default", "yarn"])
def test_rotation_is_the_complex_product(scaling):
    config = scaled(scaling)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 64)).astype(np.float32)
    positions = rng.integers(0, 2000, size=(2, 5)).astype(np.int32)
    frequency, factor = transformer.frequencies(config)
    angle = positions[..., None, None] * frequency.astype(np.float64)
    turned = (x[..., :32] + 1j * x[..., 32:].astype(np.float64)) * np.exp(1j * angle) * factor
    ours = np.asarray(transformer.rotate(x, positions, config))
    np.testing.assert_allclose(ours, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-3)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 1, 64)).astype(np.float32)

    def score(i: int, j: int) -> float:
        qi = transformer.rotate(q, np.array([[i]], np.int32), CONFIG)
        kj = transformer.rotate(k, np.array([[j]], np.int32), CONFIG)
        return float(np.sum(np.asarray(qi) * np.asarray(kj)))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
