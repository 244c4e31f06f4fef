"""Slots come back byte for byte; replies are read by the reference's rules and by ours. The teacher is told what the student is
told, and how a final answer must be written for the grader to find it."""

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepgrpo.data import dataset, templates
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.rewards import grade as grade_lib
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import answer_form, missing_form
from deepgrpo.rewards.reward import Rubric
from deepgrpo.teacher import prompts
from tests.data.small_tokenizer import write
from tests.endpoint.scripted import Scripted, completion
from tests.teacher.fakes import InstantGrader, failure, teacher_cases
from tests.teacher.test_annotate import annotate, made

texts = st.text().filter(lambda text: "<" not in text)


@settings(max_examples=25, deadline=None)
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
        assert prompts.parse_solution(prompt + HEADER + "yes") == "yes"


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


#### What the teacher is told

MARKS = {"GSM8K": "####", "MATH": "\\boxed{", "AIME24": "\\boxed{", "carry_chain": "####", "arithmetic": "####"}
MARKS |= dict.fromkeys(("AMC", "Minerva", "OlympiadBench", "DeepScaleR"), "\\boxed{")
EXPERIMENTS = [("gsm8k_0p5b", "GSM8K"), ("math_1p5b", "MATH"), ("carry_chain", "carry_chain"), ("ablations", "carry_chain")]
EXPERIMENTS += [("smollm2", "arithmetic"), ("eval_drgrpo", "AMC"), ("eval_seed", "OlympiadBench")]


@pytest.mark.parametrize("template", templates.TEMPLATES)
@pytest.mark.parametrize("name, source", EXPERIMENTS)
def test_the_answers_form_is_in_every_message_of_every_experiment(name, source, template):
    rubric = Rubric.from_config(importlib.import_module(f"configs.{name}").get_config().rewards)
    told = templates.told(template, "What is 2 + 3?")
    message = prompts.prefix_aware_prompt(told, "", "It is 6.", missing_form(told, source, rubric))
    assert "What is 2 + 3?" in message and MARKS[source] in message
    assert prompts.read_slots(message) == (told, "", "It is 6.")


@pytest.mark.parametrize("source", grade_lib.GRADERS)
@pytest.mark.parametrize("extract", ["default", "answer_tag", "answer_tag_lenient", "mark"])
def test_every_source_has_a_form_that_a_bare_question_lacks(source, extract):
    rubric = Rubric(extract=extract)
    assert missing_form("What is 2 + 3?", source, rubric)
    form = answer_form(source, rubric)
    assert missing_form(f"Say {form.mark} at the end.", source, rubric) == ""
    assert missing_form("What?", source, Rubric(graders=(f"{source}=math:floor",))) == "", "nobody knows that one's form"


@pytest.mark.parametrize("source", ["GSM8K", "MATH", "DeepScaleR"])
@pytest.mark.parametrize("extract", ["default", "answer_tag", "answer_tag_lenient", "mark"])
def test_an_answer_in_that_form_is_found_by_the_grader(source, extract):
    rubric = Rubric(extract=extract)
    written = {"####": "#### 5", "\\boxed": "\\boxed{5}", "<answer>": "<answer>5</answer>"}
    written["</think> <answer>"] = "</think> <answer>5</answer>"
    response = f"Two and three.\n{written[answer_form(source, rubric).mark]}"
    assert grade_lib.grade(Answer(source, "2 + 3?", "", response, "stop", "5"), rubric).reward == 1.0


def test_the_templates_say_to_the_teacher_what_they_say_to_the_student(tmp_path):
    class Recorded:
        chat_template, bos_token_id = "set", None

        def apply_chat_template(self, messages, **_):
            return "|".join(message["content"] for message in messages)

        def __call__(self, text, **_):
            self.text = text
            return {"input_ids": [1]}

    tokenizer = Recorded()
    for name, template in templates.TEMPLATES.items():
        template("Why?", tokenizer)
        for part in templates.told(name, "Why?").split("\n"):
            assert part in tokenizer.text, name
    rows = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert templates.told("chat", "Why?", rows) == "Be brief.\n\nWhy?"
    [problem], _ = dataset.load_problems("arithmetic:train:1", load_tokenizer(write(tmp_path)), "few_shot_arithmetic", 10_000)
    assert problem.told.endswith(problem.question) and "#### 12" in problem.told and "####" not in problem.question


@pytest.mark.parametrize("prefix_aware", [True, False])
def test_the_annotator_asks_with_what_the_student_is_told(prefix_aware):
    scripted = Scripted([completion("none")])
    failed = failure(question="2 + 3 = ?")
    object.__setattr__(failed.problem, "told", "Say #### at the end.\n\n2 + 3 = ?")
    annotate(
        made(
            scripted.client(),
            InstantGrader(None),
            curriculum__pool="forest" if prefix_aware else "suffixes",
            form=lambda told, source: source,
        ),
        failed,
    )
    content = scripted.requests[0]["messages"][0]["content"]
    assert "<problem>\nSay #### at the end.\n\n2 + 3 = ?\n</problem>\n\n<answer_form>\narithmetic\n</answer_form>" in content
    assert content.startswith(prompts._PREFIX_AWARE if prefix_aware else prompts._PLAIN)
