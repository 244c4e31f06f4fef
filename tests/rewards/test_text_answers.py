"""Answers that are words, numbers, dates or named values: questions about tables, DABench, and multi-hop search."""

import hypothesis
import hypothesis.strategies as st
import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards import normalise
from deepgrpo.rewards.answer import Answer
from tests.rewards.test_compare import read_pairs

SOURCES = ("finqa", "hybridqa", "ottqa", "multihiertt", "wikitq", "reasoning-table")
KEYS = {"hotpotqa": ["Danube"], "DABench": [["x", "1"]], **dict.fromkeys(SOURCES, "Oslo|5")}
PAIRS = read_pairs("text_pairs.txt")
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
GOOD = (
    "<think>a</think>\n<search>q</search>\n\n<information>Vienna: Danube</information>\n\n<think>b</think><answer>Danube</answer>"
)


def graded(source, response, key, question="", prefix="", validation=False):
    return graders.resolve(graders.GRADERS[source].path)(
        Answer(source, question, prefix, response, "stop", key, validation=validation)
    )


#### Tables


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: Bergen\nno, <Answer>Oslo</Answer>", "Oslo"),
        ("<answer>oslo</answer><ANSWER> Oslo. </ANSWER>", "Oslo"),
        ("<answer><answer>Oslo</answer></answer>", "Oslo"),
        ("<Answer>Answer: Oslo\n\nUsed cells: A1</Answer>", "Oslo"),
        ("<Answer><Analyze>Bergen?</Analyze>Oslo</Answer>", "Oslo"),
        ("**Answer:** Bergen\n**Final answer**: **Oslo**\nDone.", "Oslo"),
        ("Answer:\nOslo", "Oslo"),
        ('Answer: Thus, the final answer is "Oslo".', "Oslo"),
        (r"Answer: $\boxed{Oslo}$", "Oslo"),
        ("Answer: Oslo<|im_end|>\nAnswer: Bergen", "Oslo"),
        ("Answer:", None),
        ("It is Oslo.", None),
        ("<answer>Oslo", None),
        ("<answer>  </answer>", None),
    ],
)
def test_one_extractor_for_all_tables(response, answer):
    for source in SOURCES:
        grade = graded(source, response, "Oslo")
        assert (grade.reward, grade.completed, grade.answer) == (float(answer is not None), answer is not None, answer or "")
        assert graded(source, "<answer>Bergen</answer><ANSWER>Oslo</ANSWER>", "Oslo").reward == 0  # hedging


@pytest.mark.parametrize("source", PAIRS)
def test_what_says_the_same(source):
    for key, text, label in PAIRS[source]:
        if source == "exact":
            rules = normalise.Rules()
            assert normalise.same(key, text, rules) == normalise.same(text, key, rules) == label, (key, text)
        else:
            stated, wanted = (f"@x[{text}] @y[1]", [["x", key]]) if source == "DABench" else (text, key)
            assert graded(source, f"<answer>{stated}</answer>", wanted, validation=True).reward == label, (key, text)


def test_the_question_settles_what_a_bare_number_means():
    assert graded("finqa", "Answer: 14.1%", "14.1", "12.5 %\nQuestion: What is it?").reward == 0
    assert graded("finqa", "Answer: 14.1%", "14.1", "Question: By what percentage did it grow?").reward == 1
    assert graded("finqa", "Answer: $3.8 million", "3.8", "(in millions) 4.1\nQuestion: How much was it?").reward == 1


def test_keys():
    assert graded("hybridqa", "Answer: Kristiania", ["Oslo", "Kristiania"]).reward == 1
    assert graded("wikitq", "Answer: Oslo", ["Oslo", "Bergen"]).reward == 0
    assert graded("finqa", "Answer: 0", 0).reward == 1
    assert graded("ottqa", "", "Oslo", prefix="Answer: Oslo").reward == 0
    for source, nothing in (("finqa", ""), ("hotpotqa", []), ("hotpotqa", [None, ""]), ("DABench", []), ("DABench", [["m"]])):
        grade = graded(source, "<answer>5</answer>", nothing)
        assert grade.reward is None and grade.reason == "bad_key"


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    value=st.decimals(min_value=-(10**9), max_value=10**9, places=2), place=st.integers(0, 30), step=st.integers(1, 9)
)
def test_a_changed_digit_is_wrong(value, place, step):
    key = f"{value:,}"
    places = [at for at, char in enumerate(key) if char.isdigit()]
    at = places[place % len(places)]
    changed = key[:at] + str((int(key[at]) + step) % 10) + key[at + 1 :]
    for source in ("finqa", "wikitq"):
        assert graded(source, f"Answer: {key}", key).reward == 1
        assert graded(source, f"Answer: {changed}", key).reward == 0


