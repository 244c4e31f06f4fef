"""The teacher is told what the student is told, and how a final answer must be written for the grader to find it."""

import importlib

import pytest

from deepgrpo.data import dataset, templates
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.rewards import grade as grade_lib
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import answer_form, missing_form
from deepgrpo.rewards.rubric import Rubric
from deepgrpo.teacher import prompts
from tests.data.small_tokenizer import write
from tests.endpoint.scripted import Scripted, completion
from tests.teacher.fakes import InstantGrader, failure
from tests.teacher.test_annotate import annotate, made

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
