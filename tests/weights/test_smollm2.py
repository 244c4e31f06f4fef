"""Real weights: SmolLM2-135M-Instruct through our decoder and through transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.weights import hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def prompts(smollm2):
    """Two prompts in the model's chat template, as a right-padded int32[2, T] and the true lengths."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    questions = ["What is the capital of France?", "Ann has 12 apples and buys 30 more. How many apples has she now?"]
    turns = [[{"role": "user", "content": question}] for question in questions]
    ids = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]
    tokens = np.zeros((2, max(map(len, ids))), np.int32)
    for row, sequence in zip(tokens, ids, strict=True):
        row[: len(sequence)] = sequence
    return tokens, [len(sequence) for sequence in ids], tokenizer


def forward(folder):
    model = Transformer(ModelConfig.from_hf(folder), dtype=jnp.float32)

    @jax.jit
    def logits(params, tokens, segments):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = model.apply({"params": params}, tokens, positions, segments)
        return model.apply({"params": params}, hidden, method=Transformer.logits)

    return logits


def test_logits_equal_transformers(smollm2, prompts, tmp_path):
    tokens, lengths, _ = prompts
    segments = (np.arange(tokens.shape[1]) < np.array(lengths)[:, None]).astype(np.int32)
    params = hf.load(smollm2)
    ours = np.asarray(forward(smollm2)(params, tokens, segments))
    hf.save(params, ModelConfig.from_hf(smollm2), tmp_path / "out", jnp.bfloat16, tokenizer_from=smollm2)
    for folder in (smollm2, tmp_path / "out"):  # the file is bfloat16, so that writing it back loses nothing
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row, length in enumerate(lengths):
            with torch.no_grad():
                wanted = theirs(torch.tensor(tokens[row : row + 1, :length], dtype=torch.long)).logits[0].numpy()
            error = np.abs(ours[row, :length] - wanted)
            # Its residual stream reaches 4,400, so float32 itself is worth about 1e-4 here: transformers' float32 logits are
            # 9e-5 from its float64 ones, and 8e-5 from those of its other attention implementation.
            assert error.max() <= 2e-4 and (error > 1e-4).mean() <= 2e-4
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (smollm2 / "tokenizer.json").read_bytes()


def test_it_knows_the_capital_of_france(smollm2, prompts):
    tokens, lengths, tokenizer = prompts
    logits, params, n = forward(smollm2), hf.load(smollm2), lengths[0]
    row = np.zeros((1, n + 8), np.int32)
    row[0, :n] = tokens[0, :n]
    for i in range(n, n + 8):
        row[0, i] = np.asarray(logits(params, row, np.ones_like(row)))[0, i - 1].argmax()
    assert tokenizer.decode(row[0, n:]) == "The capital of France is Paris.<|im_end|>"
