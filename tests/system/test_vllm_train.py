"""The real training loop on carry-chain with a real vLLM: rollouts are the native engine's in law, whatever hits the server."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from deepgrpo.telemetry import metrics as metrics_lib
from tests.conftest import ROOT

PYTHON = pathlib.Path(os.environ.get("DEEPGRPO_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: {PYTHON} is absent, launch/vllm_env.sh makes it"),
]
STEPS = 14
HARM = {"5": "kill", "9": "kill_engine", "14": "hang"}  # generate's calls: self-test, validation, steps 1 to 7, validation, ...
VLLM = (
    *("--config.rollout.engine=vllm", f"--config.vllm.python={PYTHON}"),
    "--config.vllm.request_deadline=20",
)


def run(
    folder: pathlib.Path, start: list[str], *overrides: str, steps: int = STEPS
) -> tuple[list[dict[str, float]], pathlib.Path, str]:
    command = [
        *(
            sys.executable,
            *start,
            "--config=configs/carry_chain.py",
            f"--config.run_dir={folder}",
            f"--config.train.steps={steps}",
        ),
        *("--config.train.student_tokens=0", "--config.validation.every=7", "--config.data.validation_limit=32"),
        "--config.data.train=carry_chain:train:32",
        *("--config.telemetry.rollouts_every=1", "--config.telemetry.tensorboard=false", *overrides),
    ]
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics_lib.read(folder / "carry_chain"), folder / "carry_chain", done.stdout + done.stderr


@pytest.fixture(scope="module")
def native(student, tmp_path_factory):
    return run(tmp_path_factory.mktemp("native"), ["-m", "deepgrpo.train"])


@pytest.fixture(scope="module")
def harmed(student, tmp_path_factory):
    return run(tmp_path_factory.mktemp("vllm"), ["tests/system/disturbed_train.py", json.dumps(HARM)], *VLLM)


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_rollout_is_lost_and_the_run_ends_well(harmed):
    records, folder, output = harmed
    assert output.count("harmed: ") == len(HARM)
    assert records[-1]["step"] == STEPS and records[-1]["engine/restarts"] == len(HARM)
    for step in range(1, STEPS + 1):
        rollouts = lines(folder / "rollouts" / f"{step}.jsonl")
        groups = {}
        for rollout in rollouts:
            groups.setdefault(rollout["group"], []).append(rollout)
        assert all(len(group) == 8 for group in groups.values()) and len(groups) >= 16
        assert {rollout["finish_reason"] for rollout in rollouts} <= {"stop", "length"}


def test_engine_and_learner_are_one_policy_at_every_step(harmed):
    gaps = [record["rollout_mismatch/abs_max"] for record in harmed[0] if "rollout_mismatch/abs_max" in record]
    assert len(gaps) >= 2 and max(gaps) <= 1e-4
    versions = {row["weight_version"] for row in lines(harmed[1] / "rollouts" / f"{STEPS}.jsonl")}
    assert len(versions) == 1 and versions.pop() > 7


def test_greedy_answers_are_the_native_engines(native, harmed):
    ours, theirs = (lines(folder / "validation" / "0.jsonl") for _, folder, _ in (native, harmed))
    assert [row["output"] for row in ours] == [row["output"] for row in theirs]


def test_sampled_rollouts_are_the_native_engines_in_law(native, harmed):
    """The first step, before the runs part: same prompts, same policy, other streams. Means within 4 standard errors."""
    ours, theirs = (lines(folder / "rollouts" / "1.jsonl") for _, folder, _ in (native, harmed))
    assert [row["input"] for row in ours[::8]] == [row["input"] for row in theirs[::8]]
    for of in (lambda row: float(row["response_length"]), lambda row: float(row["output"][:24].count("1"))):
        a, b = (np.array([of(row) for row in rows]) for rows in (ours, theirs))
        error = np.sqrt(a.var() / len(a) + b.var() / len(b))
        assert abs(a.mean() - b.mean()) <= 4 * error + 1e-9
    assert len({row["output"] for row in theirs}) > len(theirs) / 2  # no two streams are the same
