"""The decoder, in Flax Linen: one `apply` serves policy, old policy, reference and the native rollout engine.

Parameters carry Hugging Face's names, stacked over layers on axis 0, kernels as [in, out]:
`embed_tokens/embedding` [V, D], `layers/self_attn/q_proj/kernel` [L, D, N*H], ..., `norm/scale` [D], `lm_head/kernel` [D, V].

Training scans over the stacked layers (`Transformer.__call__`): one layer is compiled, whatever L. Decoding walks them one by
one (`unstack_layers`, `decode_layers`): a scan would carry the stacked cache and copy all of it for every token, whereas
separate buffers are updated in place.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deepgrpo.model.attention import Context, Sight, cached_attention, packed_attention, prepare, write_cache
from deepgrpo.model.config import ModelConfig

MASKED = -1e30  # logit of an id without a token: finite, so that 0 * MASKED stays 0 in the entropy
REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@jax.custom_vjp
def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table [V, D]: [..., D]. A frequent token's gradient has thousands of terms: they are summed in float32."""
    return table[tokens]


def _lookup_gradient(residuals, g: jax.Array):
    table, tokens = residuals
    return jnp.zeros(table.shape, jnp.float32).at[tokens].add(g.astype(jnp.float32)).astype(table.dtype), None


lookup.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _lookup_gradient)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How packed rows run: the attention backend, and where activations live.

    rows: sharding of arrays [B, ...] along B, None on one device. Heads and mlp are split along the mesh axis `tensor` where it
    divides them. XLA would find a sharding for each array by itself, and on some meshes copy whole activations on the way.
    """

    attention: str = "xla"
    rows: NamedSharding | None = None

    def of(self, x: jax.Array, split: int | None = None) -> NamedSharding | None:
        """The sharding of x [B, ...]: rows, and dimension `split` along `tensor`."""
        if self.rows is None:
            return None
        spec = [self.rows.spec[0]] + [None] * (x.ndim - 1)
        if split is not None and x.shape[split] % self.rows.mesh.shape["tensor"] == 0:
            spec[split] = "tensor"
        return NamedSharding(self.rows.mesh, P(*spec))

    def table(self, x: jax.Array) -> jax.Array:
        """A table [V, D], its rows along `tensor`, otherwise whole: what tokens of any device look up in."""
        if self.rows is None:
            return x
        split = "tensor" if x.shape[0] % self.rows.mesh.shape["tensor"] == 0 else None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.rows.mesh, P(split)))

    def __call__(self, x: jax.Array, split: int | None = None) -> jax.Array:
        return x if self.rows is None else jax.lax.with_sharding_constraint(x, self.of(x, split))


class Embed(nn.Module):
    features: tuple[int, int]  # V, D
    dtype: Any
    placement: Placement

    def setup(self):
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), self.features, jnp.float32)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return lookup(self.placement.table(self.embedding), tokens).astype(self.dtype)


class Dense(nn.Module):
    features: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(0.02), (x.shape[-1], self.features), jnp.float32)
        y = x @ kernel.astype(self.dtype)
        if self.use_bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(self.dtype)
        return y


class RMSNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * scale).astype(x.dtype)


class Attention(nn.Module):
    config: ModelConfig
    dtype: Any
    placement: Placement

    @nn.compact
    def __call__(self, x, positions, sight, cache):
        """x: [B, T, D]; positions: int32[B, T]; with a cache (k [B, K, H, S], v [B, K, S, H]), sight is a mask bool[B, T, S];
        without (None) it is (Sight, what the backend made of it)."""
        c = self.config
        B, T, _ = x.shape

        def project(heads: int, name: str) -> jax.Array:
            return Dense(heads * c.head_size, c.qkv_bias, self.dtype, name=name)(x).reshape(B, T, heads, c.head_size)

        q = project(c.num_heads, "q_proj")
        k = project(c.num_kv_heads, "k_proj")
        v = project(c.num_kv_heads, "v_proj")
        if c.qk_norm:
            q = RMSNorm(c.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(c.rms_norm_eps, name="k_norm")(k)
        q, k = rotate(q, positions, c), rotate(k, positions, c)
        if cache is None:
            place = self.placement
            q, k, v = place(q, 2), place(k, 2), place(v, 2)
            out = packed_attention(q, k, v, *sight, place.attention, place.of(q, 2))
        else:
            cache = write_cache(cache, k, v, positions)
            out = cached_attention(q, *cache, sight)
        out = out.reshape(B, T, c.num_heads * c.head_size)
        return Dense(c.width, False, self.dtype, name="o_proj")(out), cache


class Mlp(nn.Module):
    config: ModelConfig
    dtype: Any
    placement: Placement

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = Dense(self.config.mlp_width, False, self.dtype, name="gate_proj")(x)
        up = Dense(self.config.mlp_width, False, self.dtype, name="up_proj")(x)
        return Dense(self.config.width, False, self.dtype, name="down_proj")(self.placement(nn.silu(gate) * up, 2))


class Layer(nn.Module):
    config: ModelConfig
    dtype: Any
    placement: Placement = Placement()

    @nn.compact
    def __call__(self, x, cache, positions, sight):
        eps, place = self.config.rms_norm_eps, self.placement
        attended, cache = Attention(self.config, self.dtype, place, name="self_attn")(
            RMSNorm(eps, name="input_layernorm")(x), positions, sight, cache
        )
        x = place(x + attended)
        x += Mlp(self.config, self.dtype, place, name="mlp")(RMSNorm(eps, name="post_attention_layernorm")(x))
        return place(x), cache


class Transformer(nn.Module):
    """A causal decoder. dtype: of activations and matmuls; parameters are float32 (or whatever tree is applied)."""

    config: ModelConfig
    dtype: Any = jnp.bfloat16
    remat: str = "none"
    unroll: int = 1
    placement: Placement = Placement()

    def setup(self):
        c = self.config
        layer = Layer
        if self.remat != "none":
            layer = nn.remat(Layer, prevent_cse=False, policy=REMAT_POLICIES[self.remat])
        self.embed_tokens = Embed((c.vocab_size, c.width), self.dtype, self.placement)
        self.layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=c.num_layers,
            unroll=self.unroll,
        )(c, self.dtype, self.placement)
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_embeddings:
            self.lm_head = Dense(c.vocab_size, False, self.dtype)

    def __call__(self, tokens, positions, segments=None, cache=None, context: Context | None = None):
        """Runs the decoder up to the final norm; `logits` does the rest, for the positions that need it.

        Args:
          tokens: int32[B, T]. positions: int32[B, T], each token's position in its own sequence.
          segments: int32[B, T], tokens see earlier tokens of their own segment; 0 is padding. Required without a cache.
          context: tokens of other packed rows that these see, too; see `attention.Context`.
          cache: (k [L, B, K, H, S], v [L, B, K, S, H]). New keys are written at `positions`; a token sees cache slots <= its
            position.

        Returns:
          hidden [B, T, D] in `dtype`, and the updated cache (None without one).
        """
        place = self.placement
        if cache is None:
            sight = Sight(segments, context)
            sight = sight, prepare(sight, place.attention, self.dtype)
        else:
            sight = cache_mask(cache, positions)
        hidden, cache = self.layers(place(self.embed(tokens)), cache, positions, sight)
        hidden = place(self.norm(hidden))
        if self.is_initializing() and not self.config.tie_embeddings:
            self.lm_head(hidden[:1, :1])
        return hidden, cache

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32[...] -> [..., D] in `dtype`: what the first layer reads."""
        return self.embed_tokens(tokens)

    def finish(self, x: jax.Array) -> jax.Array:
        """Final norm and logits of what the last layer wrote: [..., D] -> float32[..., V]."""
        return self.logits(self.norm(x))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Projects hidden [..., D] onto the vocabulary: float32[..., V]; MASKED where the vocabulary has a hole."""
        if self.config.tie_embeddings:
            weight = self.embed_tokens.embedding.T
        else:
            weight = self.lm_head.variables["params"]["kernel"]
        logits = jnp.einsum("...d,dv->...v", hidden, weight.astype(self.dtype), preferred_element_type=jnp.float32)
        if not self.config.holes:
            return logits
        return jnp.where(np.isin(np.arange(self.config.vocab_size), self.config.holes), MASKED, logits)


def cache_mask(cache: tuple[jax.Array, jax.Array], positions: jax.Array) -> jax.Array:
    """bool[B, T, S]: cache slots at or before each token's own position, int32[B, T]."""
    return jnp.arange(cache[0].shape[-1])[None, None, :] <= positions[:, :, None]


