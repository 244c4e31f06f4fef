"""Model folders that a run accepts: what may be a mistake is a warning, and odd ones that are whole load and train."""

import json

import ml_dtypes
import numpy as np
import pytest

from deepgrpo import config as config_lib
from deepgrpo.data import templates
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.preflight import inputs as preflight
from deepgrpo.weights import hf
from tests.faults.damage import (
    add_token,
    config,
    copied,
    keys,
    remove,
    rows,
    settings,
    several,
    sharded,
    sparse,
    template,
    tensors,
    tokens,
    write,
)
from tests.test_train import in_process

CLOSED = (config(eos_token_id=0), keys("generation_config.json", eos_token_id=0))
WARNED = {  # a run starts all the same
    "template closes with another token": (several(*CLOSED, keys("tokenizer_config.json", eos_token="<|endoftext|>")),
                                            "'<|im_end|>' (2), which is none of the end tokens <|endoftext|> (0)"),
    "ordinary end token": (keys("generation_config.json", eos_token_id=[2, 17]), "the end token 0 (17) is an ordinary token"),
    "date": (template("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"), "the chat template prints the date"),
    "texts of the tokenizer": (keys("tokenizer_config.json", model_max_length=64), "tokenizer_config.json says 64"),
    "far fewer tokens": (rows(480), "the embedding 480 rows"),
    "no such characters": (tokens(lambda c: c["model"]["vocab"].pop("=")), "no token for '='"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_what_may_be_meant_is_a_warning(student, tmp_path, name):
    damage, what = WARNED[name]
    folder = copied(student, tmp_path / "model")
    damage(folder)
    warnings = [text for text in preflight.check_inputs(settings(folder)) if text.startswith("model: ")]
    assert any(what in text for text in warnings), warnings


WHOLE = {
    "as it is": lambda f: None,
    "sharded": sharded,
    "without the tied head": tensors(lambda w: w.pop("lm_head.weight") is None),
    "bfloat16": tensors(lambda w: {name: x.astype(ml_dtypes.bfloat16) for name, x in w.items()}),
    "unused files": several(*(write(name, "x") for name in ("README.md", "training_args.bin", "pytorch_model.bin", "q.gguf"))),
    "a hole and a token above it": add_token(47),
    "yarn": config(max_position_embeddings=56, rope_scaling={"type": "yarn", "factor": 2.0}),
    "no generation config": remove("generation_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_odd_folders_that_are_whole_are_accepted_and_load(student, tmp_path, name):
    folder = copied(student, tmp_path / "model")
    WHOLE[name](folder)
    assert not [text for text in preflight.check_inputs(settings(folder)) if text.startswith("model: ")]
    assert hf.load(folder)["norm"]["scale"].shape == (128,)


def test_a_weight_that_is_not_finite_is_named(student, tmp_path):
    folder = copied(student, tmp_path / "model")
    tensors(lambda w: w["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), np.nan))(folder)
    with pytest.raises(
        config_lib.ConfigError, match=r"model.safetensors: model.layers.1.mlp.up_proj.weight holds NaN .* in 1 of"
    ):
        hf.load(folder)


def trained(folder, runs, steps):
    """Runs so many steps with the model of a folder, or goes on with its run; returns the last line of its metrics."""
    lengths = {"data__max_prompt_length": 48, "rollout__max_model_len": 128, "learner__buckets": 128}
    sizes = {"data__batch_size": 4, "optim__mini_batch_prompts": 4, "data__validation_limit": 8, "train__steps": steps}
    every = {"checkpoint__every": 1, "validation__every": 1}
    return in_process(runs / folder.name, model__path=folder, teacher__enabled=False, **lengths, **sizes, **every)[-1]


def test_a_renumbered_vocabulary_with_holes_is_the_same_policy(student, tmp_path):
    plain, moved = (copied(student, tmp_path / name) for name in ("plain", "moved"))
    sparse(moved)
    metrics = [trained(folder, tmp_path / "runs", 1) for folder in (plain, moved)]
    for one in metrics:  # every answer comes to its end
        assert one["sequence_length/main_chain/clip_ratio"] == 0 and one["val-aux/carry_chain/truncated_share"] == 0
    greedy = [(tmp_path / "runs" / name / "carry_chain" / "validation" / "1.jsonl").read_text() for name in ("plain", "moved")]
    texts = [[json.loads(line)["output"] for line in lines.splitlines()] for lines in greedy]
    assert texts[0] == texts[1] and len(texts[0]) == 8


def test_a_run_keeps_the_date_of_its_beginning(student, tmp_path):
    """The template prints the microsecond, so no two real readings of the clock are alike."""
    folder = copied(student, tmp_path / "dated")
    own = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    template("{{ strftime_now('%f') }}" + own)(folder)
    trained(folder, tmp_path / "runs", 1)
    trained(folder, tmp_path / "runs", 2)  # its prompts are those of the checkpoint, or it would be refused
    tokenizer = load_tokenizer(folder, json.loads((tmp_path / "runs/dated/carry_chain/config.json").read_text())["started"])
    assert tokenizer.decode(templates.chat("1+1", tokenizer)).startswith("000000")
