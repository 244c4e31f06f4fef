"""A tiny random decoder for engine tests, and the log-probs that the learner's path gives its samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.rollout.engine import Request, Sampling
from deepgrpo.rollout.native import NativeEngine
from deepgrpo.types import as_ids

VOCAB, REAL = 97, 90  # ids 90..96 are phantom
CONFIG = ModelConfig("qwen3", VOCAB, 2, 32, 4, 2, 8, 48, 1e4, 1e-6, True, False, True, 64)


def random_params(seed: int = 0, config: ModelConfig = CONFIG):
    """Weights large enough that the distributions are far from flat."""
    token = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(Transformer(config, jnp.float32).init)(jax.random.key(seed), token, token, token)["params"]
    return jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key in ("scale", "bias") else 12 * x, params)


def make_engine(params=None, slots: int = 4, decode_steps: int = 5, **changes) -> NativeEngine:
    arguments = {"dtype": jnp.float32, "num_real_ids": REAL, "config": CONFIG} | changes
    params = random_params() if params is None else params
    return NativeEngine(params=params, slots=slots, decode_steps=decode_steps, **arguments)


def make_requests(lengths, samples: int = 3, **changes) -> list[Request]:
    rng = np.random.default_rng(7)
    seeds = iter(range(1, 10_000))
    return [
        Request(as_ids(rng.integers(0, REAL, length)), tuple(next(seeds) for _ in range(samples)), **changes)
        for length in lengths
    ]


def plain(max_model_len: int = 32, **changes) -> Sampling:
    return Sampling(**({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_ids": (), "max_model_len": max_model_len} | changes))


def restricted_logps(logits: np.ndarray, sampling: Sampling, num_real_ids: int = REAL) -> np.ndarray:
    """float64[V] log-probs of the sampled distribution, by sorting, from one position's logits."""
    z = np.where(np.arange(len(logits)) < num_real_ids, logits.astype(np.float64), -np.inf)
    if sampling.temperature > 0:
        z = z / sampling.temperature
        if 0 < sampling.top_k < num_real_ids:
            z[z < np.sort(z)[-sampling.top_k]] = -np.inf
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        order = np.argsort(-p)
        above = np.cumsum(p[order]) - p[order]  # mass of everything more likely
        if sampling.top_p < 1:
            z[order[above >= sampling.top_p]] = -np.inf
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


@functools.partial(jax.jit, static_argnames="config")
def full_forward(params, tokens, segments, config):
    model = Transformer(config, jnp.float32)
    hidden, _ = model.apply({"params": params}, tokens, jnp.arange(tokens.shape[1])[None], segments)
    return model.apply({"params": params}, hidden, method="logits")


def learner_logps(params, request: Request, completion, sampling: Sampling, config: ModelConfig = CONFIG) -> np.ndarray:
    """Log-probs of a completion's ids from one full forward of the learner's path."""
    ids = np.concatenate([request.prompt_ids, completion.ids])
    tokens, segments = np.zeros((2, 1, 64), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    logits = np.asarray(full_forward(params, tokens, segments, config))[0]
    start = len(request.prompt_ids) - 1
    rows = [restricted_logps(logits[start + i], sampling)[token] for i, token in enumerate(completion.ids)]
    return np.array(rows)
