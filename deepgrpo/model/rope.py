"""Rotary position embeddings."""

import jax
import jax.numpy as jnp

from deepgrpo.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> jax.Array:
    """float32[H/2]: theta ** (-2i/H) for i = 0 .. H/2 - 1."""
    H = config.head_size
    return config.rope_theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)


def rotate(x: jax.Array, positions: jax.Array, config: ModelConfig) -> jax.Array:
    """Rotates x [B, T, heads, H] by its positions int32[B, T], halves layout (Su et al. 2021, as Hugging Face lays it out)."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)  # [B, T, H/2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
