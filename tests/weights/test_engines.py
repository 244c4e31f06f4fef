"""Opening the engine that a configuration names: attached servers that are there, late, absent, or another run's."""

import contextlib
import dataclasses
import socket
import threading

import jax.numpy as jnp
import pytest

from configs import common
from deepgrpo.rollout import vllm_server
from deepgrpo.rollout.native import NativeEngine
from deepgrpo.rollout.vllm_server import VllmServerError
from deepgrpo.types import as_ids
from deepgrpo.weights import engines, hf, run_folder
from deepgrpo.weights.engines import open_engine
from tests.rollout import tiny
from tests.rollout.fake_vllm import FakeVllm
from tests.rollout.vllm_rig import Student, nudged, tokenizer_folder, weights

PROMPTS = [as_ids(range(4, 4 + n)) for n in (3, 9, 5)]


@pytest.fixture
def served(tmp_path):
    """A folder of other weights, with the vocabulary of snapshots: what a server that runs already serves."""
    folder = tokenizer_folder(tmp_path / "tokenizer")
    params = weights(9)
    embedding = {"embedding": params["embed_tokens"]["embedding"][: tiny.REAL]}
    config = dataclasses.replace(tiny.CONFIG, vocab_size=tiny.REAL)
    hf.save(params | {"embed_tokens": embedding}, config, tmp_path / "served", jnp.float32, folder)
    return tmp_path / "served"


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPGRPO_VLLM_TOKEN", "token")
    monkeypatch.setattr(vllm_server, "START_SECONDS", 5.0)
    monkeypatch.setattr(engines, "BLOCK_SIZE", 8)
    monkeypatch.setattr(engines, "SELF_TEST_ROLLOUTS", 6)
    with contextlib.ExitStack() as stack:

        def open_with(**keys):
            config = common.get_config()
            config.name, config.run_dir, config.model.path = "run", str(tmp_path), str(tmp_path / "tokenizer")
            config.model.dtype, config.weights.folder = "float32", str(tmp_path / "weights")
            config.rollout.slots = 4
            for key, value in keys.items():
                section, name = key.split("__")
                config[section][name] = value
            student = Student(weights(0))
            sampling = tiny.plain()
            return *open_engine(config, stack, student, PROMPTS, sampling, 7, tmp_path), student

        yield open_with


def generate(engine):
    return engine.generate(tiny.make_requests([9], samples=1, max_tokens=2), tiny.plain())[0][0]


def test_attached_server_gets_the_policy_and_later_ones(opened, served):
    fake = FakeVllm(served, ours=False)
    engine, publish, student = opened(rollout__engine="vllm", vllm__attach=(fake.url,))
    assert engine.version == 7 and generate(engine).version == 7
    student.policy = nudged(weights(0), 1e-5)
    publish(student.policy, 8)
    assert generate(engine).version == 8
    engine.close()
    assert fake.alive()  # not ours to stop


def test_a_late_server_is_waited_for(opened, served):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    timer = threading.Timer(0.5, lambda: FakeVllm(served, ours=False, port=port))
    timer.start()
    engine, *_ = opened(rollout__engine="vllm", vllm__attach=(f"http://127.0.0.1:{port}",))
    assert generate(engine).version == 7


def test_a_server_that_never_comes_ends_the_run_in_time(opened):
    with pytest.raises(VllmServerError, match=r"http://127.0.0.1:9 was not ready after \d+ s .*stage: health"):
        opened(rollout__engine="vllm", vllm__attach=("http://127.0.0.1:9",))


def test_another_runs_server_is_refused(opened, served):
    fake = FakeVllm(served, run_id="other", ours=False)
    with pytest.raises(VllmServerError, match="belongs to run other, expected run run"):
        opened(rollout__engine="vllm", vllm__attach=(fake.url,))
    assert not fake.bodies("/collective_rpc")


def test_native(opened):
    engine, publish, student = opened()
    assert isinstance(engine, NativeEngine) and engine.version == 7
    publish(student.policy, 8)
    assert generate(engine).version == 8


def test_a_folder_in_memory_is_private(tmp_path, monkeypatch):
    """Its name can be foreseen: what others have put there is not used."""
    monkeypatch.setattr(run_folder, "MEMORY_FOLDER", tmp_path)
    root = tmp_path / "deepgrpo-run"
    own = engines.own_folder(root)
    assert own.parent == root and root.stat().st_mode & 0o777 == 0o700
    assert engines.own_folder(root) == own  # of this user, by another of its programs
    root.chmod(0o755)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "file").touch()
    for place in (root, tmp_path / "link", tmp_path / "file"):
        with pytest.raises(PermissionError, match=f"{place} is not this user's alone.* -> .*--config.weights.folder"):
            engines.own_folder(place)