#### DABench


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("<Answer>@mean[29.70] and @count[891]</Answer>", "right"),
        ("<answer>@mean[29.7]@count[1]@count['891']</answer>", "right"),
        ("<Answer>@mean[29.7]\n@count[892]</Answer>", "wrong"),
        ("<Answer>@mean[29.70001]\n@count[891]</Answer>", "wrong"),
        ("<Answer>@mean[29.7]</Answer>", "partial"),
        ("<Answer>@mean[29.7]\n@count[891</Answer>", "partial"),
        ("<Answer>29.7, 891</Answer>", "unformatted"),
        ("@mean[29.7] @count[891]", "unformatted"),
        ("<Answer>@mean[29.7]<|im_end|>@count[891]</Answer>", "unformatted"),
    ],
)
def test_all_named_values_must_be_there_and_right(response, reason):
    grade = graded("DABench", response, [["mean", "29.7"], ["count", "891"]])
    assert (grade.reward, grade.completed, grade.reason) == (float(reason == "right"), reason in ("right", "wrong"), reason)


#### Search


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
        ("<answer>Danube</answer> yes: <answer>the Danube</answer>", 0.8, 1.0),
        ("<answer>Rhine</answer> no: <answer>Danube</answer>", 0.1, 0.0),
    ],
)
def test_structure_and_answer_each_earn_their_part(response, training, validation):
    grade = graded("hotpotqa", response, ["", "Danube"])
    assert grade.reward == pytest.approx(training) and dict(grade.parts).get("task", grade.reward) == validation
    assert graded("hotpotqa", response, ["Danube"], validation=True).reward == validation


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think><search>q</search><information><answer>Danube</answer></information><think>b</think>",
        "<think>is it <answer>Danube</answer>?</think>",
        "<think>x</think><answer>Danube",
        "<answer></answer>",
    ],
)
def test_what_stands_inside_other_tags_or_is_not_closed_is_no_answer(response):
    grade = graded("hotpotqa", response, ["Danube"], validation=True)
    assert (grade.reward, grade.completed, grade.reason) == (0.0, False, "unformatted")


@pytest.mark.parametrize("cut", [4, GOOD.index("<search>") + 9, GOOD.index("Vienna"), GOOD.index("b</think>") + 1])
def test_a_prefix_is_part_of_the_structure_but_earns_nothing(cut):
    assert graded("hotpotqa", GOOD[cut:], ["Danube"], prefix=GOOD[:cut]).reward == 1.0
    assert graded("hotpotqa", "", ["Danube"], prefix=GOOD).reward == 0.0
    assert graded("hotpotqa", "Danube</answer>", ["Danube"], prefix=GOOD.removesuffix("Danube</answer>")).answer == ""
    assert graders.leaks_answer("hotpotqa", GOOD) and not graders.leaks_answer("hotpotqa", GOOD[: GOOD.index("<answer>")])


#### Any text

PIECES = [
    "Answer:",
    "<Analyze>",
    "may 1 ",
    "1,",
    "1.",
    "(",
    "-",
    "%",
    "and ",
    "|",
    "\n",
    "\\boxed{",
    "$",
    "\ufdfa",
    "@x[",
    "[",
    "nan",
]
TEXT = st.lists(st.sampled_from([*PIECES, *TAGS, "]", "\ud800", "\u0663"]) | st.text(max_size=5), max_size=20).map("".join)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(TEXT)
def test_any_text_has_a_verdict(text):
    for source, key in KEYS.items():
        for response in (text, f"Answer: {text}", f"<Answer>@x[{text}]</Answer>"):
            assert 0 <= graded(source, response, key, question=text, prefix=text).reward <= 1
