"""The warm start: a Hugging Face folder made once, the same every time, and measured as it says."""

import copy
import json
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo import config as config_lib
from deepgrpo import warm_start
from deepgrpo.data import carry_chain
from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.preflight import rules
from deepgrpo.weights import hf

EXPERIMENT = pathlib.Path(__file__).resolve().parent.parent / "configs" / "carry_chain.py"


@pytest.fixture(scope="module")
def recipe():
    """The experiment's, with a smaller student and hardly any training."""
    recipe = runpy.run_path(str(EXPERIMENT))["warm_start"]().to_dict()
    recipe["model"] |= {"width": 64, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 64}
    recipe |= {"batch_size": 4, "required_clean": 0.0}
    recipe["clean"]["steps"] = recipe["sloppy"]["steps"] = 3
    return recipe


@pytest.fixture(scope="module")
def student(recipe, tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("students") / "one", []
    return folder, warm_start.make_student(recipe, folder, lines.append), lines


def test_the_folder_is_a_hugging_face_model(student, recipe):
    folder, ability, lines = student
    config = ModelConfig.from_hf(folder)
    assert config == warm_start.model_config(recipe) and config.head_size == 32
    tokenizer = tokenizer_lib.load_tokenizer(str(folder))
    assert tokenizer_lib.stop_ids(str(folder), tokenizer) == (2,)
    assert tokenizer("a+6=63\n####63")["input_ids"] == [carry_chain.VOCABULARY.index(t) for t in [*"a+6=63\n", "####", *"63"]]
    record = json.loads((folder / warm_start.RECORD).read_text())
    assert record["ability"] == ability and record["recipe"] == json.loads(json.dumps(recipe))
    assert [line.partition(" loss")[0] for line in lines] == ["clean 3/3", "sloppy 3/3"]


def test_the_same_recipe_makes_the_same_student(student, recipe, tmp_path):
    warm_start.make_student(recipe, tmp_path / "two", lambda line: None)
    first, second = (folder / "model.safetensors" for folder in (student[0], tmp_path / "two"))
    assert first.read_bytes() == second.read_bytes()


def test_a_student_that_learnt_nothing_is_refused(recipe, tmp_path):
    with pytest.raises(RuntimeError, match=r"ended with 0.000 .* requires 0.5: raise clean.steps"):
        warm_start.make_student(recipe | {"required_clean": 0.5}, tmp_path / "none", lambda line: None)
    assert not list(tmp_path.iterdir())


def test_made_once_and_another_recipe_is_another_folder(student, recipe, tmp_path, capsys):
    folder = student[0]
    experiment = tmp_path / "mine.py"
    text = (
        "from configs import carry_chain\nfrom ml_collections import ConfigDict\nget_config = carry_chain.get_config\n"
        f"def warm_start():\n    return ConfigDict({recipe!r})\n"
    )
    experiment.write_text(text)
    argv = ["warm_start", f"--config={experiment}", f"--config.model.path={folder}"]
    warm_start.main(*rules.from_command_line(argv))
    assert f"cached in {folder}" in capsys.readouterr().out
    experiment.write_text(text.replace("'seed': 0", "'seed': 1"))
    with pytest.raises(config_lib.ConfigError, match="a student of another recipe"):
        warm_start.main(*rules.from_command_line(argv))
    experiment.write_text(text.partition("def")[0])
    with pytest.raises(config_lib.ConfigError, match="no function warm_start"):
        warm_start.main(*rules.from_command_line(argv))


def test_every_part_of_the_recipe_names_the_folder(recipe):
    changed = copy.deepcopy(recipe)
    changed["sloppy"]["forget"] = 0.5
    prints = [carry_chain.fingerprint(r) for r in (recipe, changed, recipe | {"seed": 1}, copy.deepcopy(recipe))]
    assert len(set(prints)) == 3 and prints[0] == prints[3]
    config, _ = rules.from_command_line(["train", f"--config={EXPERIMENT}"])
    mine = runpy.run_path(str(EXPERIMENT))["warm_start"]().to_dict()
    assert config.model.path.endswith(carry_chain.fingerprint(mine))


def test_text_is_what_training_will_see(student, recipe):
    tokenizer = tokenizer_lib.load_tokenizer(str(student[0]))
    tokens = warm_start.corpus(recipe, "sloppy", np.random.default_rng(0), tokenizer)
    assert tokens.shape == (3, 4, 106)
    for row in tokens.reshape(-1, 106):
        user, _, answer = tokenizer.decode(row).partition("<|im_end|>\n<|im_start|>assistant\n")
        question = user.removeprefix("<|im_start|>user\n")
        assert answer.endswith("<|im_end|>") and len(answer) == len(carry_chain.solution(question)) + len("<|im_end|>")


def test_measure_agrees_with_a_plain_count(student):
    """Against float64 NumPy, line by line."""
    folder, ability, _ = student
    tokenizer, model = tokenizer_lib.load_tokenizer(str(folder)), Transformer(ModelConfig.from_hf(folder), dtype=jnp.float32)
    questions = [row["question"] for row in carry_chain.problems("heldout", warm_start.MEASURED)]
    tokens = warm_start.encode(carry_chain, questions, [carry_chain.solution(q) for q in questions], tokenizer)
    params = hf.load(folder)
    hidden, _ = model.apply({"params": params}, tokens, jnp.tile(jnp.arange(106), (len(tokens), 1)), jnp.ones_like(tokens))
    logits = np.asarray(model.apply({"params": params}, hidden, method="logits"), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    steps, chains = {True: [], False: []}, []
    for question, row, table in zip(questions, tokens, probabilities, strict=True):
        of_token = [table[t - 1, row[t]] for t in range(32, 106)]
        for i, carries in enumerate(carry_chain.hard_steps(question)):
            steps[carries].append(np.prod(of_token[7 * i : 7 * i + 7]))
        chains.append(np.prod(of_token))
    assert ability["hard_sampled"] == pytest.approx(np.mean(steps[True]), rel=1e-3)
    assert ability["other_sampled"] == pytest.approx(np.mean(steps[False]), rel=1e-3)
    assert ability["chain_sampled"] == pytest.approx(np.mean(chains), rel=1e-3, abs=1e-300)
    assert ability["hard_greedy"] == ability["other_greedy"] == ability["chain_greedy"] == 0


def test_learning_rates_rise_and_fall():
    rates = warm_start.learning_rates(1.0, 100)
    assert rates.dtype == np.float32 and rates[0] == 0 and rates[5] == rates.max() == 1
    assert (np.diff(rates[5:]) < 0).all() and rates[-1] == pytest.approx(0.05, abs=2e-3)
    assert jax.numpy.isfinite(warm_start.learning_rates(1.0, 1)).all()
