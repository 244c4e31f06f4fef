"""Table questions: which answer counts, how it is compared, and the reference's verdicts."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from deepgrpo.rewards import normalise, tables, tables_strict
from deepgrpo.rewards.answer import Answer
from tests.rewards import golden

SOURCES = ("finqa", "hybridqa", "ottqa", "multihiertt", "wikitq", "reasoning-table")


def graded(source, response, key, question="", prefix=""):
    return tables.grade(Answer(source, question, prefix, response, "stop", key))


@pytest.mark.parametrize("case", golden.cases("tableqa", "rtable"))
def test_golden(case):
    if case["finish"] == "stop":
        golden.check_person(case, tables.grade(golden.as_answer(case)))
    golden.check_reference(case, tables_strict.grade_strict_reference)


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
def test_one_extractor_for_all(response, answer):
    for source in SOURCES:
        grade = graded(source, response, "Oslo")
        assert (grade.reward, grade.completed, grade.answer) == (float(answer is not None), answer is not None, answer or "")
        assert graded(source, "<answer>Bergen</answer><ANSWER>Oslo</ANSWER>", "Oslo").reward == 0  # hedging


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("14.1%", "14.1 percent|0.141|about 14.1|\u2248 14.12%|14.06%", "14.2%|-14.1%|1.41|141%|$14.1"),
        ("0.14123", "14.1%|0.1412|14.123%", "14%|0.15|0.14123%"),
        ("1,234", "1234|$1,234|1,234.00|1 234", "1,235|1|1,999|-1,234"),
        ("5000000", "$5 million|5.0 million|5,000 thousand", "5|5.1 million|$5 billion"),
        ("$3.8 million", "3,800,000|$3.8M|3.81 million|0.0038 billion", "3.8|\u20ac3.8 million|4 million"),
        ("-3.2", "(3.2)|\u22123.2|-$3.20", "3.2"),
        ("0.001", "0.0010|0.1%", "0.005|0.002"),
        ("0.0%", "0|0.04%", "4%|0.06%|0.1"),
        ("100", "100.05|100.", "104.9|100.4|101"),
        ("yes", "Yes.", "no"),
    ],
)
def test_finqa_numbers(key, right, wrong):
    for text in right.split("|"):
        assert graded("finqa", f"Answer: {text}", key).reward == 1, text
    for text in wrong.split("|"):
        assert graded("finqa", f"Answer: {text}", key).reward == 0, text


def test_the_question_settles_what_a_bare_number_means():
    assert graded("finqa", "Answer: 14.1%", "14.1", "12.5 %\nQuestion: What is it?").reward == 0
    assert graded("finqa", "Answer: 14.1%", "14.1", "Question: By what percentage did it grow?").reward == 1
    assert graded("finqa", "Answer: $3.8 million", "3.8", "(in millions) 4.1\nQuestion: How much was it?").reward == 1


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("Bergen|Oslo", "Oslo, Bergen;Oslo and Bergen;Oslo|Bergen;<a>", "Oslo;Oslo, Rome;Oslo, Bergen, Rome;Oslo or Bergen"),
        ("709,037|291,940", "291,940, 709,037;291940 and 709037", "291,940"),
        ("May 1, 1990|June 2, 1991", "1991-06-02, 1 May 1990", "May 1, 1990"),
        ("120 km/h", "120 kmh;120;120 km per hour", "120 mph;121;120 or so"),
        ("7 days", "1 week", "2 weeks;1 month"),
        ("12 months", "1 year;1.0 years", "365 days"),
        ("Z\u00fcrich", "Zurich;**Z\u00dcRICH**", "Bern"),
    ],
)
def test_wikitq(key, right, wrong):
    for text in right.replace("<a>", "['Oslo', 'Bergen']").split(";"):
        assert graded("wikitq", f"<Answer>{text}</Answer>", key).reward == 1, text
    for text in wrong.split(";"):
        assert graded("wikitq", f"<Answer>{text}</Answer>", key).reward == 0, text


@pytest.mark.parametrize(
    ("key", "same", "other"),
    [
        ("May 1, 1990", "1 May 1990|1990-05-01|Tuesday, May 1st, 1990|01.05.1990", "May 1990|May 1|5/1/1990|1 May 1991"),
        ("May 13, 1990", "13/5/1990|5/13/1990|13-May-1990", "5/12/1990"),
        ("10.5", "10.50|10 1/2|\u0661\u0660.5", "105|-10.5|10.5 or 11"),
        ("1990\u20131995", "1990 - 1995", "19901995|1990"),
        ("C++", "c++", "C|C#"),
        ("the U.S.", "US|u.s", "U"),
        ("Serie A", "serie a", "Serie B|Serie"),
        ("$36", "36 dollars|36", "36%|\u20ac36"),
        ("007", "007.", "7"),
        ("five", "5|5.0", "6|fives"),
    ],
)
def test_exact_comparison_by_type(key, same, other):
    rules = normalise.Rules()
    for text in same.split("|"):
        if text != "10 1/2":  # mixed numbers are words
            assert normalise.same(key, text, rules) and normalise.same(text, key, rules), text
    for text in other.split("|"):
        assert not normalise.same(key, text, rules) and not normalise.same(text, key, rules), text


def test_keys():
    assert graded("hybridqa", "Answer: Kristiania", ["Oslo", "Kristiania"]).reward == 1
    assert graded("wikitq", "Answer: Oslo", ["Oslo", "Bergen"]).reward == 0
    assert graded("finqa", "Answer: 0", 0).reward == 1
    assert graded("finqa", "Answer: 0", "").reward is None
    assert graded("ottqa", "", "Oslo", prefix="Answer: Oslo").reward == 0
    assert re.search(tables.LEAK, "so **answer**: Oslo") and not re.search(tables.LEAK, "Let me answer the question.")


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    value=st.decimals(min_value=-(10**9), max_value=10**9, places=2), place=st.integers(0, 30), step=st.integers(1, 9)
)
def test_a_changed_digit_is_wrong(value, place, step):
    key = f"{value:,}"
    places = [at for at, char in enumerate(key) if char.isdigit()]
    at = places[place % len(places)]
    changed = key[:at] + str((int(key[at]) + step) % 10) + key[at + 1 :]
    for source in set(SOURCES) - {"multihiertt"}:  # which grants 1e-5 of the key
        assert graded(source, f"Answer: {key}", key).reward == 1
        assert graded(source, f"Answer: {changed}", key).reward == 0


PIECES = (
    "Answer:",
    "<Answer>",
    "</answer>",
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
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.lists(st.sampled_from([*PIECES, "\ud800", "\u0663"]) | st.text(max_size=5), max_size=20).map("".join))
def test_any_text_has_a_verdict(text):
    for source in SOURCES:
        for response in (text, f"Answer: {text}"):
            answer = Answer(source, text, "", response, "stop", "Oslo|5")
            assert tables.grade(answer).reward in (0, 1)
            assert tables_strict.grade_strict_reference(answer).reward in (0, 1)


@pytest.mark.parametrize("piece", PIECES)
def test_long_hostile_text_has_a_verdict(piece):
    for source in SOURCES:
        for frame in ("{}", "<Answer>{}</Answer>"):
            answer = Answer(source, "", "", frame.replace("{}", piece * (100_000 // len(piece))), "stop", "Oslo|5")
            assert tables.grade(answer).reward == 0
            assert tables_strict.grade_strict_reference(answer).reward in (0, 1)
