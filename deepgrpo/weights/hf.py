"""Hugging Face weights in and out, by one table.

Reading takes from each safetensors file only the slices that a device's shard needs; writing streams one tensor of one layer
at a time. Neither ever holds the whole model on one device, and torch is not involved.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import safe_open

from deepgrpo.config.errors import ConfigError
from deepgrpo.model.config import ModelConfig, read_object
from deepgrpo.weights import files

#### Which tensors a model has, by one table, and which a folder holds, by the headers of its files

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


SHARD_BYTES = 5 * 10**9  # default size limit of one safetensors file
_WRITABLE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Files that make up a tokenizer, besides the chat templates (*.jinja).
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


#### reading


def load(folder: str | os.PathLike, dtype: Any = jnp.float32, shardings: Any = None) -> dict:
    """Reads a Hugging Face folder into the tree that `Transformer` initialises.

    Args:
      folder: config.json with model.safetensors, or with model.safetensors.index.json and its files.
      dtype: of every parameter returned.
      shardings: a tree of `jax.sharding.Sharding` like the parameters; None puts everything on the default device.

    Raises:
      FileNotFoundError: no safetensors there.
      ConfigError: a weight is not finite.
      ValueError: tensors are missing, unknown, or of an unexpected shape or type; every one of them is listed.
    """
    folder = pathlib.Path(folder)
    config = ModelConfig.from_hf(folder)
    with contextlib.ExitStack() as stack:
        slices = _open(folder, config, stack)
        params: dict = {}
        for row in table(config):
            if shardings is None:
                sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            else:
                sharding = _leaf(shardings, row.path)
            read = functools.partial(_read, row, slices, jnp.dtype(dtype))
            node = functools.reduce(lambda node, key: node.setdefault(key, {}), row.path[:-1], params)
            node[row.path[-1]] = _place(row.shape, sharding, read)
    return params


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in a file, not read yet."""

    file: pathlib.Path
    slice: Any


def _open(folder: pathlib.Path, config: ModelConfig, stack: contextlib.ExitStack) -> dict[str, _Stored]:
    """Opens the folder's files and returns its tensors by name, after checking names, shapes and types."""
    if problems := mismatches(folder, config):
        raise ValueError(f"{folder}: the weights do not fit config.json:\n  " + "\n  ".join(problems))
    found = {}
    for path in weight_files(folder):
        file = stack.enter_context(safe_open(path, framework="numpy"))
        found |= {name: _Stored(path, file.get_slice(name)) for name in file.keys()}
    if config.tie_embeddings and "lm_head.weight" in found and not _same(found):
        raise ValueError(
            f"{folder}: lm_head.weight ({found['lm_head.weight'].file.name}): differs from model.embed_tokens.weight although "
            "config.json says tie_word_embeddings true; set it to false to keep both"
        )
    return found


def _same(found: dict[str, _Stored]) -> bool:
    """Whether lm_head and embedding are equal, compared in blocks of rows."""
    head, embedding = found["lm_head.weight"].slice, found["model.embed_tokens.weight"].slice
    rows, block = embedding.get_shape()[0], 8192
    if head.get_shape() != embedding.get_shape():
        return False
    blocks = [slice(start, min(start + block, rows)) for start in range(0, rows, block)]
    return all(np.array_equal(head[part], embedding[part]) for part in blocks)


