"""Shapes of well-known decoders, so that a run can be planned before anything is downloaded. Weights and tokenizers come from the
model's own folder, always; where that is there, its config.json decides."""

from deepgrpo.model.config import ModelConfig

# layers, width, query heads, key-value heads, head size, mlp width, vocabulary, tied embeddings
SHAPES = {
    "qwen2.5-0.5b": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-3b": ("qwen2", 36, 2048, 16, 2, 128, 11008, 151936, True),
    "qwen2.5-7b": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-14b": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "qwen2.5-32b": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "qwen2.5-math-1.5b": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-math-7b": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "qwen3-0.6b": ("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True),
    "qwen3-1.7b": ("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, True),
    "qwen3-4b": ("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False),
    "llama-3.2-1b": ("llama", 16, 2048, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-3b": ("llama", 28, 3072, 24, 8, 128, 8192, 128256, True),
    "llama-3.1-8b": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
    "smollm2-135m": ("llama", 30, 576, 9, 3, 64, 1536, 49152, True),
    "smollm2-360m": ("llama", 32, 960, 15, 5, 64, 2560, 49152, True),
    "smollm2-1.7b": ("llama", 24, 2048, 32, 32, 64, 8192, 49152, True),
}
SUFFIXES = ("-instruct", "-base")  # have the shapes of the model without them


def preset(name: str) -> ModelConfig | None:
    """Shapes of the model `name`, as its Hugging Face repository spells it, with or without the owner; None: not one of SHAPES.

    Only what shapes depend on is known: the rotary embedding's settings are placeholders.
    """
    name = name.rpartition("/")[2].lower()
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    if name not in SHAPES:
        return None
    family, layers, width, heads, kv_heads, head_size, mlp_width, vocabulary, tied = SHAPES[name]
    return ModelConfig(
        model_type=family,
        vocab_size=vocabulary,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_width=mlp_width,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_position_embeddings=1 << 20,
    )
