"""A tiny byte-level BPE tokenizer, like Qwen's and SmolLM2's: an id may hold half a character, a text has many tokenisations."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deepgrpo.teacher.splice import Codec

TEXTS = [
    "The sum is 12 + 30 = 42 units.\n\nSo the answer is 42.",
    "die Größe π ≈ 3.14 € 😀 日本語",
    "a+6=63\nb+9=72\n#### 72",
] * 4


@functools.cache
def _trained() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def byte_level_codec() -> Codec:
    """A codec over a fresh tokenizer instance; ids 0..2 are special, 2 is the stop id."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(_trained()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    return Codec(tokenizer)
