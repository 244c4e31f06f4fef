"""Questions of reasoning-gym: read, graded, and refused. Against the package where it is installed, else against a stand-in."""

import importlib.util
import sys
import types

import pytest

from deepgrpo.data import dataset, reasoning_gym
from deepgrpo.data.cells import DataError
from deepgrpo.preflight.values import wrong_set
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import grade


class Sums:
    def __init__(self, seed, size, terms=2):
        self.seed, self.terms = seed, terms

    def __getitem__(self, item):
        numbers = [(self.seed * 31 + item * 7 + i) % 90 for i in range(self.terms)]
        return {"question": f"What is {' + '.join(map(str, numbers))}?", "answer": str(sum(numbers)), "metadata": {}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01


def create_dataset(name, seed, size, **options):
    if name != "chain_sum":
        raise ValueError(f"Dataset {name} not registered")
    return Sums(seed, size, **options)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    reasoning_gym.generator.cache_clear()
    if importlib.util.find_spec("reasoning_gym") is None:
        monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    yield
    reasoning_gym.generator.cache_clear()


def test_its_own_answers_are_right_and_others_wrong():
    rows = dataset.read("reasoning_gym:chain_sum:train:20")
    assert [row.question for row in rows] == [row.question for row in dataset.read("reasoning_gym:chain_sum:train:20")]
    other = dataset.read("reasoning_gym:chain_sum:heldout:20")
    assert {row.question for row in rows} != {row.question for row in other}
    for row in rows:

        def graded(text, row=row):
            return grade(Answer(row.data_source, row.question, "", text, "stop", row.ground_truth, row.extra))

        assert graded(f"So <answer>{row.ground_truth}</answer>").reward == 1.0
        assert graded(f"Answer: {row.ground_truth}").reason == "right"
        assert graded("<answer>no number</answer>").reward < 0.1 and graded("It is something.").reason == "unformatted"


@pytest.mark.parametrize(
    "spec", ["chain_sum:train:0", "chain_sum:test:5", "chain_sum", "nothing_of_that_name:train:5", "rush_hour:train:5"]
)
def test_what_is_no_set_is_refused(spec):
    with pytest.raises(DataError):
        dataset.read(f"reasoning_gym:{spec}")


def test_the_configuration_knows_its_form(monkeypatch):
    assert not wrong_set("reasoning_gym:chain_sum:train:2000:min_terms=2,max_terms=6")
    assert "GENERATOR" in wrong_set("reasoning_gym:chain_sum")
    assert reasoning_gym.parsed("a=2,b=x,c=(1, 2)"[:7]) == {"a": 2, "b": "x"}
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError) as error:
        dataset.read("reasoning_gym:chain_sum:train:7")
    assert "pip install" in error.value.remedy
