"""Search questions: which answer counts, structure, reward levels, and the reference's verdicts."""

import dataclasses
import re
import unicodedata

import hypothesis
import hypothesis.strategies as st
import pytest

from deepgrpo.rewards import search_qa
from deepgrpo.rewards.answer import Answer
from tests.rewards import golden

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
GOOD = (
    "<think>a</think>\n<search>q</search>\n\n<information>Vienna: Danube</information>\n\n<think>b</think><answer>Danube</answer>"
)


def graded(response, key=("Danube",), prefix="", validation=False, **levels):
    answer = Answer("hotpotqa", "Which river?", prefix, response, "stop", list(key), validation=validation)
    return search_qa.grade(answer, **levels)


@pytest.mark.parametrize("case", golden.cases("qa_train", "qa_val"))
def test_golden(case):
    if case["finish"] == "stop":
        golden.check_person(case, search_qa.grade(golden.as_answer(case)))
    golden.check_reference(case, search_qa.grade_strict_reference)


@pytest.mark.parametrize(
    ("response", "training", "validation"),
    [
        (GOOD, 1.0, 1.0),
        (GOOD + "<|im_end|> more", 1.0, 1.0),
        (GOOD + " more", 0.8, 1.0),
        (GOOD.replace(">Danube<", ">Rhine<"), 0.2, 0.0),
        (GOOD.replace(">Danube<", "> <"), 0.2, 0.0),
        ("<answer>Rhine</answer>", 0.1, 0.0),
        ("Danube", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<answer>Danube</answer><|im_end|><answer>Rhine</answer>", 0.8, 1.0),
        ("<answer>Rhine</answer><|im_end|><answer>Danube</answer>", 0.1, 0.0),
    ],
)
def test_every_level_is_reachable(response, training, validation):
    assert graded(response).reward == pytest.approx(training)
    assert graded(response, validation=True).reward == validation


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think><search>q</search><information><answer>Danube</answer></information><think>b</think>",
        "<think>is it <answer>Danube</answer>?</think>",
        "<think>a</think><search><answer>Danube</answer></search>",
        "<think>x</think><answer>Danube",
        "<answer></answer>",
    ],
)
def test_what_stands_inside_other_tags_or_is_not_closed_is_no_answer(response):
    grade = graded(response, validation=True)
    assert (grade.reward, grade.completed, grade.reason) == (0.0, False, "unformatted")


def test_every_answer_must_be_right_and_nested_ones_are_one():
    hedged = graded("<answer>Rhine</answer> no: <answer>Danube</answer>", validation=True)
    assert (hedged.answer, hedged.reward) == ("Danube", 0.0)
    assert graded("<answer>Danube</answer> yes: <answer>the Danube</answer>", validation=True).reward == 1.0
    assert graded("<answer>it is <answer>Danube</answer></answer>").answer == "Danube"


@pytest.mark.parametrize("cut", [4, GOOD.index("<search>") + 9, GOOD.index("Vienna"), GOOD.index("b</think>") + 1])
def test_a_prefix_is_part_of_the_structure_but_earns_nothing(cut):
    assert graded(GOOD[cut:], prefix=GOOD[:cut]).reward == 1.0
    assert graded("", prefix=GOOD).reward == 0.0
    assert graded("Danube</answer>", prefix=GOOD.removesuffix("Danube</answer>")).answer == ""
    assert re.search(search_qa.LEAK, GOOD) and not re.search(search_qa.LEAK, GOOD[: GOOD.index("<answer>")])


def test_retrieval_bonus_and_keys():
    levels = search_qa.Levels(retrieved=0.05)
    assert graded(GOOD.replace(">Danube<", ">Rhine<"), training=levels).reward == pytest.approx(0.25)
    assert graded(GOOD.replace(">Danube<", ">Rhine<"), ["Dan"], training=levels).reward == pytest.approx(0.2)
    assert graded(GOOD, ["", "the danube"]).reward == 1.0
    for nothing in ([], [""], [None]):
        grade = graded(GOOD, nothing)
        assert grade.reward is None and grade.reason == "bad_key"


def test_token_f1():
    assert search_qa.token_f1("the Danube River", ["Danube"]) == pytest.approx(2 / 3)
    assert search_qa.token_f1("Rhine", ["Danube", "Rhine!"]) == 1.0
    assert search_qa.token_f1("Rhine", []) == 0.0


def test_the_reference_never_finds_valid_structure_behind_an_end_token():
    answer = Answer(
        "hotpotqa", "", "", GOOD, "stop", ["Danube"], prompt="<answer> <answer>e.g. Rome</answer>" * 2 + "<|im_start|>assistant"
    )
    assert search_qa.grade_strict_reference(answer).reward == 1.0
    assert search_qa.grade_strict_reference(dataclasses.replace(answer, ending="<|im_end|>")).reward == pytest.approx(0.8)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from([*TAGS, "Danube", " ", "a\u0301", "\ud800"]) | st.text(max_size=5), max_size=30).map("".join)
)
def test_any_text_has_a_verdict(text):
    for validation in (False, True):
        grade = graded(text, validation=validation)
        assert 0.0 <= grade.reward <= 1.0 and grade.completed == bool(grade.answer)
        strict = search_qa.grade_strict_reference(Answer("hotpotqa", text, text, text, "stop", ["Danube"], validation=validation))
        assert 0.0 <= strict.reward <= 1.0


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.text(st.characters(categories=["Lu", "Ll", "Nd"]), min_size=1, max_size=12), st.sampled_from("aeiou"))
def test_case_accents_articles_and_punctuation_do_not_matter(word, vowel):
    key = f"{word} b{vowel}x"
    for text in (
        f"the {key}.",
        f'"{word}, b{vowel}x"',
        f"{word}\u2009B{vowel.upper()}\u0301X",
        unicodedata.normalize("NFKC", key),
    ):
        assert graded(f"<answer>{text}</answer>", [key], validation=True).reward == 1
    assert graded(f"<answer>{word} b{vowel}xx</answer>", [key], validation=True).reward == 0


@pytest.mark.parametrize("piece", [*TAGS, "<answer>x", "<answer></think>", "a ", "<", "\u00e9", "1,", "may 1 "])
def test_long_hostile_text_has_a_verdict(piece):
    for text in (piece * (100_000 // len(piece)), f"<answer>{piece * (100_000 // len(piece))}</answer>"):
        assert graded(text, training=search_qa.Levels(retrieved=0.1)).reward is not None
        assert search_qa.grade_strict_reference(Answer("hotpotqa", "", "", text, "stop", ["Danube"])).reward is not None
