"""config.json in and out; what the decoder cannot do is refused by name."""

import json

import pytest

from deepgrpo.model.config import ModelConfig

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


def test_reads_a_published_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    config = ModelConfig.from_hf(tmp_path)
    assert (config.num_layers, config.width, config.num_heads, config.num_kv_heads, config.head_size) == (24, 896, 14, 2, 64)
    assert config.qkv_bias and not config.qk_norm and config.tie_embeddings and config.rope_scaling is None
    assert config.rope_theta == 1e6 and hash(config) is not None


def test_both_spellings_of_rope_give_the_same_config():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    new = {k: v for k, v in QWEN.items() if k != "rope_theta"} | {"rope_parameters": {**scaling, "rope_theta": 1e6}}
    old = QWEN | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}
    assert ModelConfig.from_hf_dict(new) == ModelConfig.from_hf_dict(old)
    assert ModelConfig.from_hf_dict(new).rope_scaling == tuple(sorted(scaling.items()))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_written_config_means_the_same_here_and_in_transformers(tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = ModelConfig.from_hf_dict(QWEN | {"model_type": model_type, "head_dim": 32, "rope_scaling": llama3})
    assert ModelConfig.from_hf_dict(config.to_hf_dict()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_hf(tmp_path) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, r"model_type is 'gpt2', expected one of llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, r"use_sliding_window is true with max_window_layers 21 of 24"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types holds sliding_attention"),
        ({"model_type": "llama", "attention_bias": True}, r"attention_bias is True, expected False"),
        ({"model_type": "llama", "mlp_bias": True}, r"mlp_bias is True, expected False"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5, expected 1.0"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"rope_type is 'dynamic', expected one of default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, r"type default has mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, r"type linear lacks factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"nested by layer type"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config"),
        ({"num_key_value_heads": 4}, r"num_attention_heads is 14, expected a multiple"),
        ({"vocab_size": None}, r"missing vocab_size"),
    ],
)
def test_refuses_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict(QWEN | change)


def test_lists_every_problem_at_once():
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf_dict(QWEN | {"hidden_act": "relu", "partial_rotary_factor": 0.25}, source="x/config.json")
    assert "x/config.json" in str(error.value) and "hidden_act" in str(error.value) and "partial_rotary" in str(error.value)


def test_a_window_that_no_layer_uses_is_accepted():
    assert ModelConfig.from_hf_dict(QWEN | {"use_sliding_window": True, "max_window_layers": 24}).num_layers == 24


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/config.json"):
        ModelConfig.from_hf(tmp_path / "nowhere")
