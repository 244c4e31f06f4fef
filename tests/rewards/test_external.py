"""Grading by judges and by executed code, through the service: rules, failures that are never labels, budget, cache."""

import asyncio
import dataclasses
import json
import random
import threading

import pytest

from deepgrpo.endpoint.cache import ReplyCache
from deepgrpo.rewards.agents import external, judges
from deepgrpo.rewards.answer import Answer
from deepgrpo.types import Grade
from tests.endpoint.scripted import client
from tests.rewards.judge_server import JudgeServer


async def soon(seconds: float) -> None:
    await asyncio.sleep(seconds / 500)


def judge_at(server, **settings):
    settings = {"temperatures": (0.0, 0.3), "timeout": 0.5, "deadline": 20.0, "sleep": soon, "failures": 50} | settings
    return judges.Judge(client(server.base_url, "judge", **settings), max_characters=0)


def say(prompt: str) -> str:
    """Right if the answer is the key; full marks for reports, 3 and 5 by checklist."""
    if "Final Score" in prompt or '"correct"' in prompt:
        right = "\n42" in prompt.partition("[[[ ANSWER")[2]
        return f"### Final Score: {int(right)}" if "Final Score" in prompt else json.dumps({"correct": right})
    if '"Content"' in prompt:
        return '{"Content": 3, "Format": 5}'
    names = judges.REPORT_QUALITY if "task_fulfillment" in prompt else judges.REPORT_SOUNDNESS
    return json.dumps(dict.fromkeys(names, 2))


def answer(source, response, truth="42", finish="stop", **extra):
    return Answer(source, "What?", "", response, finish, truth, extra)


RAN = "<Analyze>a</Analyze><Code>c</Code><Execute>1</Execute><Code>c</Code><Execute>[Error]: no</Execute>"


@pytest.mark.parametrize(
    ("source", "response", "reward", "strict"),
    [
        ("datatask", RAN + "<Answer>42</Answer>", 0.75, 0.75),
        ("datatask", "<Analyze></Analyze><Answer>42</Answer>", 0.5, 0.5),
        ("datatask", RAN + "<Answer>41</Answer>", 0.0, 0.0),
        ("datatask", RAN + "<Answer>42", 0.0, 0.0),
        ("datatask", "<Answer>42</Answer>", 0.0, 0.0),
        ("datatask", RAN + "<Answer>42</Answer><Answer>41</Answer>", 0.0, 0.0),
        ("datatask", RAN + "<Execute><Answer>42</Answer></Execute>", 0.0, 0.0),
        ("research", RAN + "<Answer>report</Answer>", 0.5, 0.5),
        ("DSBench_data_analysis", "<Answer>42</Answer>", 1.0, 1.0),
        ("DSBench_data_analysis", "<Answer>7</Answer>", 0.0, 0.0),
        ("dabstep_research", "<Answer>report</Answer>", 0.75, 4.0),
        ("dabstep_research", "report", 0.0, 0.0),
        ("dabstep", "<Answer>1</Answer>", None, -1.0),
    ],
)
def test_rules(source, response, reward, strict):
    with JudgeServer(say) as server:
        for value, mode in ((reward, False), (strict, True)):
            with external.ExternalGrading([source], judge=judge_at(server), strict=mode) as grading:
                assert grading.submit(answer(source, response)).result(20).reward == value
                assert grading.submit(answer(source, response, finish="length")).result(20).reward == 0.0
    ran = [("environment", f"<Execute>{text}</Execute>") for text in ("1", "[Error]: no", "[Error]: no")]
    parts = (("student", RAN + "<Execute>fake</Execute>" * 9), *ran)
    given = dataclasses.replace(answer("datatask", RAN), parts=parts)
    assert external.code_pass_ratio(given) == pytest.approx(1 / 3)


def test_fault_programme():
    """30 % 429, 10 % 500, 5 % half-open, 5 % junk: every answer gets its verdict, nothing is left open."""
    draw = random.Random(1)
    script = [draw.choices(["429", "500", "half_open", "junk", ""], [30, 10, 5, 5, 50])[0] for _ in range(1000)]
    threads = threading.active_count()
    with JudgeServer(say, script.__getitem__, retry_after="1") as server:
        with external.ExternalGrading(["datatask"], judge=judge_at(server, retries=20)) as grading:
            said = [f"<Analyze></Analyze><Answer>{40 + i % 4} of {i}</Answer>" for i in range(40)]
            grades = [future.result(60) for future in [grading.submit(answer("datatask", text)) for text in said]]
            metrics = grading.metrics()
    assert [grade.reward for grade in grades] == [0.5 if "42" in text else 0.0 for text in said]
    seen = script[: len(server.prompts)]
    # On a busy host a request that the server meant to answer may time out as well.
    for fault, name in (("429", "rate_limit"), ("500", "server"), ("junk", "junk")):
        assert 0 < metrics[f"judge/http_{name}"] <= seen.count(fault)
    assert metrics["judge/http_timeout"] >= seen.count("half_open") > 0
    assert metrics["external/answers"] == 40 and metrics["judge/no_verdict"] == 0 and "external/no_verdict" not in metrics
    assert _settles(lambda: threading.active_count() <= threads)