def unstack_layers(params: dict, num_layers: int) -> dict:
    """The same parameters with `layers` as a tuple of L trees; every leaf is a fresh buffer, in jit too."""
    copied = jax.tree.map(jnp.copy, {name: leaf for name, leaf in params.items() if name != "layers"})
    layers = tuple(jax.tree.map(lambda leaf, i=i: jnp.copy(leaf[i]), params["layers"]) for i in range(num_layers))
    return {**copied, "layers": layers}


def decode_layers(model: Transformer, params: dict, tokens: jax.Array, positions: jax.Array, caches: tuple):
    """`Transformer.__call__` with a cache, over unstacked layers and without the final norm.

    Args:
      params: from `unstack_layers`. tokens, positions: int32[B, T]; a position outside the cache marks padding.
      caches: L pairs (k [B, K, H, S], v [B, K, S, H]).

    Returns:
      x [B, T, D], input of `Transformer.finish`, and the updated caches.
    """
    top = {name: leaf for name, leaf in params.items() if name != "layers"}
    x = model.apply({"params": top}, tokens, method="embed")
    mask = cache_mask(caches[0], positions)
    layer, updated = Layer(model.config, model.dtype), []
    for layer_params, cache in zip(params["layers"], caches, strict=True):
        x, cache = layer.apply({"params": layer_params}, x, cache, positions, mask)
        updated.append(cache)
    return x, tuple(updated)


def empty_caches(config: ModelConfig, batch: int, length: int, dtype: Any) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """L pairs of zeros: (k [B, K, H, S], v [B, K, S, H]) with B = batch, S = length."""
    K, H = config.num_kv_heads, config.head_size
    pair = lambda: (jnp.zeros((batch, K, H, length), dtype), jnp.zeros((batch, K, length, H), dtype))  # noqa: E731
    return tuple(pair() for _ in range(config.num_layers))


@functools.cache
def abstract_params(config: ModelConfig) -> Any:
    """The parameter tree as ShapeDtypeStructs, float32; nothing is allocated. Shared between calls: do not change it."""
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config, jnp.float32).init, jax.random.key(0), token, token, token)["params"]


######################################################################################################################
#  Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and their stretched variants, as Hugging Face defines them.
######################################################################################################################


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
