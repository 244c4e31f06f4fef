"""The data set and the reward that docs/data.md shows work as they stand there."""

import json
import re

import pytest

from deepgrpo.data import dataset
from deepgrpo.preflight.values import wrong
from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import reward
from tests.conftest import ROOT

READER, REWARD = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)


def test_a_data_set_is_a_function_and_an_entry(tmp_path, monkeypatch):
    space: dict = {}
    exec(READER, space)
    monkeypatch.setitem(dataset.READERS, "riddles", space["riddles"])
    file = tmp_path / "riddles.jsonl"
    assert not wrong("data.train", (f"riddles:{file}",)), "its name is known to the command line"
    file.write_text(json.dumps({"riddle": "What is 2 + 2?", "solution": 4}) + "\n")
    (row,) = dataset.read(f"riddles:{file}")
    answer = graders.Answer(row.data_source, row.question, "", "It is \\boxed{4}.", "stop", row.ground_truth)
    assert graders.grade(answer).reward == 1.0
    file.write_text(json.dumps({"riddle": "", "solution": 4}) + "\n")
    with pytest.raises(ValueError, match="row 0: riddle must be text that is not empty"):
        dataset.read(f"riddles:{file}")


def test_a_reward_is_a_function_and_an_entry(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    answer = graders.Answer("MATH", "What is 2 + 2?", "", "It is \\boxed{4}.", "stop", "4")
    assert graders.grade(answer, reward.Rubric(extra=("my_rewards:brevity=0.2",))).reward == pytest.approx(1.2)
    monkeypatch.setitem(reward.REWARDS, "brevity", reward.resolve("my_rewards:brevity"))
    assert graders.grade(answer, reward.Rubric(extra=("brevity=0.5",))).reward == pytest.approx(1.5)
