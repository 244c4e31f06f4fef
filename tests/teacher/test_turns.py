"""A teacher's text is believed only as far as the environment says the same."""

import numpy as np
import pytest

from deepgrpo.curriculum.base import Failure
from deepgrpo.data import carry_chain, lookup_chain
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.environments.base import Reply
from deepgrpo.environments.lookup import Lookup
from deepgrpo.environments.writing import Writer
from deepgrpo.teacher.annotate import Annotator
from deepgrpo.teacher.splice import Codec, Limits, splice_text
from deepgrpo.teacher.turns import play
from deepgrpo.types import Grade, Problem, as_ids, marked, plain
from tests.endpoint.scripted import Scripted, completion
from tests.loops.test_agent import Tool
from tests.teacher.fakes import InstantGrader, configured
from tests.teacher.test_annotate import annotate

QUESTION = next(lookup_chain.questions("train", 0))
SOLUTION = lookup_chain.solution(QUESTION)
PROBLEM = Problem(0, "lookup_chain", as_ids([1]), SOLUTION[-2:], QUESTION)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    carry_chain.build_tokenizer(folder)
    return load_tokenizer(str(folder))


def trace(tokenizer, text):
    """Ids of a solution's beginning, what the environment wrote marked."""
    ids = as_ids(tokenizer.encode(text, add_special_tokens=False))
    padded = np.concatenate([ids, np.full(80, 40)])
    return marked(ids, lookup_chain.observed(padded)[: len(ids)])


@pytest.mark.parametrize("characters", [0, 3, 21, 24, 70])
def test_a_right_text_is_played_and_its_observations_marked(tokenizer, characters):
    before, text = trace(tokenizer, SOLUTION[:characters]), SOLUTION[characters:]
    played = play(Lookup(None), Writer(tokenizer), PROBLEM, before, text)
    assert not played.refused and "".join(part for _, part in played.parts) == SOLUTION
    np.testing.assert_array_equal(np.concatenate([before, played.suffix_ids]), trace(tokenizer, SOLUTION))


def test_what_the_environment_would_not_say_is_refused(tokenizer):
    values = lookup_chain.looked_up(QUESTION)
    invented = SOLUTION.replace(f"?{values[3]}\n", f"?{(int(values[3]) + 1) % 100:02d}\n")
    assert play(Lookup(None), Writer(tokenizer), PROBLEM, as_ids([]), invented).refused == "invented_observation"
    broken = Tool(lambda words: Reply(None, failed="down"))
    played = play(broken, Writer(tokenizer), PROBLEM, as_ids([]), SOLUTION)
    assert played.deferred and played.refused == "down" and broken.closed == 1
    over = Tool(lambda words: Reply(None))
    assert play(over, Writer(tokenizer), PROBLEM, as_ids([]), SOLUTION).refused == "goes_on_after_its_end"


def test_a_state_that_must_be_restored_is(tokenizer):
    table = dict(zip(values := lookup_chain.looked_up(QUESTION), values[1:], strict=False))
    tool = Tool(lambda words: Reply(table[words[-3:-1]] + "\n"))
    before = trace(tokenizer, SOLUTION[:18])
    played = play(tool, Writer(tokenizer), PROBLEM, before, SOLUTION[18:])
    assert not played.refused and "".join(part for _, part in played.parts) == SOLUTION
    table[values[0]] = "xx"
    assert play(tool, Writer(tokenizer), PROBLEM, before, SOLUTION[18:]).refused == "replay_mismatch"


def test_no_state_ends_between_a_call_and_its_answer(tokenizer):
    """Cut at every place of the student's answer where the teacher could part from it."""
    codec, limits = Codec(tokenizer), Limits(1, 0.0, 1, 200, 1)
    student, kept = trace(tokenizer, SOLUTION), []
    for place in range(1, len(SOLUTION) - 1):
        other = "9" if SOLUTION[place] != "9" else "8"
        found = splice_text(codec, student, SOLUTION[:place] + other + SOLUTION[place + 1 :], 17, [2], limits)
        if found.reason:
            assert found.reason in ("invented_observation", "prefix_too_short", "roundtrip_failed")
            continue
        kept.append(place)
        rest = student[len(found.prefix_ids) :]
        assert rest[0] >= 0, "the student is to write"
        assert plain(found.prefix_ids).tolist() == plain(student).tolist()[: len(found.prefix_ids)]
    assert len(kept) > 20


def test_a_teacher_that_stops_or_invents_goes_on_from_the_environments_answer(tokenizer):
    """Each request shows what is verified so far; the correction is that of a teacher that knew the answers."""
    values, line = lookup_chain.looked_up(QUESTION), lookup_chain.LINE
    rests = [SOLUTION[:4] + "00\n####00", SOLUTION[line : line + 4], SOLUTION[2 * line :]]  # invents; stops; knows the rest
    scripted = Scripted([completion(f"[CORRECT_SOLUTION]\n{text}") for text in rests])
    config = configured(Limits(1, 0.0, 1, 200, 1))
    config.loop, config.agent.environment = "agent", "lookup"
    grader = InstantGrader(Grade(1.0, True, "right"))
    environments = {"lookup": Lookup(None)}
    annotator = Annotator(config, scripted.client(), grader, Codec(tokenizer), [2], environments=environments)
    student = as_ids(tokenizer.encode(f"a{values[0]}:00\n####00", add_special_tokens=False))
    outcome = annotate(annotator, Failure(0, PROBLEM, as_ids([1]), student, 0))
    assert outcome.reason == "accepted" and outcome.replies == 3 and len(scripted.requests) == 3
    shown = [request["messages"][0]["content"] for request in scripted.requests]
    assert SOLUTION[:line] in shown[1] and SOLUTION[: 2 * line] in shown[2]
    whole = np.concatenate([outcome.correction.prefix_ids, outcome.correction.suffix_ids])
    np.testing.assert_array_equal(whole[:-1], trace(tokenizer, SOLUTION))
    (answer,) = grader.answers
    assert "".join(text for _, text in answer.parts) == SOLUTION
