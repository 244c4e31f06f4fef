"""Shape of a decoder, read from a Hugging Face `config.json` and written back to one.

What the decoder cannot compute exactly is refused here, by name, before any weight is read.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from deepgrpo.config.folders import read_json

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Settings of each rope type: required, optional. `rope_theta` and the type itself stand beside them.
ROPE_TYPES = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
_STRETCHED = ("llama3", "yarn")  # types that need the context length of pre-training

_REQUIRED = (
    "model_type",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_NEVER_NULL = ("rms_norm_eps", "rope_theta", "tie_word_embeddings")
_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_COUNTS = (*_REQUIRED[1:], "num_key_value_heads", "head_dim")
# What an absent key means, as transformers' own configuration classes define it for all three model types.
_WHEN_ABSENT = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": None,
    "head_dim": None,
    "layer_types": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "quantization_config": None,
    "quantization": None,
}


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The content of a JSON file that holds one object; ValueError, naming the file, for any other content."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder: Qwen2/2.5 (`qkv_bias`), Qwen3 (`qk_norm`), Llama and SmolLM2 (neither).

    vocab_size counts the embedding's rows. Ids without a token are never sampled: engine and learner cut off those from
    `tokenizer_size` on (0: the tokenizer fills the vocabulary), and the `holes` below it are masked in the logits.
    rope_scaling is a mapping as Hugging Face writes it (key `rope_type` included), frozen into sorted items; None: plain rope.
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
    holes: tuple[int, ...] = ()
    tokenizer_size: int = 0

    @property
    def num_real_ids(self) -> int:
        """Ids from here on have no token."""
        return self.tokenizer_size or self.vocab_size

    @property
    def context_length(self) -> int:
        """Positions that the model was made for, as vLLM reckons them: linear and yarn stretch their base by `factor`."""
        scaling = dict(self.rope_scaling or {})
        if scaling.get("rope_type") not in ("linear", "yarn"):
            return self.max_position_embeddings
        return int(scaling["factor"] * scaling.get("original_max_position_embeddings", self.max_position_embeddings))

    @classmethod
    def from_hf(cls, folder: str | pathlib.Path) -> "ModelConfig":
        """Reads `folder/config.json`, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        Raises:
          FileNotFoundError: there is no config.json.
          ValueError: a key is missing, or asks for something that the decoder does not compute; every such key is listed.
        """
        path = pathlib.Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not found. Expected a Hugging Face model folder (config.json, *.safetensors)")
        return cls.from_hf_dict(read_object(path), source=str(path))

    @classmethod
    def from_hf_dict(cls, hf: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Same, from the parsed content; `source` names it in errors."""
        missing = [key for key in _REQUIRED if hf.get(key) is None]
        if missing:
            raise ValueError(f"{source}: missing {', '.join(missing)}. Expected the config.json of a causal language model")
        hf = {**_WHEN_ABSENT, **hf} | {key: _WHEN_ABSENT[key] for key in _NEVER_NULL if hf.get(key) is None}
        if hf["model_type"] not in ARCHITECTURES:
            raise ValueError(f"{source}: model_type is {hf['model_type']!r}, expected one of {', '.join(sorted(ARCHITECTURES))}")
        if wrong := _wrong_types(hf):
            raise ValueError(f"{source}: cannot be the config of a model:\n  " + "\n  ".join(wrong))
        problems = _unsupported(hf)
        rope, rope_problems = _rope(hf)
        problems += rope_problems
        heads = hf["num_attention_heads"]
        kv_heads = hf["num_key_value_heads"] or heads
        head_size = hf["head_dim"] or (128 if hf["model_type"] == "qwen3" else hf["hidden_size"] // heads)
        if heads % kv_heads:
            problems.append(f"num_attention_heads is {heads}, expected a multiple of num_key_value_heads ({kv_heads})")
        if hf["head_dim"] is None and hf["model_type"] != "qwen3" and hf["hidden_size"] % heads:
            problems.append(f"hidden_size is {hf['hidden_size']}, expected a multiple of num_attention_heads ({heads})")
        if head_size % 2:
            problems.append(f"head_dim is {head_size}, expected an even number")
        if problems:
            raise ValueError(f"{source}: the decoder does not support this model:\n  " + "\n  ".join(problems))
        theta = float(rope.pop("rope_theta"))
        return cls(
            model_type=hf["model_type"],
            vocab_size=hf["vocab_size"],
            num_layers=hf["num_hidden_layers"],
            width=hf["hidden_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            mlp_width=hf["intermediate_size"],
            rope_theta=theta,
            rms_norm_eps=float(hf["rms_norm_eps"]),
            tie_embeddings=bool(hf["tie_word_embeddings"]),
            qkv_bias=hf["model_type"] == "qwen2",
            qk_norm=hf["model_type"] == "qwen3",
            max_position_embeddings=hf["max_position_embeddings"],
            rope_scaling=None if rope["rope_type"] == "default" else tuple(sorted(rope.items())),
        )

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights, as `transformer.abstract_params` has them."""
        D, q, kv = self.width, self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        biases = (q + 2 * kv) * self.qkv_bias + 2 * self.head_size * self.qk_norm
        layer = D * (2 * q + 2 * kv + 3 * self.mlp_width + 2) + biases
        return self.vocab_size * D * (1 if self.tie_embeddings else 2) + self.num_layers * layer + D

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of a config.json, in the older spelling of rope, which every version of transformers and vLLM reads."""
        hf = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.width,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_width,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.model_type == "llama":
            hf |= {"attention_bias": False, "mlp_bias": False}
        else:
            hf |= {"use_sliding_window": False}
        if self.model_type == "qwen3":
            hf |= {"attention_bias": False}
        return hf


def _wrong_types(hf: Mapping[str, Any]) -> list[str]:
    """Values that no config of a model has, as `key is ..., expected ...`."""
    wrong = [
        f"{key} is {hf[key]!r}, expected {kind}"
        for kind, keys, fits in (
            ("a whole number above 0", _COUNTS, lambda value: type(value) is int and value > 0),
            ("a number above 0", ("rms_norm_eps", "rope_theta"), _is_positive),
            ("true or false", ("tie_word_embeddings", "use_sliding_window"), lambda value: type(value) is bool),
            ("a mapping", ("rope_scaling", "rope_parameters"), lambda value: isinstance(value, Mapping)),
        )
        for key in keys
        if hf[key] is not None and not fits(hf[key])
    ]
    rope = hf["rope_scaling"] or hf["rope_parameters"]
    given = {key: rope.get(key) for key in _ROPE_NUMBERS} if isinstance(rope, Mapping) else {}
    return wrong + [
        f"{key} of rope is {value!r}, expected a number above 0"
        for key, value in given.items()
        if value is not None and not _is_positive(value)
    ]


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _unsupported(hf: Mapping[str, Any]) -> list[str]:
    """Settings outside rope that change what the model computes, as `key is ..., expected ...`."""
    model_type = hf["model_type"]
    problems = []

    def expect(key: str, *expected: Any) -> None:
        if hf[key] not in expected:
            problems.append(f"{key} is {hf[key]!r}, expected {expected[0]!r}")

    expect("hidden_act", "silu", "swish")
    expect("quantization_config", None)
    expect("quantization", None)
    if model_type != "qwen2":  # Qwen2 has biases on q, k and v, and nowhere else, whatever this key says
        expect("attention_bias", False, None)
    if model_type == "llama":
        expect("mlp_bias", False, None)
        return problems
    layers = hf["layer_types"]
    if layers is not None:
        if other := sorted(set(layers) - {"full_attention"}):
            problems.append(f"layer_types holds {', '.join(other)}, expected full_attention only")
    elif hf["use_sliding_window"] and hf["sliding_window"] is not None and hf["max_window_layers"] < hf["num_hidden_layers"]:
        problems.append(
            f"use_sliding_window is true with max_window_layers {hf['max_window_layers']} of {hf['num_hidden_layers']} layers, "
            "expected full attention in every layer"
        )
    return problems


def _rope(hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns rope's settings (`rope_theta`, `rope_type` and those of the type) and what is unsupported about them."""
    given = dict(hf["rope_scaling"] or hf["rope_parameters"] or {})
    where = "rope_scaling" if hf["rope_scaling"] else "rope_parameters"
    if nested := sorted(key for key, value in given.items() if isinstance(value, Mapping)):
        return {}, [f"{where} is nested by layer type ({', '.join(nested)}), expected one flat mapping"]
    theta = given.pop("rope_theta", None) or hf["rope_theta"]
    old_spelling = given.pop("type", None)
    rope_type = given.pop("rope_type", None) or old_spelling or "default"
    partial = given.pop("partial_rotary_factor", None) or hf["partial_rotary_factor"]
    problems = []
    if partial is not None and partial != 1.0:
        problems.append(f"partial_rotary_factor is {partial}, expected 1.0")
    if rope_type not in ROPE_TYPES:
        problems.append(f"{where}.rope_type is {rope_type!r}, expected one of {', '.join(ROPE_TYPES)}")
        return {}, problems
    required, optional = ROPE_TYPES[rope_type]
    given = {key: value for key, value in given.items() if value is not None}
    if missing := [key for key in required if key not in given]:
        problems.append(f"{where} of type {rope_type} lacks {', '.join(missing)}")
    if unknown := sorted(set(given) - set(required) - set(optional)):
        problems.append(f"{where} of type {rope_type} has {', '.join(unknown)}, expected only {', '.join(required + optional)}")
    if rope_type in _STRETCHED:  # a top-level value wins, and without any the model's own context length stands in
        given.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
        if hf.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    return {"rope_theta": theta, "rope_type": rope_type, **given}, problems


######################################################################################################################
#  Shapes of well-known decoders, so that a run can be planned before anything is downloaded. Weights and tokenizers come from the
######################################################################################################################

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


def preset_shapes(name: str) -> ModelConfig | None:
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
