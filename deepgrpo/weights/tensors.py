"""Which tensors a model has, by one table, and which a Hugging Face folder holds, by the headers of its files.

Nothing in here reads a weight or imports JAX: the check at the start of a run uses it, and so does `hf`, which loads.
"""

import dataclasses
import json
import pathlib
from typing import Any

from deepgrpo.model.config import ModelConfig, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = ("F32", "F16", "BF16")
LARGEST_HEADER = 10**8  # bytes, safetensors' own limit


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One row of the table.

    path: keys of the parameter in our tree. name: Hugging Face's, with `{}` for the layer where the parameter is stacked.
    shape: in our tree, the layer axis included. transposed: Hugging Face stores the last two axes the other way round.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    transposed: bool

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    @property
    def hf_names(self) -> list[str]:
        return [self.name.format(layer) for layer in range(self.shape[0])] if self.stacked else [self.name]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape


def table(config: ModelConfig) -> list[Tensor]:
    """Every parameter of the decoder: where it is in our tree, and what it is called in a Hugging Face file."""
    c = config
    L, D, F, V = c.num_layers, c.width, c.mlp_width, c.vocab_size
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size

    def layer(path: str, suffix: str, *shape: int) -> Tensor:
        module = path.rpartition("/")[0]
        name = f"model.layers.{{}}.{module.replace('/', '.')}.{suffix}"
        return Tensor(("layers", *path.split("/")), name, (L, *shape), transposed=len(shape) == 2)

    rows = [
        Tensor(("embed_tokens", "embedding"), "model.embed_tokens.weight", (V, D), transposed=False),
        layer("input_layernorm/scale", "weight", D),
        layer("self_attn/q_proj/kernel", "weight", D, q),
        layer("self_attn/k_proj/kernel", "weight", D, kv),
        layer("self_attn/v_proj/kernel", "weight", D, kv),
        layer("self_attn/o_proj/kernel", "weight", q, D),
        layer("post_attention_layernorm/scale", "weight", D),
        layer("mlp/gate_proj/kernel", "weight", D, F),
        layer("mlp/up_proj/kernel", "weight", D, F),
        layer("mlp/down_proj/kernel", "weight", F, D),
        Tensor(("norm", "scale"), "model.norm.weight", (D,), transposed=False),
    ]
    if c.qkv_bias:
        rows += [layer(f"self_attn/{p}_proj/bias", "bias", n) for p, n in (("q", q), ("k", kv), ("v", kv))]
    if c.qk_norm:
        rows += [layer(f"self_attn/{p}_norm/scale", "weight", c.head_size) for p in "qk"]
    if not c.tie_embeddings:
        rows += [Tensor(("lm_head", "kernel"), "lm_head.weight", (D, V), transposed=True)]
    return rows


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that make up the model of a folder.

    Raises:
      FileNotFoundError: there are none, or not all that the index names.
      ValueError: which of them are meant is not clear, or the index cannot be read.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if single.is_file():
            return [single]
        there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise FileNotFoundError(f"{folder}: found {there}, expected {SINGLE} or {INDEX} (no other format is read)")
    content = read_object(index)
    names = list(content["weight_map"].values()) if isinstance(content.get("weight_map"), dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{index}: has no weight_map that names a file for every tensor")
    paths = [folder / name for name in sorted(set(names))]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{folder}: {INDEX} names files that are not there: {', '.join(absent)}")
    if single.is_file() and single not in paths:
        raise ValueError(f"{folder}: holds two models, {SINGLE} and the files that {INDEX} names ({paths[0].name}, ...)")
    return paths


def header(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What a safetensors file says of its tensors, by name: `dtype`, `shape`, `data_offsets`.

    Raises:
      ValueError: it is no such file, or not all of it.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= LARGEST_HEADER:
            raise ValueError(f"{path}: is no safetensors file ({size} bytes that begin with {start!r})")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{path}: is cut off: {size} bytes, of which its header alone needs {length + 8}")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = [(entry["dtype"], tuple(entry["shape"])) for entry in entries.values()]
        assert all(isinstance(kind, str) and all(type(n) is int for n in shape) for kind, shape in shapes)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged ({type(error).__name__}: {error})") from error
    if size != end:
        raise ValueError(f"{path}: {'is cut off' if size < end else 'has data behind its end'}: {size} bytes, expected {end}")
    return entries


def mismatches(folder: pathlib.Path, config: ModelConfig) -> list[str]:
    """How the tensors in a folder's files differ from those of the model that its config.json describes.

    Raises:
      FileNotFoundError, ValueError: see `weight_files` and `header`.
    """
    found: dict[str, tuple[str, str, tuple[int, ...]]] = {}  # name: file, type, shape
    problems = []
    for path in weight_files(folder):
        for name, entry in header(path).items():
            if name in found:
                problems.append(f"{name}: stands in {found[name][0]} and in {path.name}")
            found[name] = path.name, entry["dtype"], tuple(entry["shape"])
    expected = {name: row.hf_shape for row in table(config) for name in row.hf_names}
    problems += [f"{name}: missing, expected {shape}" for name, shape in expected.items() if name not in found]
    extra = {name for name in found if name not in expected and not name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings:  # our own exports repeat the embedding under this name
        extra.discard("lm_head.weight")
    problems += [f"{name} ({found[name][0]}): found {found[name][2]}, expected no such tensor" for name in sorted(extra)]
    for name, wanted in expected.items():
        file, kind, shape = found.get(name, ("", READABLE[0], wanted))
        if shape != wanted or kind not in READABLE:
            problems.append(f"{name} ({file}): found {kind} {shape}, expected {'/'.join(READABLE)} {wanted}")
    return problems
