"""A tiny random decoder, rows and learners for the tests of this room."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from deepgrpo.learner import sharding
from deepgrpo.learner.learner import Learner
from deepgrpo.learner.objective import MAIN, TEACHER
from deepgrpo.learner.rows import Row
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer
from deepgrpo.types import as_ids

REAL_IDS = 32  # of 40 vocabulary rows: the rest is phantom


def model_config(**changes) -> ModelConfig:
    shape = dict(vocab_size=40, num_layers=2, width=16, num_heads=4, num_kv_heads=2, head_size=8, mlp_width=32)
    other = dict(
        rope_theta=1e4, rms_norm_eps=1e-6, tie_embeddings=False, qkv_bias=True, qk_norm=False, max_position_embeddings=64
    )
    other |= dict(tokenizer_size=REAL_IDS)
    return ModelConfig("qwen2", **shape | other | changes)


@functools.cache
def parameters(config: ModelConfig = model_config()):  # noqa: B008
    """Random parameters as host arrays, large enough for a distribution that is far from flat."""
    one = jnp.ones((1, 2), jnp.int32)
    tree = jax.jit(Transformer(config, jnp.float32).init)(jax.random.key(0), one, one, one)["params"]
    return jax.tree.map(lambda x: np.asarray(x) * (1 if x.ndim < 2 or x.shape[-1] < 2 else 4), tree)


def make_rows(n: int, seed: int = 0, length: int | None = None, **changes) -> list[Row]:
    """n rows of random lengths, or with responses of `length` tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        P, R = rng.integers(1, 9), length or rng.integers(1, 13)
        fields = dict(advantage=float(rng.normal()), source=MAIN, teacher_coef=0.0, group_id=f"g{i // 4}", dataset_index=i // 4)
        fields |= dict(rollout_logps=rng.normal(-3.0, 0.1, R).astype(np.float32), injected=False, reward=1.0)
        prompt, response = as_ids(rng.integers(0, REAL_IDS, P)), as_ids(rng.integers(0, REAL_IDS, R))
        rows.append(Row(prompt, response, **fields | changes))
    return rows


def sibling_rows() -> list[Row]:
    """Groups of 8, 2, 1, 4, 3 and 2 responses to prompts of 6, 2, 5, 1, 9 and 12 tokens."""
    rng, rows = np.random.default_rng(5), []
    for g, (n, P) in enumerate([(8, 6), (2, 2), (1, 5), (4, 1), (3, 9), (2, 12)]):
        prompt = as_ids(rng.integers(0, REAL_IDS, P))
        rows += [dataclasses.replace(row, prompt_ids=prompt, group_id=f"siblings{g}") for row in make_rows(n, seed=20 + g)]
    return rows


def teacher_rows(n: int, coef: float) -> list[Row]:
    return make_rows(n, seed=9, source=TEACHER, teacher_coef=coef, advantage=0.0, rollout_logps=None, dataset_index=-1)


MODEL = model_config()


def make_learner(
    mesh=(1, 1, 1), config: ModelConfig = MODEL, total_steps=10, strict=False, params=None, channel=None, **keys
) -> Learner:
    """A float32 learner on the first devices; `keys` are config keys such as optim__lr=0.1."""
    settings = common.get_config()
    settings.model.dtype, settings.rollout.n, settings.seed, settings.strict_reference = "float32", 4, 0, strict
    defaults = dict(learner__buckets=(24, 48), learner__micro_batch_tokens=96, learner__logprob_block=16)
    for key, value in (defaults | dict(optim__lr=1e-2, optim__mini_batch_prompts=2) | keys).items():
        section, name = key.split("__")
        settings[section][name] = value
    return Learner(
        config,
        parameters(config) if params is None else params,
        settings,
        total_steps=total_steps,
        mesh=sharding.make_mesh(mesh, jax.devices()[: int(np.prod(mesh))]),
        channel=channel,
    )


def alone(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row by itself, right-padded: tokens, segments (1, padding 0) and scored (the response positions), [n, 24] each."""
    tokens, segments, scored = np.zeros((3, len(rows), 24), np.int32)
    for i, row in enumerate(rows):
        P, length = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
        tokens[i, :length], segments[i, :length], scored[i, P:length] = [*row.prompt_ids, *row.response_ids], 1, 1
    return tokens, segments, scored


def dense_logps(params, config: ModelConfig, tokens, segments, temperature: float = 1.0):
    """Log-prob of each token after the first, the plain way, all logits at once: [n, 24], 0 in column 0."""
    model = Transformer(config, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.apply({"params": params}, tokens, positions, segments)
    logits = model.apply({"params": params}, hidden, method="logits")[:, :-1, :REAL_IDS]
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits / temperature), tokens[:, 1:, None], 2)[..., 0]
    return jnp.pad(logps, [(0, 0), (1, 0)])


def same(a, b) -> bool:
    """Whether two trees are equal to the bit."""
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
