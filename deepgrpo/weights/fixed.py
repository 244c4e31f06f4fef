"""A policy that is not trained: loaded for an evaluation, with what an engine's proof asks of a learner and no optimizer."""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepgrpo.learner import sharding
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer, abstract_params
from deepgrpo.types import Ids
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import MANIFEST, read_arrays

PADDED = 64  # tokens: scored texts are filled up to multiples, so that few lengths are compiled


class FrozenPolicy:
    """Stands where `weights.engines.open_engine` takes a learner. policy: the parameters, sharded on a mesh."""

    def __init__(self, config: ModelConfig, params: Any, dtype: Any, num_real_ids: int, temperature: float):
        """temperature: of the distribution that `score` means."""
        self.policy, self.model = params, Transformer(config, dtype=jnp.dtype(dtype))
        self.num_real_ids, self.temperature = num_real_ids, temperature

    def announce(self, name: str, **fields: Any) -> None:
        """An evaluation is one process: there are no others to tell."""

    def score(self, sequences: Sequence[tuple[Ids, Ids]]) -> list[np.ndarray]:
        """Log-probs of responses given their prompts: float32[len(response)] each."""
        return self.start_score(sequences)()

    def start_score(self, sequences: Sequence[tuple[Ids, Ids]], at_temperature_1: bool = False) -> Callable[[], list[np.ndarray]]:
        """`score`, in two halves: the result is waited for by the function returned."""
        temperature = 1.0 if at_temperature_1 else self.temperature
        lengths = [(len(prompt), len(prompt) + len(response)) for prompt, response in sequences]
        longest = max(end for _, end in lengths)
        tokens, segments = np.zeros((2, len(lengths), PADDED * -(-longest // PADDED)), np.int32)
        for i, (prompt, response) in enumerate(sequences):
            ids = np.concatenate([prompt, response])
            tokens[i, : len(ids)], segments[i, : len(ids)] = ids, 1
        logps = _logps(self.policy, tokens, segments, temperature, self.model, self.num_real_ids)
        return lambda: [row[start - 1 : end - 1] for row, (start, end) in zip(np.asarray(logps), lengths, strict=True)]


@functools.partial(jax.jit, static_argnames=("model", "num_real_ids"))
def _logps(params: Any, tokens: jax.Array, segments: jax.Array, temperature: float, model: Transformer, num_real_ids: int):
    """float32[B, T - 1]: log-probs of tokens[:, 1:], phantom ids left out. tokens, segments: int32[B, T].

    Row by row: the logits of one exist at a time.
    """

    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids, segment = (x[None] for x in row)
        hidden, _ = model.apply({"params": params}, ids, jnp.arange(ids.shape[1])[None], segment)
        logits = model.apply({"params": params}, hidden[:, :-1], method="logits").astype(jnp.float32) / temperature
        logits = jnp.where(jnp.arange(logits.shape[-1]) < num_real_ids, logits, -jnp.inf)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)[0, :, 0]

    return jax.lax.map(one, (tokens, segments))


def load(model: pathlib.Path, step: pathlib.Path | None, dtype: str, mesh: Mesh) -> tuple[ModelConfig, Any]:
    """The parameters in `dtype`, of a Hugging Face folder or of one complete checkpoint of a run that started from it."""
    config = ModelConfig.from_hf(model)
    abstract = abstract_params(config)
    shardings = sharding.parameter_shardings(abstract, mesh)
    if step is None:
        return config, hf.load(model, jnp.dtype(dtype), shardings)
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    params = read_arrays(step, wanted, "params.")
    return config, jax.tree.map(lambda x: x.astype(dtype), params)


def digest(model: pathlib.Path, step: pathlib.Path | None) -> str:
    """Identifies the weights by their bytes (of a checkpoint, by its manifest, which holds every file's sha256)."""
    found = hashlib.sha256()
    for path in [step / MANIFEST] if step else sorted(pathlib.Path(model).glob("*.safetensors")):
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]
