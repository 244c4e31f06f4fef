"""Tokenizers from a local Hugging Face folder, the ids that have a token, those that end a response, and prompts with one BOS."""

import datetime
import functools
import json
import logging
import os
import pathlib
from typing import Any, NamedTuple

from deepgrpo.types import Ids, as_ids

Tokenizer = Any  # transformers.PreTrainedTokenizerBase, without importing transformers

END_TOKEN_FILES = ("generation_config.json", "config.json")

log = logging.getLogger(__name__)


class Vocabulary(NamedTuple):
    """Ids that have a token: those below `bound` but `holes`. No other id is ever sampled.

    The bound is the largest id + 1, not a count: vocabularies have holes, and added tokens may lie above them.
    """

    bound: int
    holes: tuple[int, ...] = ()

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < self.bound and number not in self.holes


class Opened(NamedTuple):
    """What a run needs of a model's tokenizer. stop_ids: see `stop_ids`."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    vocabulary: Vocabulary


def load_tokenizer(path: str, began: str = "") -> Tokenizer:
    """The tokenizer of a local folder. Nothing is fetched.

    Args:
      began: ISO time that a chat template is told when it asks for the date, so that a run's prompts are the same on any day.
        Only what renders no chat template may leave it out.

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

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if began:
        clock = datetime.datetime.fromisoformat(began).strftime
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, strftime_now=clock)
    return tokenizer


def open_tokenizer(path: str, began: str) -> Opened:
    """The tokenizer of a model folder with what a run must know of it; says in the log which tokens end a response."""
    tokenizer = load_tokenizer(path, began)
    opened = Opened(tokenizer, stop_ids(path, tokenizer), vocabulary(tokenizer))
    log.info("end tokens: %s", shown(opened.stop_ids, tokenizer))
    return opened


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Ids that the tokenizer has a token for, added tokens included."""
    ids = set(tokenizer.get_vocab().values())
    bound = max(ids) + 1
    return Vocabulary(bound, tuple(sorted(set(range(bound)) - ids)) if len(ids) < bound else ())


def stop_ids(path: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response: those of generation_config.json in their order, then those that config.json and the tokenizer add.

    Raises:
      ValueError: none of them names any, or a file names something else than ids.
    """
    ids: list[int] = []
    for name in END_TOKEN_FILES:
        file = pathlib.Path(path) / name
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        given = named if isinstance(named, list) else [] if named is None else [named]
        if wrong := [number for number in given if type(number) is not int or number < 0]:
            raise ValueError(f"{file}: eos_token_id holds {wrong[0]!r}, expected a token id or a list of them")
        ids += given
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    if not ids:
        raise ValueError(f"{path}: no end token in {', '.join(END_TOKEN_FILES)} or the tokenizer; responses could never end")
    return tuple(dict.fromkeys(ids))


def shown(ids: tuple[int, ...], tokenizer: Tokenizer) -> str:
    """Ids with their tokens, for messages."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(number)} ({number})" for number in ids)


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
