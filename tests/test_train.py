"""The real training loop on carry-chain: it learns, resumes bit for bit, ends cleanly, and lives without a teacher."""

import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np
import pytest

from deepgrpo import train
from deepgrpo.learner import sharding
from deepgrpo.model.config import ModelConfig
from deepgrpo.model.transformer import abstract_params
from deepgrpo.preflight import rules
from deepgrpo.teacher.oracle import MODEL, Oracle
from deepgrpo.telemetry import metrics as metrics_lib
from deepgrpo.weights.checkpoint import Checkpoints, read_arrays
from tests.conftest import QUICK, ROOT

STEPS = 8
# 16 problems in batches of up to 16: with hard states in the places of most, epochs end in the middle of this run.
SMALL = {
    **{"train.student_tokens": 0, "train.steps": STEPS, "data.validation_limit": 16, "validation.every": 2},
    **{"checkpoint.every": 2, "data.train": "carry_chain:train:16", "telemetry.rollouts_every": 3},
    **{
        "telemetry.tensorboard": "false",
        "learner.micro_batch_tokens": 4 * 112,
    },  # little padding in the small batches of these tests
}


def command(folder: pathlib.Path, **overrides: object) -> list[str]:
    """Keyword names are keys with __ for the dot."""
    keys = SMALL | {"run_dir": folder} | {name.replace("__", "."): value for name, value in overrides.items()}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "deepgrpo.train", "--config=configs/carry_chain.py", *flags]


def start(folder: pathlib.Path, environment: dict[str, str] | None = None, **overrides: object) -> subprocess.Popen:
    return subprocess.Popen(
        command(folder, **overrides),
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": QUICK} | (environment or {}),  # one device: eight show nothing here
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, status: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def in_process(folder: pathlib.Path, **overrides: object) -> list[dict[str, float]]:
    """The metrics of such a run in this process, on its first device."""
    one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    with mock.patch.object(sharding, "make_mesh", one):
        train.main(*rules.from_command_line(command(folder, **overrides)[2:]))
    return metrics_lib.read(next(folder.glob("*/metrics.jsonl")))


def outcome(folder: pathlib.Path, student: pathlib.Path) -> dict[str, object]:
    """What a run came to: parameters, forest, data position, every reproducible metric, validation answers."""
    run = folder / "carry_chain"
    step = run / "checkpoints" / str(STEPS)
    params = read_arrays(step, abstract_params(ModelConfig.from_hf(student)), prefix="params.")
    return {
        "params": {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)},
        "forest": {path.name: path.read_bytes() for path in sorted((step / "curriculum").iterdir())},
        "host": json.loads((step / "host.json").read_text()),
        "metrics": [metrics_lib.reproducible(record) for record in metrics_lib.read(run)],
        "validation": {path.name: path.read_text() for path in sorted((run / "validation").glob("*"))},
        "rollouts": {path.name: path.read_text() for path in sorted((run / "rollouts").glob("*"))},
    }


