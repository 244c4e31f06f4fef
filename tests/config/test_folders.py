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


def write(config, resuming=False):
    """(what differs, the record)."""
    notes = config_lib.write_resolved(config, LINE, resuming=resuming, devices=["cpu"])
    return notes, json.loads((config_lib.run_folder(config) / "config.json").read_text())


def test_record(config):
    notes, record = write(config)
    assert notes == record["restarts"] == []
    assert record["config"]["learner.mesh"] == [1, -1, 1] and record["config"]["optim.lr"] == 1e-6
    assert record["command_line"] == list(LINE.argv) and record["versions"]["jax"] and record["host"]["devices"] == ["cpu"]


def test_harmless_changes_are_noted(config):
    write(config)
    config.validation.every, config.train.steps, config.teacher.timeout = 5, 100, 9.0
    notes, record = write(config, resuming=True)
    assert sorted(notes) == ["teacher.timeout: 1800.0 -> 9.0", "train.steps: 0 -> 100", "validation.every: 10 -> 5"]
    assert record["config"]["train.steps"] == 100 and record["restarts"][0]["changed"] == notes
    assert write(config, resuming=True)[0] == []


@pytest.mark.parametrize(("key", "change"), [("optim.lr", 1e-5), ("rollout.temperature", 0.5), ("teacher.model", "other")])
def test_another_run_is_refused_unless_accepted(config, key, change):
    _, before = write(config)
    config.update_from_flattened_dict({key: change})
    with pytest.raises(config_lib.ConfigError, match=f"{key}: {before['config'][key]!r} -> {change!r}"):
        write(config, resuming=True)
    config.checkpoint.accept_changes = (key,)
    notes, record = write(config, resuming=True)
    assert notes[-1].startswith(f"{key}: ") and record["config"][key] == change


def test_length_matters_to_a_decaying_learning_rate(config):
    config.optim.schedule = "cosine"
    write(config)
    config.train.steps = 7
    with pytest.raises(config_lib.ConfigError, match="train.steps"):
        write(config, resuming=True)


def test_a_start_without_checkpoint_is_a_new_run(config):
    write(config)
    config.optim.lr = 1e-5
    notes, record = write(config)
    assert notes == [] and record["config"]["optim.lr"] == 1e-5
