"""Names of data sets: what the rule takes is what the readers take, and a wrong one is the only problem that is reported."""

import pytest

from configs import carry_chain
from deepgrpo.config import constraints, data_rules, flatten
from deepgrpo.data import readers

RIGHT = ("carry_chain:train:4", "carry_chain:heldout:16", "arithmetic:train:3", "arithmetic:heldout:2:1", "arithmetic:train:2:3")
WRONG = ("carry_chain:trian:4", "carry_chain:train", "carry_chain:train:x", "carry_chain:train:0", "carry_chain:train:4:1")
WRONG += ("arithmetic:test:3", "arithmetic:train:3:4", "arithmetic:train:3:0", "arithmetic:train:-1", "arithmetic:train:3:1:1")


@pytest.mark.parametrize("name", RIGHT)
def test_right_generated_names(name):
    assert not data_rules.problem(name, constraints.READERS) and readers.read(name)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_generated_names_say_the_shape(name):
    text = data_rules.problem(name, constraints.READERS)
    assert name in text and "SPLIT:COUNT" in text and "train or heldout" in text
    with pytest.raises(ValueError):
        readers.read(name)


@pytest.mark.parametrize("key", ["train", "validation", "selection"])
def test_only_the_name_is_reported(key):
    config = carry_chain.get_config()
    config.data[key] = ("carrychain:train:16",)
    (problem,) = constraints.problems(config, flatten(config))
    assert problem.startswith(f"data.{key} = ") and problem.endswith("did you mean carry_chain?")
    config.data[key] = ("gsm8k:",)
    assert any(
        text.endswith("expected gsm8k:PATH, PATH a file or folder") for text in constraints.problems(config, flatten(config))
    )
