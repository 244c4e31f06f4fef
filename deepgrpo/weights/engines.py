"""Opens the rollout engine that a configuration names, together with the way weights take to it."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.learner import sharding
from deepgrpo.learner.learner import Learner
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import Transformer, abstract_params
from deepgrpo.rollout.engine import Engine, Request, Sampling, sample_seed
from deepgrpo.rollout.native import NativeEngine
from deepgrpo.rollout.vllm import VllmEngine
from deepgrpo.rollout.vllm_fleet import Fleet
from deepgrpo.rollout.vllm_http import GREEDY_TOKENS
from deepgrpo.rollout.vllm_server import BLOCK_SIZE, TOKEN, VllmServer
from deepgrpo.types import Ids, as_ids
from deepgrpo.weights import hf, publish, run_folder
from deepgrpo.weights.checkpoint import MANIFEST, read_arrays
from deepgrpo.weights.publish import Publisher, Snapshots
from deepgrpo.weights.run_folder import weights_root

log = logging.getLogger(__name__)
PADDED = 64  # tokens: scored texts are filled up to multiples, so that few lengths are compiled

SELF_TEST_PROMPTS, SELF_TEST_ROLLOUTS, SELF_TEST_TOKENS = 8, 64, 64

Publish = Callable[[Any, int], None]  # (parameters, version); see Publisher.publish


def open_engine(
    config: Any,
    stack: contextlib.ExitStack,
    learner: Learner,
    prompts: Sequence[Ids],
    sampling: Sampling,
    version: int,
    run: pathlib.Path,
) -> tuple[Engine, Publish]:
    """Returns the engine, holding the learner's present policy as `version`, and the function that gives it later ones.

    Args:
      prompts: of the training set; the first of them make the probe and the self-test.
      sampling: of training. run: folder of the run, for the servers' logs.

    Raises:
      PublishError, VllmServerError: no server with these weights; see there.
      SelfTestError: engine and learner disagree about the policy.
    """
    model, rollout = learner.model.config, config.rollout
    if rollout.engine == "native":
        native = NativeEngine(model, learner.policy, config.model.dtype, model.num_real_ids, rollout.slots, version=version)
        stack.callback(native.close)
        return native, native.publish
    root = weights_root(config)
    folder = own_folder(root)
    snapshots = Snapshots(folder, config.weights.route, model, model.num_real_ids, config.model.dtype, config.model.path)
    stack.callback(snapshots.close)
    publisher = Publisher(snapshots, learner, probe_text(prompts, BLOCK_SIZE, sampling.max_model_len))
    servers = attached_servers(config)  # first: a server that is absent or another run's is not worth a snapshot
    first = publisher.start(version)
    servers = servers or start_servers(config, stack, first.folder, root, run)
    fleet = Fleet(servers, config.name)
    stack.callback(fleet.close)
    engine = VllmEngine(fleet, model.num_real_ids, config.vllm.request_deadline, model.holes)
    publisher.confirm(fleet, first)
    self_test(engine, learner, prompts, sampling, config.seed, publisher.tolerance)
    return engine, publisher.publish


def storing(config: Any, learner: Learner) -> Callable[[str], None]:
    """What the learner's other processes do for a publication (`Snapshots.take`): a function of the folder to write to."""
    model = learner.model.config
    published = dataclasses.replace(model, vocab_size=model.num_real_ids)

    def store(folder: str) -> None:
        publish.store(learner.policy, folder, published, jnp.dtype(config.model.dtype))

    return store


def attached_servers(config: Any) -> list[VllmServer]:
    """Those that the configuration names, once they are ready; none if it names none."""
    token = os.environ.get(TOKEN, "")
    return [VllmServer.attach(url, token, config.name) for url in config.vllm.attach]


def start_servers(
    config: Any, stack: contextlib.ExitStack, model: pathlib.Path, root: pathlib.Path, run: pathlib.Path
) -> list[VllmServer]:
    """Starts the configuration's servers, all at once."""
    count = config.vllm.servers
    with concurrent.futures.ThreadPoolExecutor(count, "vllm-start") as pool:
        starts = [pool.submit(VllmServer.start, config, model, root, run / f"vllm-{i}.log", i) for i in range(count)]
    for future in starts:
        if future.exception() is None:
            stack.callback(future.result().stop)
    return [future.result() for future in starts]  # raises the first error, after the others are sure to be stopped


def serving_model(config: Any, root: pathlib.Path) -> pathlib.Path:
    """Writes the model that training starts from as snapshots are written, and returns the folder.

    For servers that run before their learner: a vocabulary is fixed when its server starts, and snapshots have no phantom rows.
    """
    path, dtype = config.model.path, config.model.dtype
    num_real_ids = tokenizer_lib.vocabulary(tokenizer_lib.load_tokenizer(path)).bound
    snapshots = Snapshots(own_folder(root), "direct", ModelConfig.from_hf(path), num_real_ids, dtype, path)
    return snapshots.write(snapshots.take(hf.load(path, dtype)), "start", {})


