"""The teacher as the configuration puts it together."""

import contextlib

import pytest

from configs import carry_chain
from deepgrpo.curriculum.base import Curriculum
from deepgrpo.data.carry_chain import build_tokenizer
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.teacher import setup


@pytest.mark.parametrize("strict, expected", [(False, "text"), (True, "tokens")])
def test_strict_reference_cuts_on_tokens(tmp_path, monkeypatch, strict, expected):
    made = {}

    class Recorded(setup.Annotator):
        def __init__(self, **arguments):
            made.update(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr(setup, "Annotator", Recorded)
    build_tokenizer(tmp_path / "tokenizer")
    config = carry_chain.get_config()
    config.strict_reference = strict
    with contextlib.ExitStack() as stack:
        setup.open_teacher(
            config,
            stack,
            curriculum=Curriculum(config),
            grader=None,
            tokenizer=load_tokenizer(str(tmp_path / "tokenizer")),
            stop_ids=(2,),
            folder=tmp_path / "teacher",
        )
    assert made["splice"] == expected and made["strict_reference"] == strict
    assert made["prefix_aware"] and "####" in made["form"]("1 + 1?", "GSM8K")
