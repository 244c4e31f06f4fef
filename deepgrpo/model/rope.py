"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and their stretched variants, as Hugging Face defines them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.model.config import ModelConfig


@functools.lru_cache(maxsize=64)
def frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Returns the angle a position turns each pair by, float32[H/2], and the factor on cos and sin (1 but for yarn).

    Plain: theta ** (-2i/H) for i = 0 .. H/2 - 1. Worked out on the host, rounded to float32 where the models' own code rounds:
    an angle is a position times a frequency, so at position 10,000 a difference in the last bit would already show.
    """
    H = config.head_size
    exponents = np.arange(0, H, 2, dtype=np.float32) / np.float32(H)
    base = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)  # a correctly rounded float32 power
    plain = np.float32(1) / base
    if config.rope_scaling is None:
        return plain, 1.0
    scaling = dict(config.rope_scaling)
    match scaling["rope_type"]:
        case "linear":
            return plain / np.float32(scaling["factor"]), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(base, scaling, config), _yarn_attention_factor(scaling)
    raise ValueError(f"rope_scaling.rope_type is {scaling['rope_type']!r}, expected default, linear, llama3 or yarn")


def rotate(x: jax.Array, positions: jax.Array, config: ModelConfig) -> jax.Array:
    """Rotates x [B, T, heads, H] by its positions int32[B, T]; the halves of H are the two coordinates of each pair."""
    frequency, factor = frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * frequency  # [B, T, H/2]
    cos, sin = jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _llama3(plain: np.ndarray, scaling: dict) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, with a linear blend in between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / plain
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * plain / np.float32(factor) + blend * plain
    stretched = np.where(wavelength > context / low, plain / np.float32(factor), plain)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(between, blended, stretched).astype(np.float32)


def _yarn(base: np.ndarray, scaling: dict, config: ModelConfig) -> np.ndarray:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, "NTK-by-parts"): pairs that turn often over the pre-training context keep
    their frequency, those that turn less than once are stretched, with a linear ramp over the pairs in between."""
    H, context = config.head_size, scaling["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns so many times over the context."""
        return H * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_of(_or(scaling, "beta_fast", 32)), pair_of(_or(scaling, "beta_slow", 1))
    if _or(scaling, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, H - 1)
    if low == high:
        high += 0.001  # the ramp of a single pair
    ramp = (np.arange(H // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    stretched = np.float32(1) / (np.float32(scaling["factor"]) * base)
    return (stretched * (1 - keep) + np.float32(1) / base * keep).astype(np.float32)


def _yarn_attention_factor(scaling: dict) -> float:
    """The softmax temperature of YaRN, moved onto cos and sin: 0.1 ln(factor) + 1 unless the config gives it."""

    def magnitude(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _or(scaling: dict, key: str, when_absent: float | bool) -> float | bool:
    """An optional setting of the rope type; the default is the one that Hugging Face documents for it."""
    return scaling[key] if key in scaling else when_absent