def _read(row: Tensor, stored: dict[str, _Stored], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` of a parameter, as an array of `dtype`, reading nothing else from the files.

    Raises:
      ConfigError: a value is not finite; names the tensor and its file.
    """
    index = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, row.shape, strict=True))
    inner = index[1:] if row.stacked else index

    def one(name: str) -> np.ndarray:
        part = stored[name].slice[inner[::-1] if row.transposed else inner]
        part = np.ascontiguousarray(part.T if row.transposed else part, dtype)
        if not np.isfinite(part).all():
            wrong, file = int((~np.isfinite(part)).sum()), stored[name].file
            raise ConfigError(
                f"model: {file}: {name} holds NaN or infinity in {wrong} of {part.size} values\n   -> the file is damaged, "
                "or the training that wrote it diverged: get it again, or take an earlier checkpoint"
            )
        return part

    if not row.stacked:
        return one(row.name)
    layers = range(row.shape[0])[index[0]]
    out = np.empty((len(layers), *(part.stop - part.start for part in inner)), dtype)
    for i, layer in enumerate(layers):
        out[i] = one(row.name.format(layer))
    return out


def _place(shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable) -> jax.Array:
    """A sharded array whose shards are read one at a time: the host never holds more than one of them, nor one twice."""
    shards, replicas = [], {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        key = str(index)
        if key not in replicas:
            replicas[key] = jax.device_put(read(index), device)
        shards.append(jax.device_put(replicas[key], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


#### writing


def save(
    params: dict,
    config: ModelConfig,
    folder: str | os.PathLike,
    dtype: Any = jnp.bfloat16,
    tokenizer_from: str | os.PathLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face folder that transformers and vLLM load: config, safetensors, and the tokenizer of another folder.

    The folder appears at once and complete. `lm_head.weight` is always written, as a copy of the embedding where they are tied:
    a running vLLM that reloads weights keeps its old head otherwise. Where the parameters' shards
    lie in several processes, each of these calls this.

    Args:
      params: the tree that `Transformer` initialises, of JAX arrays, sharded or not, or of what NumPy takes for an array.
      folder: must not exist, or be empty.
      dtype: of the file: float32, bfloat16 or float16.
      tokenizer_from: folder whose tokenizer files, generation_config.json and special token ids are taken over.
      shard_bytes: a file larger than this is split; the index then names the parts.

    Raises:
      ValueError: parameters that the config does not describe, or no tokenizer in `tokenizer_from`.
      FileExistsError: `folder` holds something already.
    """
    folder, kind = pathlib.Path(folder), jnp.dtype(dtype).name
    if kind not in _WRITABLE:
        raise ValueError(f"dtype is {kind}, expected one of {', '.join(_WRITABLE)}")
    _check(params, config)
    source = None if tokenizer_from is None else pathlib.Path(tokenizer_from)
    primary = jax.process_index() == 0
    with files.new_folder(folder) if primary else contextlib.nullcontext() as temporary:
        if primary:
            hf = config.to_hf_dict() | {"torch_dtype": kind}
            if source is not None:
                _copy_tokenizer(source, temporary)
                hf |= _token_ids(source)
            _write_json(temporary / "config.json", hf)
        _write_weights(params, config, temporary, kind, shard_bytes)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        multihost_utils.sync_global_devices(f"hf.save {folder}")


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One tensor of a file that is being written; `fetch` brings it to the host."""

    name: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]


def _write_weights(params: dict, config: ModelConfig, folder: pathlib.Path | None, kind: str, shard_bytes: int) -> None:
    """Writes the safetensors files; without a folder it only takes part in the other processes' transfers."""
    itemsize = jnp.dtype(kind).itemsize
    groups: list[list[_Piece]] = [[]]
    room = shard_bytes
    for piece in _pieces(params, config, kind):
        size = math.prod(piece.shape) * itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(piece)
        room -= size
    weight_map = {}
    for i, group in enumerate(groups):
        name = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        _write_file(None if folder is None else folder / name, group, kind)
        weight_map |= {piece.name: name for piece in group}
    if len(groups) > 1 and folder is not None:
        total = sum(math.prod(piece.shape) for group in groups for piece in group) * itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _pieces(params: dict, config: ModelConfig, kind: str) -> Iterator[_Piece]:
    for row in table(config):
        leaf = _leaf(params, row.path)
        for layer, name in enumerate(row.hf_names):
            yield _Piece(
                name, row.hf_shape, functools.partial(_fetch, leaf, layer if row.stacked else None, row.transposed, kind)
            )
    if config.tie_embeddings:
        leaf = params["embed_tokens"]["embedding"]
        yield _Piece("lm_head.weight", tuple(leaf.shape), functools.partial(_fetch, leaf, None, False, kind))


def _write_file(path: pathlib.Path | None, pieces: list[_Piece], kind: str) -> None:
    """Streams tensors into one safetensors file: 8 bytes of header length, a JSON header, then the data in the header's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        end = offset + math.prod(piece.shape) * jnp.dtype(kind).itemsize
        header[piece.name] = {"dtype": _WRITABLE[kind], "shape": piece.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with contextlib.nullcontext() if path is None else open(path, "wb") as file:
        if file:
            file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            data = np.ascontiguousarray(piece.fetch())  # every process takes part, the first one writes
            if file:
                file.write(data.view(np.uint8).data)


@functools.partial(jax.jit, static_argnames=("transposed", "kind"))
def _prepare(x: jax.Array, layer: jax.Array | None, transposed: bool, kind: str) -> jax.Array:
    x = x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
    return (x.T if transposed else x).astype(kind)


def _fetch(leaf: jax.Array, layer: int | None, transposed: bool, kind: str) -> np.ndarray:
    """One tensor on the host, cut out, turned and rounded where it is; shards on devices are put together on the host."""
    if not isinstance(leaf, jax.Array):
        x = np.asarray(leaf)
        x = x if layer is None else x[layer]
        return (x.T if transposed else x).astype(kind, copy=False)
    x = _prepare(leaf, layer, transposed, kind)
    return np.asarray(x) if x.is_fully_addressable else np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _check(params: dict, config: ModelConfig) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
    expected = {"/".join(row.path): row.shape for row in table(config)}
    wrong = [f"{name}: found {found.get(name)}, expected {shape}" for name, shape in expected.items() if found.get(name) != shape]
    wrong += [f"{name}: found {shape}, expected no such parameter" for name, shape in found.items() if name not in expected]
    if wrong:
        raise ValueError("the parameters do not fit the model's config:\n  " + "\n  ".join(wrong))


def _copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> None:
    paths = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not paths:
        raise ValueError(f"{source}: no tokenizer there, expected one of {', '.join(_TOKENIZER_FILES)}")
    for path in [*paths, *source.glob("*.jinja"), source / "generation_config.json"]:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _token_ids(source: pathlib.Path) -> dict[str, Any]:
    """The special token ids of the folder's config.json, else of its generation_config.json."""
    ids: dict[str, Any] = {}
    for name in ("generation_config.json", "config.json"):
        if (source / name).is_file():
            content = json.loads((source / name).read_text(encoding="utf-8"))
            ids |= {key: content[key] for key in _TOKEN_IDS if content.get(key) is not None}
    return ids


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)
