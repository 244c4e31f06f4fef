"""Slots come back byte for byte; replies are read by the reference's rules and by ours."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepgrpo.teacher import prompts
from tests.teacher.scenarios import teacher_cases

texts = st.text().filter(lambda text: "<" not in text)


@settings(max_examples=50, deadline=None)
@given(problem=texts, verified=texts, student=texts)
def test_slots_are_read_back(problem, verified, student):
    assert prompts.read_slots(prompts.plain_prompt(problem, student)) == (problem, "", student)
    assert prompts.read_slots(prompts.prefix_aware_prompt(problem, verified, student)) == (problem, verified, student)


def test_other_prompts_have_no_slots():
    with pytest.raises(prompts.ParseError, match="hello"):
        prompts.read_slots("hello")


def test_instructions_hold_no_header_at_a_line_start():
    """So an echoed prompt is no solution."""
    for prompt in (prompts.plain_prompt("p", "s"), prompts.prefix_aware_prompt("p", "v", "s")):
        assert prompts.SOLUTION_HEADER in prompt and prompts.ERROR_HEADER in prompt
        with pytest.raises(prompts.ParseError):
            prompts.parse_solution(prompt)


def parsed(parse, reply):
    try:
        return parse(reply)
    except ValueError:
        return {"error": "parse_error"}


@pytest.mark.parametrize("args, result", teacher_cases("parse_solution_reply"))
def test_golden_solution_replies(args, result):
    expected = result if "error" in result else result["solution"]
    assert parsed(prompts.parse_solution_strict, args["reply"]) == expected


@pytest.mark.parametrize("args, result", teacher_cases("parse_index_reply"))
def test_golden_index_replies(args, result):
    assert parsed(prompts.parse_index, args["reply"]) == (result if "error" in result else result["index"])


HEADER = "[ERROR_DESCRIPTION]\nbad\n\n[CORRECT_SOLUTION]\n"


@pytest.mark.parametrize(
    "reply, solution",
    [
        (HEADER + "\n  x = 1\n42  \n\n", "\n  x = 1\n42"),  # leading whitespace is the student's, perhaps
        ("<think>\n[CORRECT_SOLUTION]\nno</think>\n" + HEADER + "yes", "yes"),
        ("no opening tag</think>\n" + HEADER + "yes", "yes"),
        (HEADER + "yes\n<think>and then", "yes\n<think>and then"),
        (HEADER + "I think.</think> <answer>4</answer>", "I think.</think> <answer>4</answer>"),
        ("<think>a draft:\n" + HEADER + "no</think>\n" + HEADER + "so</think> <answer>4", "so</think> <answer>4"),
        ("<think>\n" + HEADER + "no\n</think>\n[CORRECT_SOLUTION]\nyes</think> 4", "yes</think> 4"),
        ("[THINK]hm[/THINK]\ufeff" + HEADER + "yes", "yes"),
        (HEADER.replace("\n", "\r\n") + "a\r\nb\r\n", "a\nb"),
        ("\ufeff## `[ERROR\\_DESCRIPTION]`\nbad\n## `[CORRECT\\_SOLUTION]`\nyes", "yes"),
        (HEADER + "```text\nyes\nno\n```\n", "yes\nno"),
        (HEADER + "say\n```\ncode\n```", "say\n```\ncode\n```"),
        (HEADER + "first\n" + HEADER + "second", "second"),
        (HEADER + "first\n[CORRECT_SOLUTION]\nstill first", "first\n[CORRECT_SOLUTION]\nstill first"),
        ("[CORRECT_SOLUTION]\nfirst\n[CORRECT_SOLUTION]\nsecond", "second"),
        ("**[CORRECT_SOLUTION]**\nbold", "bold"),
        ("[CORRECT_SOLUTION] x = 1", "x = 1"),
        ("as [CORRECT_SOLUTION] says", None),
        ("[correct_solution]\nlow", None),
        (HEADER + "```\n```", None),
        ("<think>" + HEADER + "never closed", None),
        (HEADER, None),
        ("", None),
    ],
)
def test_solution_replies(reply, solution):
    assert parsed(prompts.parse_solution, reply) == ({"error": "parse_error"} if solution is None else solution)


@pytest.mark.parametrize(
    "reply, index",
    [
        ('say {"first_error_step_index": 1}', None),
        ('```json\n{"first_error_step_index": 1}\n```\n```json\n{"first_error_step_index": null}\n```', 1),
        ('```\n[1]\n```\n```json\n{"first_error_step_index": {"a": 1}}\n```', None),
        ("[1, 2]", None),
        ("3", None),
    ],
)
def test_index_replies(reply, index):
    assert parsed(prompts.parse_index, reply) == ({"error": "parse_error"} if index is None else index)
