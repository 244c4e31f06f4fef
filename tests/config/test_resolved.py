"""The record of a run, and what a resumed run may change."""

import json

import pytest

from configs import common
from deepgrpo import config as config_lib

LINE = config_lib.CommandLine(("train.py", "--config=x.py"), "x.py", ())


@pytest.fixture
def config(tmp_path):
    config = common.get_config()
    config.name, config.run_dir, config.model.path = "run", str(tmp_path), "models/m"
    return config


def stored(config):
    return json.loads((config_lib.run_folder(config) / "config.json").read_text())


def test_record(config):
    assert config_lib.write_resolved(config, LINE, resuming=False, devices=["cpu"]) == []
    record = stored(config)
    assert record["config"]["learner.mesh"] == [1, -1, 1] and record["config"]["optim.lr"] == 1e-6
    assert record["command_line"] == list(LINE.argv) and record["versions"]["jax"] and record["host"]["devices"] == ["cpu"]
    assert record["restarts"] == []


def test_harmless_changes_are_noted(config):
    config_lib.write_resolved(config, LINE, resuming=False, devices=[])
    config.validation.every, config.train.steps = 5, 100
    notes = config_lib.write_resolved(config, LINE, resuming=True, devices=[])
    assert sorted(notes) == ["train.steps: 0 -> 100", "validation.every: 10 -> 5"]
    assert stored(config)["config"]["train.steps"] == 100 and stored(config)["restarts"][0]["changed"] == notes
    assert config_lib.write_resolved(config, LINE, resuming=True, devices=[]) == []


def test_another_run_is_refused_unless_accepted(config):
    config_lib.write_resolved(config, LINE, resuming=False, devices=[])
    config.optim.lr = 1e-5
    with pytest.raises(config_lib.ConfigError, match="optim.lr: 1e-06 -> 1e-05"):
        config_lib.write_resolved(config, LINE, resuming=True, devices=[])
    assert stored(config)["config"]["optim.lr"] == 1e-6
    config.checkpoint.accept_changes = ("optim.lr",)
    assert "optim.lr: 1e-06 -> 1e-05" in config_lib.write_resolved(config, LINE, resuming=True, devices=[])


def test_length_matters_to_a_decaying_learning_rate(config):
    config.optim.schedule = "cosine"
    config_lib.write_resolved(config, LINE, resuming=False, devices=[])
    config.train.steps = 7
    with pytest.raises(config_lib.ConfigError, match="train.steps"):
        config_lib.write_resolved(config, LINE, resuming=True, devices=[])


def test_a_start_without_checkpoint_is_a_new_run(config):
    config_lib.write_resolved(config, LINE, resuming=False, devices=[])
    config.optim.lr = 1e-5
    assert config_lib.write_resolved(config, LINE, resuming=False, devices=[]) == []
    assert stored(config)["config"]["optim.lr"] == 1e-5


def test_used_folder_is_refused_on_request(config):
    config_lib.write_resolved(config, LINE, resuming=False, devices=[])
    config.checkpoint.resume = "never"
    with pytest.raises(config_lib.ConfigError, match="holds a run already"):
        config_lib.write_resolved(config, LINE, resuming=False, devices=[])
