"""One failure through client, cut, leak guard and grader: the reference's cases, and ours with the real oracle over HTTP."""

import asyncio
import collections

import pytest

from deepgrpo.endpoint.errors import Refused, Unavailable
from deepgrpo.teacher.annotate import ACCEPTED, Annotator
from deepgrpo.teacher.oracle import Oracle
from deepgrpo.teacher.splice import Limits
from deepgrpo.types import Grade
from tests.endpoint.scripted import Scripted, client, completion
from tests.teacher.fakes import InstantGrader, NumberCodec, byte_level_codec, configured, failure, teacher_cases

RIGHT, WRONG = Grade(1.0, True, "right"), Grade(0.0, True, "wrong")
LIMITS = Limits(2, 0.0, 0, 1000)
CODEC = byte_level_codec()
STOP = 2


def annotate(annotator, failed, step=5):
    async def main():
        try:
            return await annotator.annotate(failed, step)
        finally:
            await annotator.aclose()

    return asyncio.run(main())


def made(client, grader, codec=CODEC, limits=LIMITS, leaks=lambda source, text: "####" in text, **settings):
    """settings: keys with a double underscore for the dot, and `form`."""
    config, form = configured(limits), settings.pop("form", lambda told, source: "")
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in settings.items()})
    return Annotator(config, client, grader, codec, [STOP], leaks, form)


@pytest.mark.parametrize("args, result", teacher_cases("suffix_alignment"))
def test_golden_suffix_alignment(args, result):
    teacher = args["teacher_ids"]
    text = "no header" if teacher is None else "[CORRECT_SOLUTION]" + (" ".join(map(str, teacher)) or "empty")
    limits = Limits(**{key: args[key] for key in ("min_prefix_match_tokens", "min_prefix_match_ratio", "min_suffix_len")} | {
        "max_model_len": args["max_model_len"]
    })  # fmt: skip
    grader = InstantGrader(Grade(args["reward"], True, ""))
    annotator = made(
        Scripted([completion(text)]).client(strict_reference=True),
        grader,
        NumberCodec(args["eos_token_id"]),
        limits=limits,
        rewards__threshold=float(args["reward_threshold"]),
        strict_reference=True,
    )
    outcome = annotate(annotator, failure(args["prompt_ids"], args["student_ids"]))
    if not result["accepted"]:
        assert outcome.correction is None and outcome.reason == result["reason"]
        assert bool(grader.answers) == result["was_scored"]
        return
    correction = outcome.correction
    assert correction.prefix_ids.tolist() == result["prefix_ids"] and correction.suffix_ids.tolist() == result["suffix_ids"]
    assert correction.failed_suffix_ids.tolist() == result["failed_suffix_ids"] and correction.reward == result["reward"]
    assert grader.answers[0].response == " ".join(map(str, result["scored_response_ids"]))
    assert result["suffix_mask"] == [1] * len(correction.suffix_ids)


def says(solution, **settings):
    return Scripted([completion(f"[CORRECT_SOLUTION]\n{solution}")]).client(**settings)


def written(text, locked=""):
    return failure(response=[*CODEC.encode(text), STOP], locked=CODEC.encode(locked), step=2)


def test_the_whole_answer_is_verified_and_the_cut_is_the_students():
    grader = InstantGrader(RIGHT)
    with Oracle("arithmetic") as oracle:
        annotator = made(client(oracle.base_url, temperatures=(0.3,)), grader)
        failed = failure(response=CODEC.encode(" 38 = 95\n#### 95"), locked=CODEC.encode("47 +"), question="47 + 38 = ?", step=2)
        outcome = annotate(annotator, failed)
    assert outcome.reason == ACCEPTED and outcome.queue_age == 3
    [answer] = grader.answers
    assert (answer.prefix, answer.response, answer.finish_reason) == ("", "47 + 38 = 85\n#### 85", "stop")
    prefix = outcome.correction.prefix_ids
    assert CODEC.decode(prefix) == " 38 = " and prefix.tolist() == failed.response_ids[: len(prefix)].tolist()
    assert CODEC.decode(outcome.correction.suffix_ids) == "85\n#### 85<|im_end|>"


def test_a_prefix_that_holds_the_answer_is_refused_unverified():
    grader = InstantGrader(RIGHT)
    outcome = annotate(made(says("1 + 1 = 2\n#### 2 indeed"), grader), written("1 + 1 = 2\n#### 2 apples"))
    assert outcome.reason == "answer_leak" and not grader.answers
    locked = annotate(made(says("and so on"), grader), written("and so forth", locked="#### 2\n"))
    assert locked.reason == "answer_leak", "the locked prefix counts too"


def test_no_verdict_is_neither_accepted_nor_wrong():
    failed = written("1 + 1 = 3")
    for grader in (InstantGrader(Grade(None, False, "crash")), InstantGrader(RuntimeError("closed")), InstantGrader(None)):
        outcome = annotate(made(says("1 + 1 = 2", deadline=0.05), grader), failed)
        assert (outcome.reason, outcome.deferred, outcome.correction) == ("no_verdict", True, None)
    assert annotate(made(says("1 + 1 = 2"), InstantGrader(WRONG)), failed).reason == "reward_too_low"


def test_endpoint_failures_defer_and_refusals_reject():
    for error, reason, deferred in (
        (Unavailable("access", "401", retryable=False), "access", True),
        (Refused("refused", "too long"), "refused", True),  # as long as no other question was answered
    ):
        outcome = annotate(made(Scripted([error]).client(), InstantGrader(RIGHT)), written("x"))
        assert (outcome.reason, outcome.deferred) == (reason, deferred)
    client = says("1 + 1 = 2", token_budget=1)
    annotate(made(client, InstantGrader(RIGHT)), written("1 + 1 = 3"))
    outcome = annotate(made(client, InstantGrader(RIGHT)), written("1 + 1 = 4"))
    assert (outcome.reason, outcome.deferred) == ("budget_exhausted", True)


def test_every_reason_is_counted_and_survives_a_resume():
    client = says("1 + 1 = 2")
    annotator = made(client, InstantGrader(RIGHT))
    reasons = collections.Counter()
    for text in ("1 + 1 = 3", "x", "1 + 1 = 2", "1 + 1 = 4"):
        outcome = annotate(annotator, written(text))
        annotator.record(outcome)
        reasons[outcome.reason] += 1
    assert reasons == {ACCEPTED: 2, "prefix_too_short": 1, "empty_suffix": 1}
    metrics = annotator.metrics()
    assert metrics["teacher_suffix/accepted"] == 2 and metrics["teacher_suffix/reject_prefix_too_short"] == 1
    assert metrics["teacher_suffix/reject_answer_leak"] == 0 and metrics["teacher_suffix/queue_age"] == 3
    assert 2 <= metrics["teacher_suffix/suffix_len"] <= 3 and 0 < metrics["teacher_suffix/match_ratio"] < 1
    resumed = made(says("x"), InstantGrader(RIGHT))
    resumed.restore(annotator.state())
    assert {k: v for k, v in resumed.metrics().items() if "latency" not in k} == {
        k: v for k, v in annotator.metrics().items() if "latency" not in k
    }
