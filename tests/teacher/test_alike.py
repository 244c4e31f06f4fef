"""Student's and teacher's texts are read alike: neither loses what the other keeps, and no cut tells too much."""

import numpy as np
import pytest

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import grade, leaks_answer
from deepgrpo.teacher.annotate import ACCEPTED
from deepgrpo.teacher.splice import Limits, same_start, splice_text, splice_tokens, without_repetition
from deepgrpo.types import Grade, as_ids
from tests.endpoint.scripted import Scripted, completion
from tests.teacher.fakes import InstantGrader
from tests.teacher.test_annotate import CODEC, LIMITS, STOP, annotate, made, says, written

OPEN = Limits(0, 0.0, 0, 10_000)
RIGHT = Grade(1.0, True, "right")


def kept(student: str, teacher: str) -> tuple[str, str]:
    """Text of the prefix and of what follows it."""
    found = splice_text(CODEC, as_ids([*CODEC.encode(student), STOP]), teacher, 0, [STOP], OPEN)
    assert not found.reason
    return CODEC.decode(found.prefix_ids), CODEC.decode(found.suffix_ids[: found.body_len])


@pytest.mark.parametrize(
    "student, teacher, prefix",
    [
        ("We add.\r\nThen 3.", "We add.\nThen 4.", "We add.\r\nThen "),  # line ends
        ("We add.\nThen 3.", "We add.\r\nThen 4.", "We add.\nThen "),
        ("caf\u00e9 has 3", "cafe\u0301 has 4", "caf\u00e9 has "),  # composed and not
        ("cafe\u0301 has 3", "caf\u00e9 has 4", "cafe\u0301 has "),
        ("We add: 3", "\ufeffWe add: 4", "We add: "),  # a byte order mark
        ("We\u00a0add: 3", "We add: 4", "We\u00a0add: "),  # a no-break space
        ("\n We add: 3", "We add: 4", "\n We add: "),
        ("e\u0301a", "ea", ""),  # an accent is not cut from its letter
    ],
)
def test_spellings_of_one_text_agree_and_the_students_is_kept(student, teacher, prefix):
    start, rest = kept(student, teacher)
    assert start.rstrip() == prefix.rstrip()  # a space may belong to the next token
    assert same_start(start + rest, student[: len(student) - len(student.lstrip())] + teacher.lstrip())[0] == len(start + rest)


@pytest.mark.parametrize(
    "student, teacher, prefix",
    [
        ("It is 42 m.", "It is 47 m.", "It is "),  # a leading digit would be told
        ("It is 3.14 m", "It is 3.15 m", "It is "),
        ("It is 1,250 m", "It is 1,350 m", "It is "),
        ("It is -5 m", "It is -6 m", "It is "),
        ("It is 4 m", "It is 45 m", "It is "),
        ("x^2 + 1 = 5", "x^2 + 1 = 7", "x^2 + 1 = "),
        ("Thus \\boxed{4}", "Thus \\bar{x} = 4", "Thus "),
        ("so \\frac{1}{2}", "so \\frac{2}{3}", "so "),
        ("12\n#### 4", "12\n#### 5", "12\n#### "),  # the mark is whole: the leak guard's to judge
        ("12\n## 4", "12\n#### 4", "12\n"),
        ("so \\text{5 apples} are", "so \\text{6 apples} are", "so "),
        ("so <answer>4", "so <b>4", "so "),
        ("The answer was 4", "The answer is 4", "The "),
        ("an example", "an exact one", "an exa"),  # words may be cut
    ],
)
def test_no_prefix_ends_inside_a_number_or_mark(student, teacher, prefix):
    by_character = as_ids([i for symbol in student for i in CODEC.encode(symbol)])
    found = splice_text(CODEC, by_character, teacher, 0, [STOP], OPEN)
    assert CODEC.decode(found.prefix_ids) == prefix
    ids = [i for symbol in teacher for i in CODEC.encode(symbol)]
    by_ids = splice_tokens(by_character, ids, 0, [STOP], OPEN)
    assert len(by_ids.prefix_ids) >= len(found.prefix_ids), "the reference cuts anywhere"


def test_a_prefix_split_anywhere_gives_the_verdict_of_the_whole():
    whole = "We add. The answer is \\boxed{42}"
    for k in range(len(whole)):
        prefix = kept(whole[:k] + "\u00a7", whole)[0]
        if not leaks_answer("MATH", prefix):
            answer = Answer("MATH", "Q", prefix, whole[len(prefix) :], "stop", "42")
            assert grade(answer).reward == 1.0, prefix


