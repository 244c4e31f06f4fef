"""A tiny learner, its fake servers, and the publisher between them."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.rollout.vllm import VllmEngine
from deepgrpo.rollout.vllm_fleet import Deadlines, Fleet
from deepgrpo.types import as_ids
from deepgrpo.weights import hf
from deepgrpo.weights.publish import Publisher, Snapshots
from tests.rollout import tiny
from tests.rollout.fake_vllm import FakeVllm, Knobs

BLOCK = 8
PROBE = as_ids(np.random.default_rng(1).integers(0, tiny.REAL, 13))
QUICK = Deadlines(control=30.0, load=30.0, start=60.0)


@functools.cache
def weights(seed: int):
    return tiny.random_params(seed)


def nudged(params, size: float):
    """An update far below what bfloat16 can tell apart in a log-prob."""
    return jax.tree.map(lambda x: x + size * jnp.sign(x), params)


class Student:
    """What the publisher asks of a learner."""

    def __init__(self, params):
        self.policy = params
        config = dataclasses.replace(tiny.CONFIG, tokenizer_size=tiny.REAL)
        self.model = types.SimpleNamespace(config=config, dtype=jnp.float32)

    def announce(self, name, **fields):
        """A learner of one process has nobody to tell."""

    def start_score(self, sequences, at_temperature_1=False):
        scores = self.score(sequences)
        return lambda: scores

    def score(self, sequences):
        plain = tiny.plain()
        return [
            tiny.learner_logps(self.policy, tiny.Request(prompt, (0,)), types.SimpleNamespace(ids=ids), plain).astype(np.float32)
            for prompt, ids in sequences
        ]


def tokenizer_folder(path):
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "temperature": 0.3, "top_k": 7}))
    return path


class Rig:
    """servers: fakes, started on version 0 as a run starts its own; `attached` ones hold other weights and are no one's child."""

    def __init__(self, tmp_path, servers=1, attached=False, knobs=(), deadlines=QUICK, request_deadline=60.0, route="direct"):
        self.student = Student(weights(0))
        tokenizer = tokenizer_folder(tmp_path / "tokenizer")
        self.snapshots = Snapshots(tmp_path / "weights", route, tiny.CONFIG, tiny.REAL, jnp.float32, tokenizer)
        self.publisher = Publisher(self.snapshots, self.student, PROBE)
        first = self.publisher.start(0)
        folder = first.folder
        if attached:
            folder = tmp_path / "other"
            hf.save(self.snapshots._parts(self.snapshots.take(weights(9)), None), self.snapshots.config, folder, jnp.float32)
        self.fakes = [FakeVllm(folder, ours=not attached, knobs=knobs[i] if knobs else Knobs()) for i in range(servers)]
        self.fleet = Fleet(self.fakes, "run", deadlines)
        self.engine = VllmEngine(self.fleet, tiny.REAL, request_deadline)
        self.publisher.confirm(self.fleet, first)
        for fake in self.fakes:
            fake.calls.clear()

    def publish(self, params, version):
        self.student.policy = params
        self.publisher.publish(params, version)

    def kept(self):
        """Names of the snapshots on disk, once what is to go has gone."""
        self.snapshots._sweeper.submit(lambda: None).result()
        return sorted(path.name for path in self.snapshots.folder.iterdir())

    def close(self):
        self.engine.close()
        self.publisher.close()
