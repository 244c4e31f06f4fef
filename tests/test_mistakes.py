"""What a newcomer gets wrong at the entry points ends before anything expensive, with what was found and what to do."""

import argparse
import json
import shlex
import subprocess

import pytest

from benchmarks import exchange
from configs import common
from deepgrpo import config as config_lib
from deepgrpo import forest, prepare, warm_start
from deepgrpo.preflight import rules
from deepgrpo.teacher import oracle
from deepgrpo.telemetry import evaluation
from deepgrpo.weights import run_folder
from deepgrpo.weights.checkpoint import CheckpointError
from tests.conftest import ROOT
from tests.test_evaluate import run as evaluate
from tests.test_evaluate import write_model

DEMO = f"--config={ROOT / 'configs' / 'carry_chain.py'}"


def test_a_students_folder_that_is_in_use_is_refused_before_the_training(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config, line = rules.from_command_line(["warm_start", DEMO, f"--config.model.path={tmp_path}"])
    with pytest.raises(config_lib.ConfigError, match=f"model.path = {tmp_path} exists and is no student .* set another"):
        warm_start.main(config, line)


def test_an_evaluation_of_another_kind_of_file_says_so(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"q": "a", "a": "b"}\n')
    with pytest.raises(config_lib.ConfigError, match="lacks question, answer; it has q, a"):
        evaluate([f"--model={write_model(tmp_path)}"], tmp_path / "out", data__validation=f"gsm8k:{tmp_path}/set.jsonl")


def test_only_the_settings_that_differ_are_said(tmp_path):
    before = {"protocol": {"sets": {"math": {"problems": 500}}, "n": 1}, "seed": 0}
    evaluation.AnswerLog(tmp_path, before)
    with pytest.raises(evaluation.OtherSettings) as error:
        evaluation.AnswerLog(tmp_path, {"protocol": {"sets": {"math": {"problems": 8}}, "n": 1}, "seed": 0})
    assert str(error.value).splitlines()[1:] == ["  protocol.sets.math.problems: 500 then, 8 now"]


def test_a_run_that_is_not_there_is_compared_with_its_neighbours(tmp_path):
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "log.txt").touch()
    with pytest.raises(CheckpointError, match=f"no such folder; did you mean {tmp_path}/my-run\\?"):
        run_folder.step_folder(tmp_path / "myrun", best=False)
    with pytest.raises(CheckpointError, match="no complete checkpoint; expected a run's folder .*, found log.txt$"):
        run_folder.step_folder(tmp_path / "my-run", best=False)


def test_a_model_that_numbers_tokens_otherwise_is_refused(tmp_path):
    mine, other, step = tmp_path / "mine", tmp_path / "other", tmp_path / "run" / "checkpoints" / "1"
    for folder, last in ((mine, "b"), (other, "c")):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, last: 1}}}))
    step.mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"model.path": str(mine)}}))
    run_folder.require_vocabulary(step, mine)
    with pytest.raises(CheckpointError, match=f"--model={other}: its tokenizer has another vocabulary than {mine}"):
        run_folder.require_vocabulary(step, other)


def test_what_prepare_prints_can_be_given_to_a_training(tmp_path, capsys):
    row = {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}
    for split, numbers in (("train", range(3)), ("test", range(3, 5))):
        lines = [json.dumps(row | {"question": f"{n} + 1?"}) for n in numbers]
        (tmp_path / f"gsm8k_{split}.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit, match="is a file, expected a folder"):
        prepare.main(["gsm8k", f"--source={tmp_path}", f"--out={tmp_path}/gsm8k_train.jsonl"])
    prepare.main(["gsm8k", f"--source={tmp_path}", f"--out={tmp_path}/out", "--hold-out=1"])
    (printed,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("to use: ")]
    line = ["train", f"--config={ROOT / 'configs' / 'gsm8k_0p5b.py'}", *shlex.split(printed.removeprefix("to use: "))]
    data = rules.from_command_line(line)[0].data
    assert [data.train, data.validation, data.selection] == [
        (f"verl:{tmp_path}/out/{split}.parquet",) for split in ("train", "test", "selection")
    ]


def test_a_teacher_of_solutions_wants_its_file(capsys):
    with pytest.raises(SystemExit):
        oracle.main(["--rule=solutions:absent", "--port=0"])
    assert "no rule 'solutions:absent'; expected" in capsys.readouterr().err


def test_the_learner_of_the_benchmarks_is_made(tmp_path):
    assert exchange.make_learner(exchange.MODELS["tiny"], common.get_config(), tmp_path).policy


@pytest.mark.parametrize("name", ["demo", "env", "test", "train_gpu", "vllm_env"])
def test_help_of_a_script_does_nothing_but_print(name, tmp_path):
    script = ROOT / "launch" / f"{name}.sh"
    done = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and f"launch/{name}.sh" in done.stdout and not done.stderr
    assert done.stdout.splitlines()[0] == script.read_text().splitlines()[1].removeprefix("# ")


def test_a_number_of_trees():
    for text in ("-1", "x", "1.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number, 0 or more, found"):
            forest.natural(text)