#### Where snapshots lie


def own_folder(root: pathlib.Path) -> pathlib.Path:
    """A name below `root` for this process alone. What dead processes of this host left there is removed: it may fill memory."""
    host = socket.gethostname()
    if root.parent == run_folder.MEMORY_FOLDER:
        private(root)
    else:
        root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(f"{host}-*"):
        pid = path.name.removeprefix(f"{host}-")
        if pid.isdecimal() and not is_running(int(pid)):
            log.info("removing %s, left by a process that is gone", path)
            shutil.rmtree(path, ignore_errors=True)
    return root / f"{host}-{os.getpid()}"


def private(folder: pathlib.Path) -> None:
    """Makes a folder that only this user can look into; everybody could have foreseen its name, so what is there is not trusted.

    Raises:
      PermissionError: something is there, and it is no such folder.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"weights: {folder} is not this user's alone, so the policy is not written there -> remove it if it is yours, or set"
            " --config.weights.folder"
        )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


#### What the engine is tested with


def probe_text(prompts: Sequence[Ids], block: int, max_model_len: int) -> Ids:
    """Training prompts in a row, cut to more than a cache block: text like the engine's own work.

    Raises:
      ValueError: the context cannot hold it.
    """
    length = block + block // 4 + 1
    if length + GREEDY_TOKENS > max_model_len:
        raise ValueError(
            f"the weights are proven with a text of {length} tokens and {GREEDY_TOKENS} more, but rollout.max_model_len is "
            f"{max_model_len}: raise it"
        )
    ids = np.concatenate([prompt for prompt in prompts[:length]])
    return as_ids(np.resize(ids, length))


class SelfTestError(RuntimeError):
    """Engine and learner give the same tokens different probabilities."""


def self_test(engine: Engine, learner: Learner, prompts: Sequence[Ids], sampling: Sampling, seed: int, tolerance: float) -> float:
    """Samples short responses, scores them with the learner, and returns the mean |log-prob difference|.

    Raises:
      SelfTestError: it is above `tolerance`.
    """
    chosen = prompts[:SELF_TEST_PROMPTS]
    places = [(i % len(chosen), i // len(chosen)) for i in range(SELF_TEST_ROLLOUTS)]
    requests = [
        Request(ids, tuple(sample_seed(seed, 0, "self-test", i, j) for p, j in places if p == i), SELF_TEST_TOKENS)
        for i, ids in enumerate(chosen)
    ]
    made = [
        (request.prompt_ids, completion)
        for request, group in zip(requests, engine.generate(requests, sampling), strict=True)
        for completion in group
        if len(completion.ids)
    ]
    scores = learner.score([(prompt, completion.ids) for prompt, completion in made])
    gaps = np.abs(np.concatenate([s - c.logps for s, (_, c) in zip(scores, made, strict=True)]))
    mean, largest = float(gaps.mean()), float(gaps.max())
    log.info(
        "self-test: %d tokens, |log-prob difference| of engine and learner: mean %.2g, largest %.2g", len(gaps), mean, largest
    )
    if not mean <= tolerance:
        raise SelfTestError(
            f"the engine's log-probs of {len(gaps)} tokens that it sampled differ from the learner's by {mean:.2g} on average "
            f"(largest {largest:.2g}), expected at most {tolerance:g}. They are not the same policy, or not of the same "
            "distribution: compare vllm.extra_args with what the learner assumes"
        )
    return mean


#### The policy of an evaluation


class FrozenPolicy:
    """Stands where `open_engine` takes a learner, and has no optimizer. policy: the parameters, sharded on a mesh."""

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


def load_frozen(model: pathlib.Path, step: pathlib.Path | None, dtype: str, mesh: Mesh) -> tuple[ModelConfig, Any]:
    """The parameters in `dtype`, of a Hugging Face folder or of one complete checkpoint of a run that started from it."""
    config = ModelConfig.from_hf(model)
    abstract = abstract_params(config)
    shardings = sharding.parameter_shardings(abstract, mesh)
    if step is None:
        return config, hf.load(model, jnp.dtype(dtype), shardings)
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    params = read_arrays(step, wanted, "params.")
    return config, jax.tree.map(lambda x: x.astype(dtype), params)


def weights_digest(model: pathlib.Path, step: pathlib.Path | None) -> str:
    """Identifies the weights by their bytes (of a checkpoint, by its manifest, which holds every file's sha256)."""
    found = hashlib.sha256()
    for path in [step / MANIFEST] if step else sorted(pathlib.Path(model).glob("*.safetensors")):
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]
