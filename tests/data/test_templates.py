"""Templates to the byte, one BOS however a prompt is built, and the ids that end a response."""

import json

import pytest

from deepgrpo.data import templates
from deepgrpo.data.tokenizer import at_time, encode_prompt, load_tokenizer, stop_ids, vocabulary
from tests.data import small_tokenizer

OPEN = "<|im_start|>assistant\n"
EXPECTED = {
    "chat": "<|im_start|>user\n1+1?<|im_end|>\n" + OPEN,
    "gsm8k": '<|im_start|>user\n1+1? Let\'s think step by step and output the final answer after "####".<|im_end|>\n' + OPEN,
    "math_boxed": "<|im_start|>user\n1+1? Let's think step by step and output the final answer within \\boxed{}.<|im_end|>\n"
    + OPEN,
    "qwen_math": "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n1+1?<|im_end|>\n" + OPEN,
    "qwen_chat": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n1+1?<|im_end|>\n" + OPEN,
    "none": "1+1?",
    "few_shot_arithmetic": "<|im_start|>user\n4 + 5 + 3 = ?<|im_end|>\n"
    "<|im_start|>assistant\n4 + 5 = 9\n9 + 3 = 12\n#### 12<|im_end|>\n"
    "<|im_start|>user\n8 + 7 + 6 = ?<|im_end|>\n"
    "<|im_start|>assistant\n8 + 7 = 15\n15 + 6 = 21\n#### 21<|im_end|>\n"
    "<|im_start|>user\n1+1?<|im_end|>\n" + OPEN,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(small_tokenizer.write(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_templates_are_exact(tokenizer, name):
    text = tokenizer.decode(templates.TEMPLATES[name]("1+1?", tokenizer))
    if name == "r1":
        assert text.startswith("A conversation between User and Assistant. The User asks") and text.endswith(
            "</answer>.\nUser: 1+1?\nAssistant: <think>"
        )
    else:
        assert text == EXPECTED[name]


def test_specials_in_a_template_are_single_ids(tokenizer):
    ids = templates.chat("hi", tokenizer)
    assert (ids == 1).sum() == 2 and (ids == 2).sum() == 1 and ids.dtype == "int32"


def test_qwen_math_is_the_published_prompt(tokenizer, data_folder):
    rows = [json.loads(line) for line in (data_folder / "math_lvl3to5_8k_eval.jsonl").read_text().split("\n")[:20]]
    questions = [json.loads(line)["problem"] for line in (data_folder / "math500.jsonl").read_text().split("\n")[:20]]
    for row, question in zip(rows, questions, strict=True):
        assert tokenizer.decode(templates.qwen_math(question, tokenizer)) == row["input"] + "\n"


@pytest.mark.parametrize("template_bos", ["", "<s>"])
def test_exactly_one_bos(tmp_path, template_bos):
    tokenizer = load_tokenizer(small_tokenizer.write(tmp_path, adds_bos=True, template_bos=template_bos))
    by_messages = templates.chat("hi", tokenizer)
    by_text = encode_prompt("<|im_start|>user\nhi<|im_end|>\n" + OPEN, tokenizer)
    with_bos_in_text = encode_prompt("<s><|im_start|>user\nhi<|im_end|>\n" + OPEN, tokenizer)
    assert by_messages.tolist() == by_text.tolist() == with_bos_in_text.tolist()
    assert by_messages[0] == tokenizer.bos_token_id and (by_messages == tokenizer.bos_token_id).sum() == 1
    assert all((templates.TEMPLATES[name]("hi", tokenizer) == tokenizer.bos_token_id).sum() == 1 for name in templates.TEMPLATES)


def test_no_chat_template_is_an_error_that_says_what_to_do(tmp_path):
    tokenizer = load_tokenizer(small_tokenizer.write(tmp_path))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template.*data.template"):
        templates.chat("hi", tokenizer)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, None, (2,)), (0, None, (0, 2)), ([2, 0], None, (2, 0)), (0, [1, 2], (0, 1, 2)), (None, 1, (1, 2))],
)
def test_stop_ids_are_the_union(tmp_path, generation, config, expected):
    path = small_tokenizer.write(tmp_path, eos_ids=generation)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": config}))
    tokenizer = load_tokenizer(path)
    assert stop_ids(path, tokenizer) == expected
    assert vocabulary(tokenizer) == (260, ())
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        stop_ids(path, tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}|", "05 Jun 2025|"),
        ("\nx {{- strftime_now('%-d %B, %H:%M:%S') }}\n", "\nx5 June, 04:32:10"),
        ("  {% if strftime_now is defined %}\n a{% endif %}{{ strftime_now('%A') }}", " aThursday"),
        ("{% set d = strftime_now('%F') %}\n{% macro m() %}{{ d + strftime_now('%a') }}{% endmacro %}{{ m() }}", "2025-06-05Thu"),
        ("{% for m in messages %}{{ m.content }}{{ strftime_now('%y') }}{% endfor %}", "hi25"),
    ],
)  # fmt: skip
def test_a_template_is_told_the_time_at_which_the_run_began(tmp_path, template, expected):
    path = small_tokenizer.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(path, "2025-06-05T04:32:10+00:00")
    assert templates.rendered([{"role": "user", "content": "hi"}], tokenizer) == expected
    tokenizer.chat_template += "{{ messages[0].content }}"
    assert templates.prints_date("chat", tokenizer) and not templates.prints_date("none", tokenizer)
    assert at_time(small_tokenizer.TEMPLATE, "2025-06-05") == small_tokenizer.TEMPLATE  # what asks for no date is left alone


def test_missing_tokenizers_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="expected one of tokenizer.json.*found config.json"):
        load_tokenizer(str(tmp_path))