def test_the_repeated_start_is_dropped_before_the_texts_are_compared():
    locked = "First, 1 + 1 = 2.\nThen 2 + 2 = 4.\n"
    student = "So 4 + 4 = 9."
    for repeated in (locked, locked.replace("\n", "\r\n"), "\ufeff" + locked, "Then 2 + 2 = 4.\n", ""):
        assert without_repetition(repeated + "So 4 + 4 = 8.", locked, student).strip() == "So 4 + 4 = 8."
    assert without_repetition("<think>So 4", "<think>\n", student) == "So 4", "the template opened it"
    assert without_repetition("Then 2 + 2 = 4.\nAnd so on", locked, "Then 2 + 2 = 4.\nAnd no") == "Then 2 + 2 = 4.\nAnd so on"
    outcome = annotate(made(says(locked + "So 4 + 4 = 8."), InstantGrader(RIGHT)), written(student, locked=locked))
    assert outcome.reason == ACCEPTED and CODEC.decode(outcome.correction.prefix_ids) == "So 4 + 4 = "


def test_a_thought_of_the_students_is_part_of_its_text():
    student = "I add 1 and 1.</think> <answer>3</answer>"
    outcome = annotate(made(says(student.replace("3", "2")), InstantGrader(RIGHT)), written(student))
    assert outcome.reason == ACCEPTED and CODEC.decode(outcome.correction.prefix_ids) == "I add 1 and 1.</think> <answer>"
    code = "```python\nx = 3\n```"
    outcome = annotate(made(says(code.replace("3", "2")), InstantGrader(RIGHT)), written(code))
    assert outcome.reason == ACCEPTED and CODEC.decode(outcome.correction.prefix_ids).strip() == "```python\nx ="


def test_the_teacher_sees_the_students_text_up_to_its_end():
    scripted = Scripted([completion("[CORRECT_SOLUTION]\n1 + 1 = 2")])
    failed = written("1 + 1 = 3")
    beyond = as_ids(np.concatenate([failed.response_ids, CODEC.encode("Human: another one")]))
    annotate(made(scripted.client(), InstantGrader(RIGHT)), type(failed)(0, failed.problem, failed.state_ids, beyond, 2))
    assert scripted.requests[0]["messages"][0]["content"].endswith("<student_text>\n1 + 1 = 3\n</student_text>\n")


REPLIES = ["[CORRECT_SOLUTION]\nsomething else", "no header", "[CORRECT_SOLUTION]\n1 + 1 = 2"]


@pytest.mark.parametrize("attempts, reason, asked", [(1, "prefix_too_short", 1), (2, "prefix_too_short", 2), (3, ACCEPTED, 3)])
def test_a_refused_cut_is_tried_again_at_the_next_temperature(attempts, reason, asked):
    scripted = Scripted([completion(text) for text in REPLIES])
    annotator = made(scripted.client(attempts=attempts), InstantGrader(RIGHT), limits=LIMITS)
    outcome = annotate(annotator, written("1 + 1 = 3"))
    annotator.record(outcome)
    assert (outcome.reason, len(scripted.requests)) == (reason, asked)
    assert [request["temperature"] for request in scripted.requests] == [0.3, 0.7, 0.3][:asked]
    assert annotator.metrics()["teacher_suffix/tried_again"] == outcome.replies - 1


def test_attempts_stay_within_the_budget_and_a_missing_verdict_uses_none_up():
    wrong = InstantGrader(Grade(0.0, True, "wrong"))
    scripted = Scripted([completion("[CORRECT_SOLUTION]\n1 + 1 = 2")])
    outcome = annotate(made(scripted.client(attempts=9, token_budget=1000), wrong), written("1 + 1 = 3"))
    assert len(scripted.requests) == 2 and (outcome.reason, outcome.deferred) == ("budget_exhausted", True)
    scripted = Scripted([completion("[CORRECT_SOLUTION]\n1 + 1 = 2")])
    outcome = annotate(made(scripted.client(attempts=9), InstantGrader(Grade(None, False, "crash"))), written("1 + 1 = 3"))
    assert len(scripted.requests) == 1 and outcome.deferred
    scripted = Scripted([completion("[CORRECT_SOLUTION]\n1 + 1 = 2")])
    outcome = annotate(made(scripted.client(attempts=2), wrong, strict_reference=True), written("1 + 1 = 3"))
    assert len(scripted.requests) == 1 and outcome.reason == "reward_too_low", "the reference tries no more"
