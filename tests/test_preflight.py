"""What is missing outside is reported in one message, each with a remedy."""

import json

import pytest

from configs import common
from deepgrpo import config as config_lib
from deepgrpo import preflight


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = common.get_config()
    config.name, config.model.path = "run", str(tmp_path / "model")
    config.data.train = (f"gsm8k:{tmp_path}/train.jsonl",)
    config.data.validation = ("carry_chain:heldout:8",)
    return config


def write_train(folder) -> None:
    row = {"question": "1 + 1?", "answer": "#### 2"}
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 128)


def test_everything_missing_is_one_message(config):
    config.requires_accelerator = True
    config.model.origin = "Qwen/Qwen2.5-Math-1.5B"
    config.teacher.base_url = "http://127.0.0.1:9/v1"
    with pytest.raises(config_lib.ConfigError) as error:
        preflight.check_inputs(config)
    text = str(error.value)
    assert "5 problems" in text
    for part in (
        "JAX_PLATFORMS",
        "hf download Qwen/Qwen2.5-Math-1.5B --local-dir",
        "train.jsonl",
        "OPENAI_API_KEY",
        "vllm serve",
    ):
        assert part in text, text


def test_nothing_missing(config, tmp_path, student):
    config.model.path, config.rollout.max_model_len = str(student), 128
    write_train(tmp_path)
    config.teacher.base_url = "oracle"
    assert preflight.check_inputs(config) == []


def test_incomplete_model_folder(config, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    ((what, _, _),) = preflight.model_problems(config)
    assert what.endswith("lacks model-2.safetensors, tokenizer.json")


def test_a_teacher_that_is_down_does_not_stop_a_resumed_run(config, tmp_path, monkeypatch, student):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    config.model.path, config.rollout.max_model_len = str(student), 128
    write_train(tmp_path)
    config.teacher.base_url = "http://127.0.0.1:9/v1"
    (warning,) = preflight.check_inputs(config, resuming=True)
    assert "127.0.0.1:9" in warning


def test_accelerator_without_its_plugin(config, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    config.requires_accelerator = True
    monkeypatch.setattr(preflight.glob, "glob", lambda pattern: [])
    assert "shows none" in preflight.accelerator_problems(config)[0][0]
    monkeypatch.setattr(preflight.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    assert "plugin" in preflight.accelerator_problems(config)[0][0]
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: "found")
    assert preflight.accelerator_problems(config) == []


def test_vllm_needs_its_environment_or_a_token(config, tmp_path, monkeypatch):
    config.rollout.engine, config.vllm.python = "vllm", str(tmp_path / "python")
    ((what, remedy, _),) = preflight.engine_problems(config)
    assert f"{tmp_path}/python is no program" in what and "launch/vllm_env.sh" in remedy
    config.vllm.attach = ("http://host:8000",)
    ((what, remedy, _),) = preflight.engine_problems(config)
    assert "DEEPGRPO_VLLM_TOKEN is not set" in what
    monkeypatch.setenv("DEEPGRPO_VLLM_TOKEN", "secret")
    assert not preflight.engine_problems(config)


def test_too_few_open_files(config, monkeypatch):
    limits = []
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (64, 4096))
    assert preflight.open_files_problems(config) == [] and limits == [(preflight.OPEN_FILES, 4096)]  # raised where it may be
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (64, 64))
    ((what, remedy, fatal),) = preflight.open_files_problems(config)
    assert "open 64 files" in what and "ulimit -n" in remedy and fatal and len(limits) == 1
