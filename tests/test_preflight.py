"""What is missing outside is reported in one message, each with a remedy."""

import json

import pytest

from configs import common
from deepgrpo import config as config_lib
from deepgrpo.config.errors import Finding
from deepgrpo.preflight import inputs as preflight


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = common.get_config()
    config.name, config.model.path = "run", str(tmp_path / "model")
    config.data.train, config.data.validation = (f"gsm8k:{tmp_path}/train.jsonl",), ("carry_chain:heldout:8",)
    config.teacher.base_url = "http://127.0.0.1:9/v1"
    return config


def test_everything_missing_is_one_message(config):
    config.requires_accelerator, config.model.origin = True, "Qwen/Qwen2.5-Math-1.5B"
    with pytest.raises(config_lib.ConfigError) as error:
        preflight.check_inputs(config)
    parts = ("JAX_PLATFORMS", "hf download Qwen/Qwen2.5-Math-1.5B --local-dir", "train.jsonl", "OPENAI_API_KEY", "vllm serve")
    assert all(part in str(error.value) for part in ("5 problems", *parts)), str(error.value)


def test_nothing_missing_and_a_teacher_that_is_down_does_not_stop_a_resumed_run(config, tmp_path, monkeypatch, student):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    (tmp_path / "train.jsonl").write_text(f"{json.dumps({'question': '1 + 1?', 'answer': '#### 2'})}\n" * 128)
    config.model.path, config.rollout.max_model_len = str(student), 128
    (warning,) = preflight.check_inputs(config, resuming=True)
    assert "127.0.0.1:9" in warning
    config.teacher.base_url = "oracle"
    assert preflight.check_inputs(config) == []


def test_a_check_that_fails_is_a_finding_about_its_part():
    def unforeseen(config):
        return [Finding(config["absent"], "")]

    def ended(config):
        raise SystemExit("configuration error: rewards.graders: no such function")

    (finding,) = preflight.asked("shape", unforeseen, {})
    assert finding.what.startswith("shape: ") and "KeyError: 'absent'" in finding.what and finding.fatal
    (finding,) = preflight.asked("rewards", ended, {})
    assert "no such function" in finding.what


def test_accelerator_without_its_plugin(config, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    config.requires_accelerator = True
    monkeypatch.setattr(preflight.glob, "glob", lambda pattern: [])
    assert "shows none" in preflight.accelerator_problems(config)[0].what
    monkeypatch.setattr(preflight.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    assert "plugin" in preflight.accelerator_problems(config)[0].what
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: "found")
    assert preflight.accelerator_problems(config) == []


def test_vllm_needs_its_environment_or_a_token(config, tmp_path, monkeypatch):
    config.rollout.engine, config.vllm.python = "vllm", str(tmp_path / "python")
    (finding,) = preflight.engine_problems(config)
    assert f"{tmp_path}/python is no program" in finding.what and "launch/vllm_env.sh" in finding.remedy
    config.vllm.attach = ("http://host:8000",)
    (finding,) = preflight.engine_problems(config)
    assert "DEEPGRPO_VLLM_TOKEN is not set" in finding.what
    monkeypatch.setenv("DEEPGRPO_VLLM_TOKEN", "secret")
    assert not preflight.engine_problems(config)


def test_too_few_open_files(config, monkeypatch):
    limits = []
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (64, 4096))
    assert preflight.open_files_problems(config) == [] and limits == [(preflight.OPEN_FILES, 4096)]  # raised where it may be
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (64, 64))
    (finding,) = preflight.open_files_problems(config)
    assert "open 64 files" in finding.what and "ulimit -n" in finding.remedy and finding.fatal and len(limits) == 1
