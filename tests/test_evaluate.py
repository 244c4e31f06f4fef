"""Evaluations on a tiny random model: what is asked, resumed, marked again, compared, and labelled."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from deepgrpo import config as config_lib
from deepgrpo import evaluate
from deepgrpo.rewards.service import GradingService
from deepgrpo.telemetry import compare, evaluation
from deepgrpo.weights import hf
from deepgrpo.weights.checkpoint import CheckpointError, Checkpoints
from tests.conftest import ROOT
from tests.data import small_tokenizer
from tests.rollout import tiny
from tests.rollout.fake_vllm import FakeVllm
from tests.test_train import in_process

MODEL = dataclasses.replace(tiny.CONFIG, vocab_size=272)  # 12 rows more than the tokenizer has tokens
KEYS = {
    **{"requires_accelerator": False, "model.dtype": "float32", "learner.buckets": 64},
    **{"data.validation": "arithmetic:heldout:10:1,carry_chain:heldout:3", "data.template": "none", "data.max_prompt_length": 40},
    **{"rollout.max_model_len": 64, "rollout.slots": 16},
    **{"evaluation.max_new_tokens": 9, "evaluation.n": 4, "evaluation.temperature": 1.0, "rewards.workers": 1},
}


def write_model(folder, seed: int = 0):
    """A random decoder with a byte tokenizer, as a Hugging Face folder."""
    small_tokenizer.write(folder / "model")
    hf.save(tiny.random_params(seed, MODEL), MODEL, folder / "weights", jnp.float32)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / "weights" / name, folder / "model" / name)
    return folder / "model"


def run(flags: list, out, **overrides) -> dict:
    """`overrides`: keys, with __ for the dot."""
    keys = KEYS | {name.replace("__", "."): value for name, value in overrides.items()}
    line = [f"--config={ROOT / 'configs' / 'eval_seed.py'}", *(f"--config.{key}={value}" for key, value in keys.items())]
    args, rest = evaluate.arguments([*map(str, flags), f"--out={out}", *line])
    return evaluate.main(*evaluate.configure(args, rest), args.out)


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "CHUNK", 4)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def evaluated(model, tmp_path_factory):
    """A finished evaluation: its folder and result."""
    out = tmp_path_factory.mktemp("out") / "a"
    return out, run([f"--model={model}"], out)


def test_result(evaluated, capsys):
    out, result = evaluated
    protocol, scores = result["protocol"], result["scores"]
    assert json.loads((out / evaluation.RESULT).read_text()) == result
    assert {name: entry["problems"] for name, entry in protocol["sets"].items()} == {"arithmetic": 10, "carry_chain": 3}
    assert set(scores["arithmetic"]["scores"]) == {"avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"}
    assert scores["arithmetic"]["second"] is None and result["second_grader"] == "compat_fast"  # no mathematics of the reference
    assert scores["mean"]["scores"]["avg@4"]["problems"] == 13 and scores["arithmetic"]["excluded"] == 0
    lines = evaluation.read_lines(out / evaluation.ANSWERS)
    assert len(lines) == 13 and {len(line["answers"]) for line in lines} == {4}
    tokens = [answer["tokens"] for line in lines for answer in line["answers"]]
    assert max(tokens) == 9 and scores["arithmetic"]["truncated_share"] > 0.5
    assert {a["reason"] for line in lines for a in line["answers"] if a["finish_reason"] == "length"} == {"truncated"}
    evaluation.show(evaluation.result_table(result))
    printed = capsys.readouterr().out
    for said in ("template none", "stop ids 2", "limit 9 new tokens, context 64", "score 0", protocol["grader"], "native, jax"):
        assert said in printed


def test_a_killed_one_goes_on_to_the_same_numbers(evaluated, model, tmp_path):
    out, result = evaluated
    shutil.copytree(out, tmp_path / "b")
    (tmp_path / "b" / evaluation.RESULT).unlink()
    log = (tmp_path / "b" / evaluation.ANSWERS).read_text().splitlines(keepends=True)
    torn = [*log[:4], *log[4:7], log[7][: len(log[7]) // 2]]  # one chunk is whole, the next was being written
    (tmp_path / "b" / evaluation.ANSWERS).write_text("".join(torn))
    assert run([f"--model={model}"], tmp_path / "b") == result
    assert "1 of 4 chunks are there" in (tmp_path / "b" / "log.txt").read_text()
    assert (tmp_path / "b" / evaluation.ANSWERS).read_text() == "".join(log)
    with pytest.raises(config_lib.ConfigError, match="seed: 0 then, 1 now"):
        run([f"--model={model}"], tmp_path / "b", seed=1)


def test_cut_off_answers_may_be_graded(evaluated, model, tmp_path, capsys):
    result = run([f"--model={model}"], tmp_path / "a", evaluation__truncated="graded")
    reasons = [r for item in result["items"]["arithmetic"] for r in item["reasons"]]
    assert "truncated" not in reasons and result["scores"]["arithmetic"]["truncated_share"] > 0.5
    with pytest.raises(compare.NotComparable, match="truncated: 'zero' in a, 'graded' in b"):
        compare.compare([evaluated[1]], [result], (["a"], ["b"]))
    assert compare.main([str(evaluated[0]), str(tmp_path / "a"), "--force"]) == 0
    printed = capsys.readouterr().out
    assert "not alike: truncated: 'zero'" in printed and "unknown (?) from fewer than two seeds" in printed


def test_marked_again(evaluated, monkeypatch):
    out, result = evaluated
    again, changes = evaluation.regrade(out)
    assert again == result and changes.startswith("0 of 52 verdicts changed")
    lines = evaluation.read_lines(out / evaluation.ANSWERS)
    submit = GradingService.submit
    right = {line["question"]: line["ground_truth"] for line in lines}

    def generous(self, answer):
        whole = dataclasses.replace(answer, data_source="GSM8K", response=f"#### {right[answer.question]}", finish_reason="stop")
        return submit(self, whole if answer.data_source == "arithmetic" else answer)

    monkeypatch.setattr(GradingService, "submit", generous)
    monkeypatch.setattr(evaluation, "grader_version", lambda: "new")
    again, changes = evaluation.regrade(out)
    assert again["protocol"]["grader"] == "new" and (out / "regraded-typed-new.json").is_file() and changes[0] != "0"
    assert json.loads((out / evaluation.RESULT).read_text()) == result


def test_the_references_rule_beside_ours(evaluated):
    answer = {"response": "\\boxed{-2,1}", "ending": "", "tokens": 5, "finish_reason": "stop", "reward": 1.0, "reason": "right"}
    entry = {"set": "MATH", "id": "0", "data_source": "MATH", "question": "Roots?", "ground_truth": ["1,-2"], "extra": {}}
    entry |= {"prompt": "Roots? \\boxed{}", "answers": [answer | {"answer": "-2,1"}]}
    protocol = evaluated[1]["protocol"] | {"sets": {"MATH": {}}, "n": 1}
    found = evaluation.result_of({"protocol": protocol, "left_out": {}, "second_grader": "compat_fast"}, [entry])["scores"][
        "MATH"
    ]
    assert (found["scores"]["avg@1"]["mean"], found["second"]["mean"]) == (1.0, 0.0)  # the deployed rule keeps a list's order
    entry["data_source"] = "ds1000"
    with pytest.raises(evaluation.NotOffline, match="ds1000: marked by a judge or by running a program"):
        evaluation.mark_again([entry], protocol, 1, 5.0)


def test_vllm_gives_the_same_greedy_answers(model, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPGRPO_VLLM_TOKEN", "token")
    greedy = {"evaluation__n": 1, "evaluation__temperature": 0.0}
    native = run([f"--model={model}"], tmp_path / "native", **greedy)
    real = dataclasses.replace(MODEL, vocab_size=260)
    params = tiny.random_params(3, MODEL)  # other weights: the evaluation has to bring its own
    embedding = {"embedding": params["embed_tokens"]["embedding"][:260]}
    hf.save(params | {"embed_tokens": embedding}, real, tmp_path / "served", jnp.float32, model)
    fake = FakeVllm(tmp_path / "served", run_id="eval-seed-math", ours=False)
    keys = {"rollout__engine": "vllm", "vllm__attach": fake.url, "weights__folder": tmp_path / "w"}
    served = run([f"--model={model}"], tmp_path / "vllm", **greedy, **keys)
    assert served["items"] == native["items"] and served["protocol"]["engine"] == "vllm of attached servers"
    texts = [[a["response"] for line in evaluation.read_lines(tmp_path / name / evaluation.ANSWERS) for a in line["answers"]]
             for name in ("native", "vllm")]  # fmt: skip
    assert texts[0] == texts[1] and len(set(texts[0])) > 5


@pytest.mark.parametrize("chosen_on, labelled", [("arithmetic:heldout:20:1", True), ("arithmetic:train:20:1", False)])
def test_a_checkpoint_that_was_chosen_on_what_is_reported(model, tmp_path, chosen_on, labelled):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    params = tiny.random_params(0, MODEL)
    for step, score in ((1, 0.9), (2, 0.1)):
        checkpoints.note_validation(step, {"val-core/X/reward/mean@1": score})
        checkpoints.save(step, {"params": jax.tree.map(lambda x, step=step: x + (step - 1), params)}, {})
    record = {"model.path": str(model), "data.validation": [chosen_on], "data.selection": []}
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": record}))
    best = run([f"--checkpoint={tmp_path / 'run'}", "--best"], tmp_path / "best")
    assert best["model"]["path"].endswith("checkpoints/1")
    assert best["selection"] == {"sets": [chosen_on], "label": "selected on a reported set" if labelled else ""}
    newest = run([f"--checkpoint={tmp_path / 'run'}"], tmp_path / "newest")
    assert newest["model"]["path"].endswith("checkpoints/2") and newest["selection"] == {"sets": [], "label": ""}
    assert best["model"]["weights"] != newest["model"]["weights"]


def test_training_chooses_on_its_own_sets(student, tmp_path):
    def best(**more) -> dict:
        keys = {"train__steps": 1, "data__validation_limit": 4, "data__selection": "carry_chain:heldout:64"}
        in_process(tmp_path, **keys | more)
        return json.loads((tmp_path / "carry_chain" / "best_checkpoint.json").read_text())

    with pytest.raises(SystemExit, match="4 questions of data.selection are also in"):
        best()
    held = best(data__allow_overlap=True)
    assert held["metric"] == "selection/val-core/carry_chain/reward/mean@1" and "label" not in held


def test_command_line(evaluated, model, tmp_path):
    command = [sys.executable, "-m", "deepgrpo.evaluate", "compare", str(evaluated[0]), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "Traceback" not in done.stderr and "result of a finished evaluation" in done.stderr
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run([f"--checkpoint={tmp_path}"], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="expected the folder of an evaluation"):
        evaluation.regrade(tmp_path)
