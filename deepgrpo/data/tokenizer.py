"""Tokenizers from a local Hugging Face folder, the ids that have a token, those that end a response, and prompts with one BOS."""

import datetime
import json
import logging
import os
import pathlib
import re
from typing import Any, NamedTuple

from deepgrpo.model.config import read_object
from deepgrpo.types import Ids, as_ids

Tokenizer = Any  # transformers.PreTrainedTokenizerBase, without importing transformers

CLOCK, CLOCK_END = "{% macro strftime_now(format) %}", "{% endmacro %}\n"
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
      ValueError: its chat template is no text.
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
    template = tokenizer.chat_template
    if not isinstance(template, str | dict | None):
        raise ValueError(f"{path}: chat_template is {template!r}, expected text")
    if began and isinstance(template, dict):
        tokenizer.chat_template = {name: at_time(text, began) for name, text in template.items()}
    elif began and template:
        tokenizer.chat_template = at_time(template, began)
    return tokenizer


def at_time(template: str, time: str) -> str:
    """The chat template for whose `strftime_now` it is always `time`, in ISO; others are returned as they are.

    transformers lends templates the real clock and hands them no other function, so one written in Jinja takes its place, which
    knows the directives that the template writes down. The newline behind it is not printed, so what follows stays as it was.
    """
    if template.startswith(CLOCK):
        template = template.partition(CLOCK_END)[2]
    if "strftime_now" not in template:
        return template
    clock = datetime.datetime.fromisoformat(time)
    directives = sorted(set(re.findall(r"%[-_0^#]?[a-zA-Z%]", template)))
    values = json.dumps([[directive, clock.strftime(directive)] for directive in directives], ensure_ascii=False)
    replaced = f"{{% for a, b in {values} %}}{{% set made.text = made.text.replace(a, b) %}}{{% endfor %}}{{{{ made.text }}}}"
    return f"{CLOCK}{{% set made = namespace(text=format) %}}{replaced}{CLOCK_END}{template}"


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
    ids = named_end_tokens(path)
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    if not ids:
        raise ValueError(f"{path}: no end token in {', '.join(END_TOKEN_FILES)} or the tokenizer; responses could never end")
    return tuple(dict.fromkeys(ids))


def named_end_tokens(path: str) -> list[int]:
    """Those that the folder's files name. Raises ValueError, naming the file: something else than ids stands there."""
    ids: list[int] = []
    for name in END_TOKEN_FILES:
        file = pathlib.Path(path) / name
        named = read_object(file).get("eos_token_id") if file.is_file() else None
        given = named if isinstance(named, list) else [] if named is None else [named]
        if wrong := [number for number in given if type(number) is not int or number < 0]:
            raise ValueError(f"{file}: eos_token_id holds {wrong[0]!r}, expected a token id or a list of them")
        ids += given
    return ids


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
