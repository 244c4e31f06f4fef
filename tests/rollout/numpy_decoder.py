"""A decoder and its sampling distribution in NumPy, float64, from the architecture's formulas: no code of the product in it, so
its log-probs are an oracle for both engines and for exported folders.
"""

import json
import math
import pathlib

import numpy as np
from safetensors.numpy import load_file


class Model:
    """Qwen2/Qwen3/Llama decoder of one folder; `logits` is the whole forward pass without a cache."""

    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
        c = self.config
        self.heads, self.kv = c["num_attention_heads"], c["num_key_value_heads"]
        self.size = c.get("head_dim") or c["hidden_size"] // self.heads
        self.theta = (c.get("rope_parameters") or {}).get("rope_theta") or c.get("rope_theta")

    def logits(self, ids) -> np.ndarray:
        """float64[len, V]."""
        x, eps = self.w["model.embed_tokens.weight"][ids], self.config["rms_norm_eps"]
        angle = np.arange(len(ids))[:, None] / self.theta ** (np.arange(0, self.size, 2) / self.size)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

        def norm(x, name):
            return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * self.w[f"{name}.weight"]

        def linear(x, name):
            return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

        def rotate(x):
            a, b = np.split(x, 2, -1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        causal = np.tril(np.ones((len(ids), len(ids)), bool))
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            h = norm(x, f"{at}.input_layernorm")
            q, k, v = (linear(h, f"{at}.self_attn.{n}_proj").reshape(len(ids), -1, self.size) for n in "qkv")
            if f"{at}.self_attn.q_norm.weight" in self.w:
                q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
            q, (k, v) = rotate(q), (np.repeat(t, self.heads // self.kv, 1) for t in (rotate(k), v))
            score = np.where(causal, np.einsum("tnh,snh->nts", q, k) / math.sqrt(self.size), -np.inf)
            mixed = np.einsum("nts,snh->tnh", softmax(score), v).reshape(len(ids), -1)
            x = x + linear(mixed, f"{at}.self_attn.o_proj")
            h = norm(x, f"{at}.post_attention_layernorm")
            gate = linear(h, f"{at}.mlp.gate_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        return norm(x, "model.norm") @ self.w["lm_head.weight"].T


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def distribution(logits, p) -> np.ndarray:
    """float64[V] log-probs of the distribution that parameters `p` sample from."""
    for token, bias in p.get("logit_bias", {}).items():  # before all else, as vLLM does
        logits[int(token)] += bias
    z = logits / p["temperature"] if p["temperature"] else logits
    if p["temperature"] and p["top_k"]:
        z = np.where(z < np.sort(z)[-p["top_k"]], -np.inf, z)
    if p["temperature"] and p["top_p"] < 1:
        order = np.argsort(-z)
        above = np.cumsum(softmax(z)[order]) - softmax(z)[order]
        z[order[above >= p["top_p"]]] = -np.inf
    with np.errstate(divide="ignore"):
        return np.log(softmax(z))
