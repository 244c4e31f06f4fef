"""What a run needs of disks and memory is compared with what there is, in numbers, before anything is loaded."""

import collections
import dataclasses
import json
import os
import pathlib

import pytest

from configs import common
from deepgrpo.model.config import ModelConfig
from deepgrpo.weights import run_folder as room
from tests.learner import tiny

Usage = collections.namedtuple("Usage", "total used free")
P = tiny.MODEL.num_parameters  # 10,720 or so: sizes below are multiples of it


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(run=free bytes, memory=(total, free) or None, host=(total, free)): a config of the tiny model on such a machine."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.MODEL.to_hf_dict()))
    config = common.get_config()
    config.name, config.model.path, config.run_dir = "run", str(folder), str(tmp_path / "runs")
    config.model.dtype, config.objective.kl_coef = "float32", 0.0
    config.checkpoint.keep, config.validation.every, config.weights.route = 1, 0, "direct"

    def make(run=10**12, memory=None, host=(10**12, 10**12), **keys):
        shm = tmp_path / "shm"
        if memory:
            shm.mkdir()
        usage = lambda path: Usage(memory[0], 0, memory[1]) if memory and shm in (path, *path.parents) else Usage(run, 0, run)  # noqa: E731
        monkeypatch.setattr(room, "MEMORY_FOLDER", shm)
        monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage(pathlib.Path(path)))
        monkeypatch.setattr(room, "host_memory", lambda: host)
        device = lambda path: 2 if memory and shm in (path, *path.parents) else 1  # noqa: E731
        monkeypatch.setattr(room, "device_of", device)
        for key, value in keys.items():
            section, name = key.split("__")
            config[section][name] = value
        return config

    return make


@pytest.mark.parametrize(
    ("keys", "bytes_a_parameter"),
    [
        ({}, 12),
        ({"objective__kl_coef": 0.1}, 16),
        ({"objective__kl_coef": 0.1, "model__dtype": "bfloat16"}, 14),
        ({"objective__teacher_update": "post_ppo"}, 20),
    ],
)
def test_checkpoints_need_weights_moments_and_reference_once_more_than_are_kept(machine, keys, bytes_a_parameter):
    need = 2 * bytes_a_parameter * P
    assert room.room_problems(machine(run=need, **keys), True) == []
    (found,) = room.room_problems(machine(run=need - 1, **keys), True)
    assert found.fatal and room.spoken(need) in found.what and room.spoken(need - 1) in found.what
    assert "2 checkpoints" in found.what and "--config.run_dir" in found.remedy


def test_the_best_checkpoint_counts_and_what_is_there_already_does_not(machine, tmp_path):
    config = machine(run=36 * P - 1, validation__every=10)
    (found,) = room.room_problems(config, True)
    assert "3 checkpoints" in found.what
    old = tmp_path / "runs" / "run" / "checkpoints" / "4"
    old.mkdir(parents=True)
    (old / "arrays").write_bytes(bytes(12 * P))
    assert room.room_problems(config, True) == []


def test_a_memory_folder_of_docker_is_not_used_and_that_is_said(machine, tmp_path):
    config = machine(memory=(8 * P - 1, 8 * P - 1), rollout__engine="vllm")  # kept and newest, float32
    (found,) = room.room_problems(config, False)
    assert not found.fatal and str(tmp_path / "shm") in found.what and "--shm-size=1g" in found.remedy
    assert room.weights_root(config) == tmp_path / "runs" / "run" / "weights"


@pytest.mark.parametrize(("free", "fits"), [(8 * P, True), (8 * P - 1, False)])
def test_a_full_memory_folder_is_refused(machine, tmp_path, free, fits):
    """It is large enough, so that trainer and servers agree on it whoever asks first, but somebody fills it."""
    config = machine(memory=(10**9, free), rollout__engine="vllm")
    assert room.weights_root(config) == tmp_path / "shm" / f"deepgrpo-{os.getuid()}-run"
    found = room.room_problems(config, False)
    assert [finding.fatal for finding in found] == ([] if fits else [True])
    assert fits or "snapshots of the weights for vLLM" in found[0].what


def test_one_disk_must_hold_both(machine, tmp_path):
    keys = dict(rollout__engine="vllm", weights__folder=str(tmp_path / "snapshots"))
    assert room.room_problems(machine(run=32 * P, **keys), False) == []
    (found,) = room.room_problems(machine(run=32 * P - 1, **keys), False)
    assert "checkpoints" in found.what and "snapshots" in found.what


@pytest.mark.parametrize(
    ("on_cpu", "host", "fatal"),
    [
        (True, (16 * P, 16 * P), None),
        (True, (16 * P, 16 * P - 1), False),  # it may become free
        (True, (16 * P - 1, 16 * P - 1), True),
        (False, (12 * P, 12 * P), None),
        (False, (12 * P - 1, 12 * P - 1), False),
    ],
)
def test_memory(machine, on_cpu, host, fatal):
    found = room.room_problems(machine(host=host), on_cpu)
    assert [finding.fatal for finding in found] == ([] if fatal is None else [fatal])


def test_a_containers_limit_is_the_machines(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  2000 kB\nMemFree: 5 kB\nMemAvailable:   1500 kB\nHugePages_Total: 0\n")
    assert room.host_memory(tmp_path) == (2000 * 1024, 1500 * 1024)
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    for limit, expected in (("max", (2000 * 1024, 1500 * 1024)), ("1000000", (1000000, 400000))):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("600000\n")
        assert room.host_memory(tmp_path) == expected


def test_an_unreadable_model_is_not_this_checks_business(machine, tmp_path):
    config = machine(run=0)
    for content in ("{}", "<html>", '{"model_type": "bert"}'):
        (tmp_path / "model" / "config.json").write_text(content)
        assert room.room_problems(config, True) == []
    assert ModelConfig.from_hf_dict(tiny.MODEL.to_hf_dict()) == dataclasses.replace(tiny.MODEL, tokenizer_size=0)
