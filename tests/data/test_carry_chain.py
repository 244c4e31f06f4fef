"""The carry-chain task: splits, solutions, the flaw, and the tokenizer folder."""

import collections
import itertools
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from deepgrpo.data import carry_chain

QUESTION = "57a6b9c8d7e9f6g8h7i9j6=?"
RIGHT = "a+6=63\nb+9=72\nc+8=80\nd+7=87\ne+9=96\nf+6=02\ng+8=10\nh+7=17\ni+9=26\nj+6=32\n####32"


def test_splits_are_fixed_disjoint_and_grow_at_the_end():
    train, held_out = carry_chain.problems("train", 3000), carry_chain.problems("heldout", 500)
    questions = {row["question"] for row in train}
    assert len(questions) == 3000 and len({row["question"] for row in held_out}) == 500
    assert not questions & {row["question"] for row in held_out}
    assert carry_chain.problems("train", 10) == train[:10]
    assert train[0] == {"question": "47a7b7c6d7e8f7g9h8i6j9=?", "answer": "21", "data_source": "carry_chain"}
    with pytest.raises(ValueError, match=r"one of \['heldout', 'train'\], got 'test'"):
        carry_chain.problems("test", 1)


def test_the_warm_start_never_sees_a_held_out_question():
    held_out = {row["question"] for row in carry_chain.problems("heldout", 2000)}
    assert held_out.isdisjoint(itertools.islice(carry_chain.questions("train", seed=5), 5000))


def test_solution_carries_and_errors():
    assert carry_chain.solution(QUESTION) == RIGHT
    assert carry_chain.hard_steps(QUESTION) == [True, True, True, False, True, True, True, False, True, True]
    with pytest.raises(ValueError, match="not a carry_chain question: '7a6=.'"):
        carry_chain.solution("7a6=?")


def test_final_values_are_uniform_and_most_steps_carry():
    rows = carry_chain.problems("train", 4000)
    counts = collections.Counter(row["answer"] for row in rows)
    assert len(counts) == 100 and max(counts.values()) < 80  # mean 40, standard deviation 6.3
    assert abs(np.mean([carry_chain.hard_steps(row["question"]) for row in rows]) - 0.75) < 0.01


def test_sloppiness_is_forgotten_carries_and_nothing_else():
    rng = np.random.default_rng(0)
    assert carry_chain.sloppy_solution(QUESTION, 0.0, rng) == RIGHT
    every = carry_chain.sloppy_solution("98a9b6c8d7e9f6g8h7i9j6=?", 1.0, rng)
    assert every.startswith("a+9=97\nb+6=93\nc+8=91\nd+7=98\n") and every.endswith("j+6=93\n####93")
    rows = carry_chain.problems("train", 2000)
    first = [carry_chain.sloppy_solution(row["question"], 0.7, rng)[:7] for row in rows]
    right = [carry_chain.solution(row["question"])[:7] for row in rows]
    carried = np.array([carry_chain.hard_steps(row["question"])[0] for row in rows])
    same = np.array([a == b for a, b in zip(first, right, strict=True)])
    assert same[~carried].all() and abs(same[carried].mean() - 0.3) < 0.04


@pytest.mark.parametrize("model_type", [None, "qwen2"])  # beside a Qwen2 model, transformers makes a Qwen2Tokenizer of anything
def test_tokenizer_folder_works_with_transformers(tmp_path, model_type):
    carry_chain.build_tokenizer(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(carry_chain.VOCABULARY) == 43 < carry_chain.EMBEDDING_ROWS
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert [tokenizer.decode([i]) for i in range(43)] == list(carry_chain.VOCABULARY)
    assert tokenizer("".join(carry_chain.VOCABULARY))["input_ids"] == list(range(43))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer.decode(prompt) == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert len(prompt) == 32
    response = tokenizer(RIGHT)["input_ids"]
    assert len(response) == 73 and tokenizer.decode(response) == RIGHT
    assert tokenizer.decode(response + [2], skip_special_tokens=True) == RIGHT
    for n in range(len(RIGHT)):  # a prefix of the text is a prefix of the ids, unless it cuts the marker
        if RIGHT[:n].count("#") in (0, 4):
            assert tokenizer(RIGHT[:n])["input_ids"] == response[: len(tokenizer(RIGHT[:n])["input_ids"])]
