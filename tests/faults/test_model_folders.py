"""Damaged model folders: each is named in one list, with file and remedy, before anything is compiled; odd whole ones load."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from deepgrpo import config as config_lib
from deepgrpo.data import dataset
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.preflight import inputs as preflight
from deepgrpo.preflight import rules
from tests.conftest import ROOT
from tests.faults.damage import (
    INDEX,
    WEIGHTS,
    add_token,
    config,
    copied,
    cut,
    halve,
    keys,
    link,
    prepend,
    remove,
    rename,
    settings,
    several,
    sharded,
    template,
    tensors,
    tokens,
    write,
)

NO_TEACHER = "--config.teacher.enabled=false"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1236184\n"
SAYS = "{{ messages[-1].content }}"
NO_SYSTEM = "{% if messages[0]['role'] == 'user' %}{{ raise_exception('System role required') }}{% endif %}"


DAMAGED = {  # what was done to the demo's student, what the list says of it, and a part of its remedy
    "pointer of weights": (write(WEIGHTS, POINTER), f"{WEIGHTS}: is a Git LFS pointer", f"get {WEIGHTS} again"),
    "pointer of the tokenizer": (write("tokenizer.json", POINTER), "tokenizer.json: is a Git LFS pointer", "git lfs pull"),
    "pointer of config": (write("config.json", POINTER), "config.json: is a Git LFS pointer", "hf download"),
    "pointer of a shard": (several(sharded, write("model-2.safetensors", POINTER)), "model-2.safetensors: is a Git LFS", "again"),
    "page": (write("tokenizer.json", "<!DOCTYPE html><html>404"), "tokenizer.json: is a web page", "again"),
    "empty weights": (write(WEIGHTS, ""), f"{WEIGHTS}: is empty (0 bytes)", "again"),
    "empty generation config": (write("generation_config.json", ""), "generation_config.json: is empty", "again"),
    "half the weights": (cut(WEIGHTS, 618092), "is cut off: 618092 bytes, expected 1236184", "again"),
    "half a header": (cut(WEIGHTS, 900), "is cut off: 900 bytes, of which its header alone needs", "again"),
    "longer": (lambda f: open(f / WEIGHTS, "ab").write(b"0000"), "has data behind its end", "again"),
    "zeros": (write(WEIGHTS, bytes(5000)), "is no safetensors file (5000 bytes", "again"),
    "torch.save": (write(WEIGHTS, b"PK\x03\x04" + bytes(99)), "is a zip archive", "again"),
    "damaged header": (write(WEIGHTS, b"\x10" + bytes(7) + b"{'not': 'JSON'} "), "its header is damaged", "again"),
    "half of config": (cut("config.json", 99), "config.json: cannot be read as JSON", "again"),
    "list as config": (write("config.json", "[]"), "holds a JSON list, expected an object", "again"),
    "half of tokenizer": (cut("tokenizer.json", 999), "tokenizer.json: cannot be read as JSON", "again"),
    "empty tokenizer": (write("tokenizer.json", "{}"), "the tokenizer in", "get tokenizer.json and tokenizer_config.json"),
    "format of another tokenizer": (tokens(lambda c: c["model"].update(vocab=[1])), "cannot be loaded", "get tokenizer.json"),
    "link to nowhere": (link(WEIGHTS, "/nowhere/blob"), "is a link to /nowhere/blob, where no", "again"),
    "a mark before JSON": (prepend("config.json", b"\xef\xbb\xbf"), "cannot be read as JSON", "again"),
    "absent shard": (lambda f: sharded(f, drop=True), "lacks model-2.safetensors", "hf download"),
    "index without a map": (write(INDEX, "{}"), f"{INDEX}: has no weight_map", "remove what is not meant"),
    "two models": (lambda f: several(write(INDEX, ""), lambda f: shutil.copy(f / WEIGHTS, f / "keep"), sharded)(f)
                   and (f / "keep").rename(f / WEIGHTS), "holds two models", "remove what is not meant"),
    "absent tensor": (tensors(lambda w: w.pop("model.norm.weight") is None), "model.norm.weight: missing", "of one model"),
    "foreign tensor": (tensors(lambda w: w.update(extra=np.ones(3))), "extra (model.safetensors): found (3,)", "of one model"),
    "another shape": (tensors(halve), "found F32 (40, 128), expected F32/F16/BF16 (48, 128)", "vocab_size"),
    "whole numbers": (tensors(lambda w: {n: x.astype(np.int8) for n, x in w.items()}), "found I8", "quantised"),
    "wrapped names": (tensors(lambda w: {f"base_model.model.{n}": x for n, x in w.items()}), "and 47 more", "merge"),
    "compiled": (tensors(lambda w: {f"_orig_mod.{n}": x for n, x in w.items()}), "and 47 more", "begin with _orig_mod."),
    "no head": (several(config(tie_word_embeddings=False), tensors(lambda w: w.pop("lm_head.weight") is None)),
                "lm_head.weight: missing", "tie_word_embeddings"),
    "doubles": (tensors(lambda w: {n: x.astype(np.float64) for n, x in w.items()}), "found F64", "as bfloat16"),
    "folder for a file": (several(remove("config.json"), lambda f: (f / "config.json").mkdir()), "lacks config.json", "hf down"),
    "other layers": (config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight: missing", "of one model"),
    **{family: (config(model_type=family), f"model_type is '{family}', expected one of llama, qwen2, qwen3", "Qwen2.5-1.5B")
       for family in ("gemma3_text", "mistral", "phi3", "qwen3_moe", "qwen2_5_vl", "gpt_oss", "olmo2")},
    **{f"quantised by {method}": (config(quantization_config={"quant_method": method}), method, "dequantise")
       for method in ("awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")},
    "text for a number": (config(vocab_size="48"), "vocab_size is '48', expected a whole number above 0", "family"),
    "negative": (config(num_hidden_layers=-1), "num_hidden_layers is -1", "family"),
    "rope as text": (config(rope_scaling="yarn"), "rope_scaling is 'yarn', expected a mapping", "family"),
    "unknown rope": (config(rope_scaling={"type": "longrope", "factor": 2}), "rope_type is 'longrope'", "family"),
    "heads": (config(num_attention_heads=3), "num_attention_heads is 3, expected a multiple of", "family"),
    "small embedding": (several(config(vocab_size=40), tensors(halve)), "ids up to 42, the embedding 40 rows", "resize_token"),
    "token above": (add_token(99), "has ids up to 99, the embedding 48 rows", "the tokenizer that the model was trained with"),
    "token of two numbers": (add_token(99, in_vocabulary=False), "numbers '<more>' 99, loaded it is 43", "the same id"),
    "end token above": (keys("generation_config.json", eos_token_id=47), "the end token 47 is no token", "correct eos_token_id"),
    "end token in a hole": (several(add_token(47), config(eos_token_id=[2, 45])), "the end token 45 is no token", "config.json"),
    "end token as text": (config(eos_token_id="<|im_end|>"), "eos_token_id holds '<|im_end|>', expected a token id", "the ids"),
    "short context": (config(max_position_embeddings=64), "rollout.max_model_len=112 is more than the 64 positions",
                      "--config.rollout.max_model_len=64"),
    "short context, stretched": (config(max_position_embeddings=32, rope_scaling={"type": "linear", "factor": 2.0}),
                                 "more than the 64 positions that", "rope_scaling"),
    "no template": (template(None), "the tokenizer has no chat template", "--config.data.template"),
    "template without a role": (template(NO_SYSTEM), "TemplateError: System role required", "--config.data.template"),
    "template that is cut": (template("{% for m in messages %}"), "TemplateSyntaxError", "mend the chat template"),
    "template without the question": (template("hello"), "leaves out what the user says", "mend the chat template"),
    "template that is a number": (template(7), "chat_template is 7, expected text", "tokenizer_config.json"),
    "tokenizer of another text": (tokens(lambda c: [c["model"]["vocab"].pop(x) for x in "0123456789abcdefghij"]),
                                  "has no token for", "the tokenizer of this model"),
    "template at random": (template(SAYS + "{{ range(1000) | random }}"), "another prompt each time", "mend the chat template"),
    "PyTorch": (rename(WEIGHTS, "pytorch_model.bin"), "it holds weights in PyTorch's own format (pytorch_model.bin)", "save_pre"),
    "GGUF": (rename(WEIGHTS, "model-q4.gguf"), "it holds GGUF weights of llama.cpp (model-q4.gguf)", "as safetensors"),
    "adapter": (several(remove(WEIGHTS), write("adapter_config.json", '{"base_model_name_or_path": "Qwen/Q"}')),
                "it holds a LoRA adapter without the model", "merge it into its base Qwen/Q"),
    "pth": (rename(WEIGHTS, "consolidated.00.pth"), "it holds weights of Meta's", "as safetensors"),
    "other name": (rename(WEIGHTS, "policy.safetensors"), "it holds safetensors of other names", "name them model.safetensors"),
    "deeper": (several(*(rename(name, f"final/{name}") for name in (WEIGHTS, "config.json", "tokenizer.json"))),
               "it holds a model one folder deeper", "/final"),
    "Orbax": (several(remove(WEIGHTS), write("_METADATA", "{}")), "it holds an Orbax checkpoint", "export it"),
    "a run": (several(remove(WEIGHTS), lambda f: (f / "checkpoints/3").mkdir(parents=True),
                       write("checkpoints/3/manifest.json", "{}")),
              "it holds a run of this program", "python -m deepgrpo.export --checkpoint="),
}  # fmt: skip


def refused(path) -> str:
    with pytest.raises(config_lib.ConfigError) as error:
        preflight.check_inputs(settings(path))
    return str(error.value)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_one_list(student, tmp_path, name):
    damage, what, remedy = DAMAGED[name]
    folder = copied(student, tmp_path / "model")
    damage(folder)
    text = refused(folder)
    assert text.startswith("run carry_chain cannot start: 1 problem\n1. model: ") and what in text and str(folder) in text, text
    assert remedy in text.partition("\n   -> ")[2], text
    assert "warm_start" not in text and "its check failed" not in text, text


@pytest.mark.parametrize(
    ("path", "what", "remedy"),
    [
        (
            "Qwen/Qwen2.5-0.5B-Instruct",
            "the name of a model at Hugging Face",
            "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir",
        ),
        ("https://huggingface.co/Qwen/Qwen3-4B", "the name of a model at Hugging Face", "hf download Qwen/Qwen3-4B --local-dir"),
        ("STUDENT/model.safetensors", "is a file, expected the folder of a model", "--config.model.path="),
        ("STUDENT/nowhere", "does not exist", "--config.model.path"),
        ("STUDENTS", "does not exist; did you mean STUDENT?", "--config.model.path"),
        ("models/mine", "folder models/mine does not exist", "--config.model.path"),
        ("", "(empty) does not exist", "--config.model.path"),
        ("~/models/mine", "folder ~/models/mine does not exist", "write it out: --config.model.path=/"),
    ],
)
def test_a_path_that_is_no_folder(student, path, what, remedy):
    text = refused(path.replace("STUDENT", str(student)))
    assert what.replace("STUDENT", str(student)) in text and remedy in text and "warm_start" not in text, text


def test_the_experiments_own_path_says_how_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = rules.from_command_line(["train", f"--config={ROOT}/configs/carry_chain.py"])[0]
    with pytest.raises(config_lib.ConfigError, match="-> python -m deepgrpo.warm_start"):
        preflight.check_inputs(own)


def test_messages_that_the_template_refuses_are_found_before_the_run(student, tmp_path):
    folder = copied(student, tmp_path / "model")
    template("{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}{% endfor %}" + SAYS)(folder)
    row = {"data_source": "MATH", "reward_model": {"ground_truth": "2"}}
    turns = [[{"role": role, "content": "1 + 1"} for role in roles] for roles in (("user",), ("system", "user"))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"prompt": messages}) + "\n" for messages in turns))
    wrong = settings(folder, f"--config.data.train=verl:{tmp_path}/rows.jsonl", "--config.curriculum.failures=all", NO_TEACHER)
    with pytest.raises(config_lib.ConfigError, match="refuses messages of the roles system, user: TemplateError: no system role"):
        preflight.check_inputs(wrong)
    with pytest.raises(dataset.DataError, match="rows.jsonl, row 1: the chat template refuses"):
        dataset.load_problems(wrong.data.train[0], load_tokenizer(str(folder)), "chat", 99)


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_a_program_ends_with_the_list_and_no_traceback(student, tmp_path, program):
    folder = copied(student, tmp_path / "model")
    cut(WEIGHTS, 618092)(folder)
    argv = [sys.executable, "-m", f"deepgrpo.{program}", "--config=configs/carry_chain.py", f"--config.model.path={folder}"]
    done = subprocess.run([*argv, f"--config.run_dir={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in text, text
    assert "is cut off: 618092 bytes, expected 1236184\n   -> get model.safetensors again" in text
