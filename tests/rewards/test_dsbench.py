"""DSBench data modelling: the scale, the evaluation in the sandbox, and submissions that are not what they seem."""

import math
import os
import pathlib

import pytest

from deepgrpo.rewards.agents import external, sandbox
from deepgrpo.rewards.answer import Answer

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
for name in ("answer_file", "predict_file", "path", "name"):
    parser.add_argument("--" + name, required=True)
options = parser.parse_args()
read = lambda path: [line.strip() for line in open(path)]
key, said = read(options.answer_file), read(options.predict_file)
print(sum(a == b for a, b in zip(key, said, strict=True)) / len(key))
"""


@pytest.mark.parametrize(
    ("score", "baseline", "gold", "share"),
    [
        (0.75, 0.5, 1.0, 0.5),
        (0.4, 0.5, 1.0, 0.0),
        (1.5, 0.5, 1.0, 1.0),
        (3.0, 4.0, 2.0, 0.5),  # lower is better
        (5.0, 4.0, 2.0, 0.0),
        (1.0, 4.0, 2.0, 1.0),
        (math.nan, 0.0, 1.0, 0.0),
        (math.inf, 0.0, 1.0, 0.0),
        (-math.inf, 4.0, 2.0, 0.0),
        (0.5, 0.5, 0.5, None),
        (0.5, math.nan, 1.0, None),
        (0.5, 0.0, math.inf, None),
    ],
)
def test_scale(score, baseline, gold, share):
    assert external.normalised(score, baseline, gold) == share


def test_strict_scale_has_no_top():
    assert external.normalised(2.0, 0.0, 1.0, clip=False) == 2.0


@pytest.fixture
def row(tmp_path):
    (tmp_path / "evaluate_task.py").write_text(SCRIPT)
    (tmp_path / "key.csv").write_text("1\n0\n1\n0\n")
    (tmp_path / "workspace").mkdir()
    return {
        "expected_file": "submission.csv",
        "ground_truth": str(tmp_path / "key.csv"),
        "evaluation_script": str(tmp_path / "evaluate_task.py"),
        "workspace": str(tmp_path / "workspace"),
        "baseline_result": 0.5,
        "gold_result": 1.0,
    }


def graded(row, response="<Answer>done</Answer>", **options):
    answer = Answer("DSBench_data_modeling", "", "", response, "stop", row, {})
    return external.grade_dsbench(answer, **({"allow_network": True} | options))


def submit(row, content="1\n0\n1\n1\n"):
    with open(os.path.join(row["workspace"], "submission.csv"), "w") as file:
        file.write(content)


def test_evaluation(row):
    submit(row)
    assert (graded(row).reward, graded(row).answer) == (0.5, "0.75")
    flat = Answer("DSBench_data_modeling", "", "", "<Answer></Answer>", "stop", row["ground_truth"], row)
    assert external.grade_dsbench(flat, allow_network=True).reward == 0.5
    submit(row, "1\n0\n1\n0\n")
    assert (graded(row).reward, graded(row).reason) == (1.0, "right")
    assert graded(row, "no tag").reason == "unformatted"
    pathlib.Path(row["workspace"], "submission.csv").unlink()
    assert (graded(row).reward, graded(row).reason) == (0.0, "no_submission")


def test_bad_submissions_earn_nothing(row, tmp_path):
    submit(row, "1\n")  # the script fails
    assert (graded(row).reward, graded(row).reason) == (0.0, "bad_submission")
    path = tmp_path / "workspace" / "submission.csv"
    path.unlink()
    path.symlink_to(tmp_path / "key.csv")
    assert graded(row).reason == "no_submission"
    path.unlink()
    os.mkfifo(path)
    assert graded(row).reason == "no_submission"
    assert graded(row | {"expected_file": "../key.csv"}).reason == "no_submission"
    (tmp_path / "workspace" / "folder").symlink_to(tmp_path)
    assert graded(row | {"expected_file": "folder/key.csv"}).reason == "no_submission"


def test_what_the_answer_cannot_help_is_no_verdict(row, tmp_path, monkeypatch):
    submit(row)
    assert (graded(row | {"gold_result": 0.5}).reward, graded(row | {"gold_result": 0.5}).reason) == (None, "no_scale")
    (tmp_path / "lacking.py").write_text("import no_such_module_here")
    assert graded(row | {"evaluation_script": str(tmp_path / "lacking.py")}).reward is None
    (tmp_path / "endless.py").write_text("import time; time.sleep(100)")
    assert graded(row | {"evaluation_script": str(tmp_path / "endless.py")}, seconds=0.5).reason == "evaluation"
    with pytest.raises(FileNotFoundError):
        graded(row | {"evaluation_script": str(tmp_path / "absent.py")})

    def fails(*_, **__):
        raise sandbox.SandboxError("planted")

    monkeypatch.setattr(sandbox, "run", fails)
    assert (graded(row).reward, graded(row).reason) == (None, "sandbox")