def _settles(condition, tries=200):
    return any(condition() or threading.Event().wait(0.05) for _ in range(tries))


@pytest.mark.parametrize(
    ("fault", "settings", "reason"),
    [
        ("500", {"retries": 2}, "judge_server"),
        ("429", {"retries": 2}, "judge_rate_limit"),
        ("junk", {"retries": 2}, "judge_junk"),
        ("half_open", {"retries": 1}, "judge_timeout"),
        ("400", {}, "judge_refused"),
        ("401", {}, "judge_access"),
        ("unparsed", {}, "judge_unparsed"),
    ],
)
def test_a_failing_judge_is_no_verdict(fault, settings, reason):
    reply = (lambda prompt: "I would say yes.") if fault == "unparsed" else say
    with JudgeServer(reply, lambda n: "" if fault == "unparsed" else fault) as server:
        with external.ExternalGrading(["datatask"], judge=judge_at(server, **settings)) as grading:
            grade = grading.submit(answer("datatask", "<Analyze></Analyze><Answer>42</Answer>")).result(30)
            assert (grade.reward, grade.reason) == (None, reason)
            assert grading.metrics()["judge/no_verdict"] == grading.metrics()["external/no_verdict"] == 1
    assert server.temperatures[0] == 0.0 and (fault != "unparsed" or server.temperatures == [0.0, 0.3])


def test_budget_and_cache(tmp_path):
    with JudgeServer(say) as server:
        judge = judge_at(server, cache=ReplyCache(tmp_path), token_budget=200)
        with external.ExternalGrading(["DSBench_data_analysis"], judge=judge) as grading:

            def ask(text):
                return grading.submit(answer("DSBench_data_analysis", f"<Answer>{text}</Answer>")).result(20)

            assert [ask("42").reward, ask("42").reward, ask("7").reward] == [1.0, 1.0, 0.0]  # 220 tokens, asked twice
            assert len(server.prompts) == 2
            assert (ask("8").reward, ask("8").reason) == (None, "judge_budget_exhausted")
            assert ask("42").reward == 1.0  # known already
            state = json.loads(json.dumps(grading.state()))
        resumed = judge_at(server, cache=ReplyCache(tmp_path), token_budget=200)
        with external.ExternalGrading(["DSBench_data_analysis"], judge=resumed) as grading:
            grading.restore(state)
            assert ask("42").reward == 1.0 and len(server.prompts) == 2
            assert grading.metrics()["judge/tokens"] == 220


def test_errors_and_refusals():
    with pytest.raises(ValueError, match="datatask needs a judge"):
        external.ExternalGrading(["datatask"])
    with pytest.raises(ValueError, match="not graded outside"):
        external.ExternalGrading(["MATH"])
    with pytest.raises(ValueError, match="no answer keys"):
        external.refuse_untrainable(["dabstep", "MATH"])
    with external.ExternalGrading(["ds1000"], allow_network=True) as grading:
        grade = grading.submit(answer("ds1000", "```python\nx\n```")).result(20)  # the row has no tests
        assert (grade.reward, grade.reason) == (None, "error")
        with pytest.raises(ValueError, match="not announced"):
            grading.submit(answer("datatask", ""))
        with pytest.raises(ValueError, match="finish_reason"):
            grading.submit(answer("ds1000", "", finish="abort"))
    with pytest.raises(RuntimeError, match="closed"):
        grading.submit(answer("ds1000", ""))


@pytest.mark.parametrize("bad", [0.5, None, Grade(float("nan"), True, "judged"), Grade("1", True, "judged")])
def test_a_grade_that_is_none_is_no_verdict(bad, monkeypatch):
    async def judged(*_):
        return bad

    monkeypatch.setitem(external.JUDGED, "research", judged)
    monkeypatch.setitem(external.EXECUTED, "ds1000", lambda *_, **__: bad)
    monkeypatch.setattr(external.ds1000, "grade", lambda *_, **__: bad)
    monkeypatch.setattr(external.sandbox, "wall_level", lambda *_: "namespaces")
    with JudgeServer(say) as server, external.ExternalGrading(["research", "ds1000"], judge=judge_at(server)) as grading:
        for source in ("research", "ds1000"):
            assert grading.submit(answer(source, "x")).result(20) == Grade(None, False, "error")