def assert_resumes_the_same(folder: pathlib.Path, student: pathlib.Path, **overrides: object) -> None:
    """From its checkpoint half way, a finished run that keeps two comes to the same again."""
    whole = outcome(folder, student)
    assert (folder / "carry_chain" / "checkpoints" / str(STEPS // 2)).is_dir()
    shutil.rmtree(folder / "carry_chain" / "checkpoints" / str(STEPS))  # as if it had been killed before
    in_process(folder, **overrides)
    assert_same(whole, outcome(folder, student))


def assert_same(one: dict, other: dict) -> None:
    for key, value in one["params"].items():
        np.testing.assert_array_equal(other["params"][key], value, err_msg=key)
    assert other["forest"] == one["forest"]
    for ours, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert theirs == ours
    assert other["validation"] == one["validation"] and other["rollouts"] == one["rollouts"]
    for part in ("dataset", "learner", "suffix_sft"):
        assert other["host"][part] == one["host"][part]
    assert other["host"]["step"] == one["host"]["step"] == STEPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    in_process(folder)
    return folder


def logged(folder: pathlib.Path) -> int:
    """The last step of a run's metrics, -1 without any."""
    path = folder / "carry_chain" / "metrics.jsonl"
    records = metrics_lib.read(path) if path.exists() else []
    return int(records[-1]["step"]) if records else -1


def wait_for(condition: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not come that far"
        time.sleep(0.02)


def test_hard_states_give_a_gradient_where_plain_grpo_has_none(student, whole, tmp_path):
    plain = in_process(tmp_path, curriculum__pool="none", train__steps=3, validation__every=0)
    assert all(record["training/all_chains_empty_skip"] == 1.0 for record in plain)  # every group all-fail
    forest = metrics_lib.read(whole / "carry_chain")
    assert forest[0]["step"] == 0 and forest[-1]["step"] == STEPS  # validated before the first step
    assert forest[-1]["forest/active_nonroot_nodes"] > 0 and forest[-1]["teacher_worker/total_succeeded"] > 0
    assert sum(record.get("actor/optimizer_steps", 0.0) for record in forest) >= 1
    assert all(record["rollout_mismatch/abs_max"] <= 1e-4 for record in forest if "rollout_mismatch/abs_max" in record)
    best = json.loads((whole / "carry_chain" / "best_checkpoint.json").read_text())
    assert best["metric"] == "val-core/carry_chain/reward/mean@1" and best["label"] == "selected on a reported set"
    assert {"forest_pool/num_trees", "forest/num_trees", "teacher_suffix/accepted", "timing_s/step"} <= forest[-1].keys()


@pytest.mark.system
def test_killed_and_stopped_again_and_again_it_resumes_bit_for_bit(student, tmp_path_factory, tmp_path):
    """Killed while it writes a checkpoint, after it renamed one and in a step; stopped by a signal, which saves."""
    whole = tmp_path_factory.mktemp("whole")
    finish(start(whole))
    finish(start(tmp_path, {"DEEPGRPO_CRASH_AT": "mid_write@4"}), -signal.SIGKILL)
    finish(start(tmp_path, {"DEEPGRPO_CRASH_AT": "after_rename@4"}), -signal.SIGKILL)
    process = start(tmp_path)
    wait_for(lambda: logged(tmp_path) >= 5, process)  # step 6 is under way
    process.kill()
    process.communicate()
    process = start(tmp_path, checkpoint__every=0)
    wait_for(lambda: logged(tmp_path) >= 6, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert "resumed from" in output and "stopped by a signal" in output
    assert Checkpoints(tmp_path / "carry_chain" / "checkpoints", 1).latest_step() >= 6
    finish(start(tmp_path))
    assert_same(outcome(whole, student), outcome(tmp_path, student))
    assert "nothing to do" in finish(start(tmp_path))


def test_teacher_down_training_goes_on(student, tmp_path, monkeypatch):
    """The endpoint dies for good after the first step: GRPO continues, the outage shows, waiting failures stay."""
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    with Oracle("carry_chain") as oracle:

        def kill_after_the_first_step():
            wait_for(lambda: logged(tmp_path) >= 1)
            oracle.close()

        killer = threading.Thread(target=kill_after_the_first_step)
        killer.start()
        records = in_process(
            tmp_path,
            train__steps=5,
            validation__every=0,
            teacher__base_url=oracle.base_url,
            teacher__model=MODEL,
        )
        killer.join(timeout=60)
    assert records[-1]["step"] == 5
    assert records[-1]["teacher/breaker_state"] > 0
    assert records[-1]["teacher/events_dispatchable"] > 0


def test_a_recorded_run_is_replayed_without_an_endpoint(student, whole, tmp_path):
    again = in_process(tmp_path, teacher__replay=whole / "carry_chain" / "teacher")
    first = metrics_lib.read(whole / "carry_chain")
    assert again[-1]["teacher/http_requests"] == 0 and first[-1]["teacher/http_requests"] > 0
    same = [key for key in first[-1] if key.startswith(("forest/", "critic/", "val-"))]
    assert [{k: r.get(k) for k in same} for r in again] == [{k: r.get(k) for k in same} for r in first]


def test_one_step_ahead_is_one_version_behind_and_resumes_the_same(student, tmp_path):
    settings = {"rollout__max_staleness": 1, "validation__every": 0, "checkpoint__every": STEPS // 2, "checkpoint__keep": 2}
    settings |= {"objective__tis_cap": 2.0, "telemetry__rollouts_every": 0, "data__batch_size": 8}
    settings |= {"optim__mini_batch_prompts": 8, "rollout__n": 4, "objective__teacher_loss": "luffy"}  # whose steps all train
    stale = [record["rollout_mismatch/staleness"] for record in in_process(tmp_path, **settings)]
    assert max(stale) == 1 and stale[STEPS // 2] == 0  # the step after a checkpoint is on policy
    assert_resumes_the_same(tmp_path, student, **settings)
