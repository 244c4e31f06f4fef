"""The carry-chain task: a running sum modulo 100, one labelled operand a step, every intermediate value written out.

    57a6b9c8d7e9f6g8h7i9j6=?    ->    a+6=63\\nb+9=72\\n...\\nj+6=32\\n####32

A step looks its operand up by its letter, so that it is found by content and not by counting. Final values are uniform on 0..99
and a solution is unique: it can neither be guessed nor reached another way. About three of four steps carry. A *sloppy* solution
forgets a needed carry (57+6=53) and goes on from the wrong value: the flaw that the warm start puts into the student.
"""

import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deepgrpo.rewards.steps import MARKER, MODULUS, parse, running_sums, written
from deepgrpo.rewards.steps import QUESTION as QUESTION  # the graders' arithmetic is the task's, for those who know the task
from deepgrpo.rewards.steps import solution as solution

NAME = "carry_chain"  # its data_source
STEPS = 10
OPERANDS = (6, 7, 8, 9)
LETTERS = "abcdefghijklmnop"  # the first STEPS label operands; the others keep the vocabulary open for longer chains

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = (PAD, START, END, "system", "user", "assistant", MARKER, "\n", " ", *"+-*/=?:;", *"0123456789", *LETTERS)
EMBEDDING_ROWS = 48  # rows above the vocabulary are phantom ids
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SEEDS = {"train": 1, "heldout": 2}
_HELD_OUT_SHARE = 8  # one question in so many is never trained on
_VERSION = 2  # of this file's and the warm start's code: raise it when either makes something else of the same recipe


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """12 hex digits that change with the recipe of a student, with the task, and with the code that makes both."""
    task = (
        _VERSION,
        STEPS,
        MODULUS,
        OPERANDS,
        LETTERS,
        MARKER,
        VOCABULARY,
        EMBEDDING_ROWS,
        CHAT_TEMPLATE,
        _SEEDS,
        _HELD_OUT_SHARE,
    )
    return hashlib.sha256(json.dumps([task, recipe], sort_keys=True).encode()).hexdigest()[:12]


#### Questions


def problems(split: str, count: int) -> list[dict[str, str]]:
    """The first `count` problems of a split: the same for everyone, all different, and never in the other split.

    Returns:
      Rows with `question`, `answer` (the final value, two digits) and `data_source`.

    Raises:
      ValueError: `split` is neither "train" nor "heldout".
    """
    stream = questions(split, seed=0)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        question = next(stream)
        rows.setdefault(question, {"question": question, "answer": running_sums(question)[-1], "data_source": NAME})
    return list(rows.values())


def questions(split: str, seed: int) -> Iterator[str]:
    """An endless stream of random questions of a split. The question itself decides its split, whatever the seed.

    Raises:
      ValueError: `split` is neither "train" nor "heldout".
    """
    if split not in _SEEDS:
        raise ValueError(f"split of {NAME} must be one of {sorted(_SEEDS)}, got {split!r}")
    return _questions(split, np.random.default_rng((_SEEDS[split], seed)))


def _questions(split: str, rng: np.random.Generator) -> Iterator[str]:
    while True:  # in blocks: a draw at a time costs NumPy more than all the rest
        starts = rng.integers(MODULUS, size=256)
        operands = rng.choice(OPERANDS, size=(256, STEPS))
        for start, row in zip(starts.tolist(), operands.tolist(), strict=True):
            question = f"{start:02d}" + "".join(f"{a}{b}" for a, b in zip(LETTERS, row, strict=False)) + "=?"
            if (zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0) == (split == "heldout"):
                yield question


#### Answers


def hard_steps(question: str) -> list[bool]:
    """Which steps of the right solution need a carry."""
    value, steps = parse(question)
    needed = []
    for _, operand in steps:
        needed.append(value % 10 + operand >= 10)
        value = (value + operand) % MODULUS
    return needed


def sloppy_solution(question: str, forget: float, rng: np.random.Generator) -> str:
    """An answer text that forgets each needed carry with probability `forget` and goes on from what it wrote."""
    value, steps = parse(question)
    sums = []
    for (_, operand), forgets in zip(steps, rng.random(len(steps)) < forget, strict=True):
        total = value + operand
        value = (total - 10 if forgets and total // 10 > value // 10 else total) % MODULUS
        sums.append(f"{value:02d}")
    return written(steps, sums)


#### Tokenizer


def build_tokenizer(folder: str | pathlib.Path) -> None:
    """Writes a Hugging Face tokenizer of `VOCABULARY` into `folder`: one id a character, whole words for roles and marker.

    It is a Qwen2 tokenizer without merges, since transformers and vLLM make one of whatever tokenizer lies beside a Qwen2 model.
    Other characters have no id and vanish. eos is `<|im_end|>`, pad `<|endoftext|>`; the chat template is ChatML without a system
    message of its own.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    byte_symbols = {"\n": "\u010a", " ": "\u0120"}  # how byte-level tokenizers spell them
    tokenizer = tokenizers.Tokenizer(models.BPE({byte_symbols.get(token, token): i for i, token in enumerate(VOCABULARY)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (PAD, START, END)
    for token in (token for token in VOCABULARY if len(token) > 1):
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=token in special, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,  # ids must decode to exactly what was encoded
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"eos_token_id": [VOCABULARY.index(END)], "pad_token_id": VOCABULARY.index(PAD)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


SUM = "arithmetic"  # its data_source
SUM_SPLITS = ("train", "heldout")
HELD_OUT_SUMS = 5  # one sum in so many is never trained on
SUMS_IN_PROMPT = frozenset({(4, 5, 3), (8, 7, 6)})  # the worked examples of the few-shot template


def sums(split: str, count: int, digits: int = 2) -> list[dict[str, str]]:
    """The first `count` problems of a split: the same for everyone, all different, and never in the other split.

    Returns:
      Rows with `question`, `answer` and `data_source`.

    Raises:
      ValueError: unknown split, digits outside 1..3, or more problems than there are.
    """
    if split not in SUM_SPLITS or not 1 <= digits <= 3:
        raise ValueError(f"{SUM}: split must be one of {SUM_SPLITS} and digits 1 to 3, got {split!r} and {digits}")
    low, high = (1, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    rng = np.random.default_rng((SUM_SPLITS.index(split), digits))
    chosen: dict[tuple[int, int, int], None] = {}
    for _ in range(200):  # blocks; one-digit sums are few, so that the last ones come late
        for a, b, c in rng.integers(low, high + 1, size=(max(count, 256), 3)).tolist():
            held_out = zlib.crc32(f"{a}+{b}+{c}".encode()) % HELD_OUT_SUMS == 0
            if held_out == (split == "heldout") and (a, b, c) not in SUMS_IN_PROMPT:
                chosen[a, b, c] = None
            if len(chosen) == count:
                return [{"question": f"{a} + {b} + {c} = ?", "answer": str(a + b + c), "data_source": SUM} for a, b, c in chosen]
    raise ValueError(f"{SUM}: the {split} split of {digits}-digit sums has only {len(chosen)} problems, {count} were asked for")
