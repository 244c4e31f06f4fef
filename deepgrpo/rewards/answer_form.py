"""How a final answer must be written for its grader to find it: the one definition that the teacher is told.

What a prompt tells the student may leave it out (a bare question, another template). The teacher has to be told all the same: a
right answer in another form is a wrong one.
"""

import dataclasses

from deepgrpo.rewards.answer import canonical
from deepgrpo.rewards.grade import GRADERS
from deepgrpo.rewards.rubric import Rubric


@dataclasses.dataclass(frozen=True)
class Form:
    """says: for the teacher. mark: what a text that asks for this form holds, whatever its case."""

    says: str
    mark: str


BOXED = Form("The final answer stands within \\boxed{} at the end.", "\\boxed")
HASHES = Form('The last line is "#### " and the final answer.', "####")
TAGGED = Form("The final answer stands between <answer> and </answer> at the end.", "<answer>")
THOUGHT = Form("The reasoning ends with </think> <answer>, then come the final answer and </answer>.", "</think> <answer>")
FENCED = Form("The code stands in one block between ```python and ```.", "```")


def answer_form(source: str, rubric: Rubric) -> Form | None:
    """Returns the form that a source's grader looks for; None for a grader of the user's own, whose form nobody knows."""
    if source in rubric.own_graders():
        return None
    name = canonical(source)
    grader = GRADERS[name]
    if grader.family and rubric.extract.startswith("answer_tag"):
        return TAGGED if rubric.extract == "answer_tag_lenient" else THOUGHT
    if grader.family == "number" or grader.checks_steps:
        return HASHES
    if grader.family:
        return BOXED
    return FENCED if name == "ds1000" else TAGGED


def missing_form(told: str, source: str, rubric: Rubric) -> str:
    """Returns what the teacher must be told about the answer's form beyond `told`; "" if nothing is missing."""
    form = answer_form(source, rubric)
    return "" if form is None or form.mark in told.lower() else form.says
