"""Tokenizers from a local Hugging Face folder, the ids that end a response, and prompts with exactly one BOS."""

import json
import os
import pathlib
from typing import Any

from deepgrpo.types import Ids, as_ids

Tokenizer = Any  # transformers.PreTrainedTokenizerBase, without importing transformers


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a local folder. Nothing is fetched.

    Raises:
      FileNotFoundError: no such folder, or no tokenizer in it; says which files were expected.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path: no folder {path}. Give a local Hugging Face folder; nothing is downloaded")
    expected = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in expected):
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:20]) or "nothing"
        raise FileNotFoundError(f"{path} holds no tokenizer: expected one of {', '.join(expected)}, found {found}")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its advice to install PyTorch is not for us
    import transformers  # takes seconds, which the check of a configuration must not wait for

    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def stop_ids(path: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response: those of the folder's generation config in their order, then the tokenizer's EOS if it isn't one.

    Raises:
      ValueError: neither names any.
    """
    ids: list[int] = []
    config = pathlib.Path(path) / "generation_config.json"
    if config.is_file():
        named = json.loads(config.read_text()).get("eos_token_id")
        ids += named if isinstance(named, list) else [] if named is None else [named]
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    if not ids:
        raise ValueError(f"{path}: no end token in the tokenizer or in generation_config.json; responses could never end")
    return tuple(dict.fromkeys(ids))


def phantom_start(tokenizer: Tokenizer) -> int:
    """The first id above the tokenizer: embedding rows from here on stand for nothing and are never sampled."""
    return len(tokenizer)


def encode_prompt(text: str, tokenizer: Tokenizer) -> Ids:
    """int32[len]: `text`, special tokens in it recognised, with exactly one BOS if this tokenizer starts its texts with one.

    Templates may or may not hold the BOS, and tokenizers may or may not add it; here neither doubles nor loses it.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    adds_bos = bos is not None and list(tokenizer("", add_special_tokens=True)["input_ids"])[:1] == [bos]
    return as_ids([bos, *ids] if adds_bos and ids[:1] != [bos] else ids)
