"""A small ChatML tokenizer in a Hugging Face folder: one id a byte, and, if asked for, a BOS that it adds itself."""

import json
import pathlib

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEMPLATE = (
    "{{ bos }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write(folder: pathlib.Path, adds_bos: bool = False, template_bos: str = "", eos_ids=None) -> str:
    """Writes the folder; `template_bos` is text that the chat template starts with. Returns its path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    outer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>" if adds_bos else None, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    outer.chat_template = TEMPLATE.replace("{{ bos }}", template_bos)
    outer.save_pretrained(folder)
    if eos_ids is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    return str(folder)
