"""Opens the rollout engine that a configuration names, together with the way weights take to it."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.learner.learner import Learner
from deepgrpo.model.config import ModelConfig
from deepgrpo.rollout.engine import Engine, Request, Sampling, sample_seed
from deepgrpo.rollout.native import NativeEngine
from deepgrpo.rollout.vllm import VllmEngine
from deepgrpo.rollout.vllm_fleet import Deadlines, Fleet
from deepgrpo.rollout.vllm_http import GREEDY_TOKENS
from deepgrpo.rollout.vllm_server import VllmServer
from deepgrpo.types import Ids, as_ids
from deepgrpo.weights import hf, publish, run_folder
from deepgrpo.weights.publish import Publisher, Snapshots
from deepgrpo.weights.run_folder import weights_root

log = logging.getLogger(__name__)


SELF_TEST_PROMPTS, SELF_TEST_TOKENS = 8, 64

Publish = Callable[[Any, int], None]  # (parameters, version); see Publisher.publish


def open_engine(
    config: Any,
    stack: contextlib.ExitStack,
    *,
    learner: Learner,
    model_config: ModelConfig,
    num_real_ids: int,
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
    if config.rollout.engine == "native":
        engine = NativeEngine(
            model_config,
            learner.policy,
            jnp.dtype(config.model.dtype),
            num_real_ids,
            config.rollout.slots,
            config.rollout.decode_steps,
            version=version,
        )
        stack.callback(engine.close)
        return engine, engine.publish
    return open_vllm(
        config,
        stack,
        learner=learner,
        model_config=model_config,
        num_real_ids=num_real_ids,
        prompts=prompts,
        sampling=sampling,
        version=version,
        run=run,
    )


def open_vllm(
    config: Any,
    stack: contextlib.ExitStack,
    *,
    learner: Learner,
    model_config: ModelConfig,
    num_real_ids: int,
    prompts: Sequence[Ids],
    sampling: Sampling,
    version: int,
    run: pathlib.Path,
) -> tuple[VllmEngine, Publish]:
    """Snapshot, servers, proof, self-test. Arguments: see `open_engine`."""
    keys, weights = config.vllm, config.weights
    root = weights_root(config)
    folder = own_folder(root)
    dtype = keys.dtype or config.model.dtype
    snapshots = Snapshots(folder, weights.route, model_config, num_real_ids, dtype, config.model.path)
    stack.callback(snapshots.close)
    probe = probe_text(prompts, keys.block_size, sampling.max_model_len)
    publisher = Publisher(None, snapshots, learner, probe, weights.attempts, weights.keep, weights.tolerance)
    servers = attached_servers(config)  # first: a server that is absent or another run's is not worth a snapshot
    first = publisher.start(version)
    servers = servers or start_servers(config, stack, first.folder, root, dtype, run)
    fleet = Fleet(servers, config.name, Deadlines(keys.control_deadline, keys.load_deadline, keys.start_deadline))
    stack.callback(fleet.close)
    holes = model_config.holes
    engine = VllmEngine(fleet, num_real_ids, keys.block_size, keys.max_concurrent, keys.request_deadline, holes)
    publisher.confirm(fleet, first)
    if keys.self_test:
        self_test(engine, learner, prompts, sampling, keys.self_test, config.seed, publisher.tolerance)
    return engine, publisher.publish


def storing(config: Any, learner: Learner, model_config: ModelConfig, num_real_ids: int) -> Callable[[str], None]:
    """What the learner's other processes do for a publication (`Snapshots.take`): a function of the folder to write to."""
    published = dataclasses.replace(model_config, vocab_size=num_real_ids)
    dtype = jnp.dtype(config.vllm.dtype or config.model.dtype)

    def store(folder: str) -> None:
        publish.store(learner.policy, folder, published, dtype)

    return store


def attached_servers(config: Any) -> list[VllmServer]:
    """Those that the configuration names, once they are ready; none if it names none."""
    token = os.environ.get(config.vllm.token_env, "")
    return [VllmServer.attach(url, token, config.name, config.vllm.start_deadline) for url in config.vllm.attach]


def start_servers(
    config: Any, stack: contextlib.ExitStack, model: pathlib.Path, root: pathlib.Path, dtype: str, run: pathlib.Path
) -> list[VllmServer]:
    """Starts the configuration's servers, all at once."""
    keys = config.vllm
    with concurrent.futures.ThreadPoolExecutor(keys.servers, "vllm-start") as pool:
        starts = [pool.submit(start_server, config, index, model, root, dtype, run) for index in range(keys.servers)]
    for future in starts:
        if future.exception() is None:
            stack.callback(future.result().stop)
    return [future.result() for future in starts]  # raises the first error, after the others are sure to be stopped


def start_server(
    config: Any, index: int, model: pathlib.Path, root: pathlib.Path, dtype: str, run: pathlib.Path, **place: Any
) -> VllmServer:
    """Starts the `index`-th server of a configuration. place: host, port and token, where they are not to be any."""
    keys = config.vllm
    return VllmServer.start(
        model,
        python=keys.python,
        run_id=config.name,
        log_path=run / f"vllm-{index}.log",
        dtype=dtype,
        max_model_len=config.rollout.max_model_len,
        max_num_seqs=keys.max_num_seqs,
        weights_root=root,
        deadline=keys.start_deadline,
        gpu_ids=keys.gpu_ids[index * keys.tensor_parallel : (index + 1) * keys.tensor_parallel],
        tensor_parallel=keys.tensor_parallel,
        gpu_memory_utilization=keys.gpu_memory_utilization,
        block_size=keys.block_size,
        extra_args=keys.extra_args,
        **place,
    )


def serving_model(config: Any, root: pathlib.Path) -> pathlib.Path:
    """Writes the model that training starts from as snapshots are written, and returns the folder.

    For servers that run before their learner: a vocabulary is fixed when its server starts, and snapshots have no phantom rows.
    """
    path, dtype = config.model.path, config.vllm.dtype or config.model.dtype
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
            f"{max_model_len}: lower vllm.block_size ({block})"
        )
    ids = np.concatenate([prompt for prompt in prompts[:length]])
    return as_ids(np.resize(ids, length))


class SelfTestError(RuntimeError):
    """Engine and learner give the same tokens different probabilities."""


def self_test(
    engine: Engine, learner: Learner, prompts: Sequence[Ids], sampling: Sampling, rollouts: int, seed: int, tolerance: float
) -> float:
    """Samples `rollouts` short responses, scores them with the learner, and returns the mean |log-prob difference|.

    Raises:
      SelfTestError: it is above `tolerance`.
    """
    chosen = prompts[: min(SELF_TEST_PROMPTS, rollouts)]
    places = [(i % len(chosen), i // len(chosen)) for i in range(rollouts)]
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
            "distribution: compare vllm.dtype with model.dtype, and vllm.extra_args with what the learner assumes; a larger "
            "difference that you understand can be allowed with weights.tolerance"
        )
    return mean
