"""Hugging Face folders in and out, judged by transformers' own forward pass."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.weights import hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(0).integers(0, 90, size=(3, 17)).astype(np.int32)
SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "qwen2 tied": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen2 untied, yarn": ("Qwen2", dict(rope_parameters=YARN)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3 tied": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "llama, wide heads": ("Llama", dict(head_dim=32, rms_norm_eps=1e-5)),
    "llama3 tied": ("Llama", dict(tie_word_embeddings=True, rope_parameters=dict(LLAMA3, original_max_position_embeddings=32))),
}


def make(folder, name: str, **save) -> np.ndarray:
    """Saves a random model of transformers' own making; returns its logits, float32[3, 17, V]."""
    family, extra = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms are trivial at initialisation
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **save)
    return their_logits(folder)


def their_logits(folder, tokens: np.ndarray = TOKENS) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def our_logits(folder, tokens: np.ndarray = TOKENS, params: dict | None = None) -> np.ndarray:
    model = Transformer(ModelConfig.from_hf(folder), dtype=jnp.float32)
    variables = {"params": hf.load(folder) if params is None else params}
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    hidden, _ = model.apply(variables, tokens, positions, np.ones_like(tokens))
    return np.asarray(model.apply(variables, hidden, method=Transformer.logits))


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_in_and_out(tmp_path, name):
    theirs = make(tmp_path / "in", name)
    params, config = hf.load(tmp_path / "in"), ModelConfig.from_hf(tmp_path / "in")
    np.testing.assert_allclose(our_logits(tmp_path / "in", params=params), theirs, atol=1e-4, rtol=0)
    hf.save(params, config, tmp_path / "out", jnp.float32)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(their_logits(tmp_path / "out"), theirs)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "out"), params)


@pytest.mark.parametrize("name", MODELS)
def test_the_tree_is_the_one_the_decoder_initialises(tmp_path, name):
    make(tmp_path, name)
    model = Transformer(ModelConfig.from_hf(tmp_path))
    wanted = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS, TOKENS, TOKENS))["params"]
    found = hf.load(tmp_path)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)


def test_split_files_are_read_and_written(tmp_path):
    theirs = make(tmp_path / "in", "qwen2 untied, yarn", max_shard_size="60KB")
    assert (tmp_path / "in" / hf.INDEX).is_file()
    np.testing.assert_allclose(our_logits(tmp_path / "in"), theirs, atol=1e-4, rtol=0)
    hf.save(hf.load(tmp_path / "in"), ModelConfig.from_hf(tmp_path / "in"), tmp_path / "out", jnp.float32, shard_bytes=60_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    np.testing.assert_array_equal(their_logits(tmp_path / "out"), theirs)


def test_each_device_reads_only_its_shard(tmp_path, monkeypatch):
    make(tmp_path / "in", "qwen2 tied")
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    whole, config = hf.load(tmp_path / "in"), ModelConfig.from_hf(tmp_path / "in")
    specs = {1: PartitionSpec(), 2: PartitionSpec(), 3: PartitionSpec(None, "fsdp", "tensor")}
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, specs[x.ndim]), whole)
    shapes, read = [], hf._read

    def recorded(*args):
        part = read(*args)
        shapes.append(part.shape)
        return part

    monkeypatch.setattr(hf, "_read", recorded)
    sharded = hf.load(tmp_path / "in", shardings=shardings)
    assert shapes.count((3, 24, 20)) == 16  # gate and up, 8 shards each, all layers of [48, 80] over 2 x 4 devices
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings
    hf.save(sharded, config, tmp_path / "out", jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "out"), whole)


def test_bfloat16_files(tmp_path):
    make(tmp_path / "in", "qwen3")
    params, config = hf.load(tmp_path / "in"), ModelConfig.from_hf(tmp_path / "in")
    hf.save(params, config, tmp_path / "out", jnp.bfloat16)
    rounded = hf.load(tmp_path / "out")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16).astype(jnp.float32)), rounded, params)
    assert hf.load(tmp_path / "out", jnp.bfloat16)["norm"]["scale"].dtype == jnp.bfloat16


def test_all_wrong_tensors_in_one_error(tmp_path):
    make(tmp_path, "qwen2 tied")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"].astype(np.int8)
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.ones(48, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)  # old exports have it; it says nothing new
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path)
    text = str(error.value)
    assert "layers.1.self_attn.k_proj.bias: missing, expected (24,)" in text
    assert "model.norm.weight (model.safetensors): found F32 (7,), expected" in text and "(48,)" in text
    assert "mlp.up_proj.weight (model.safetensors): found I8" in text and "o_proj.bias" in text and "inv_freq" not in text


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tmp_path):
    make(tmp_path, "llama3 tied")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight .* differs from model.embed_tokens.weight"):
        hf.load(tmp_path)


def test_files_that_are_absent_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(SIZES, model_type="llama")))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="found config.json, pytorch_model.bin, expected model.safetensors"):
        hf.load(tmp_path)
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="names files that are not there: model-1.safetensors"):
        hf.load(tmp_path)


def test_saving_brings_the_tokenizer_and_leaves_nothing_half_done(tmp_path):
    make(tmp_path / "in", "qwen2 tied")
    params, config = hf.load(tmp_path / "in"), ModelConfig.from_hf(tmp_path / "in")
    with pytest.raises(ValueError, match="no tokenizer there"):
        hf.save(params, config, tmp_path / "out", tokenizer_from=tmp_path / "in")
    with pytest.raises(ValueError, match=r"norm/scale: found \(5,\), expected \(48,\)"):
        hf.save(params | {"norm": {"scale": jnp.ones(5)}}, config, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    hf.save(params, config, tmp_path / "out", tokenizer_from=tmp_path / "in")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [5, 6]
    with pytest.raises(FileExistsError, match="exists already"):
        hf.save(params, config, tmp_path / "out")
