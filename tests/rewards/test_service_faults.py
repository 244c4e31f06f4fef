"""What the user's functions, hanging answers and the trainer's environment do to the service: nothing that they should not."""

import concurrent.futures
import json
import os
import pathlib
import re
import socket
import threading
from types import SimpleNamespace

import pytest

from configs import common
from deepgrpo.config.errors import ConfigError
from deepgrpo.loops import reasoning
from deepgrpo.preflight import inputs as preflight
from deepgrpo.rewards import service as service_lib
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.service import GradingService
from deepgrpo.types import Grade

FUNCTIONS = """
import json, os, sys, threading
import numpy as np

def np_f32(answer): return np.float32(0.5)
def np_bool(answer): return np.bool_(True)
def a_list(answer): return [1.0]
def nan(answer): return float("nan")
def raises(answer): return answer.no_such_field
def leaves(answer): sys.exit(3)
def dies(answer): os._exit(3)
def nothing(answer): pass
def yields(answer): yield 1.0
def spins(answer):
    while True: pass
def deep(answer): return deep(answer)
def prints(answer):
    print("x" * 10**6); sys.stderr.write("y" * 10**6); return 1.0
def threads(answer):
    threading.Thread(target=threading.Event().wait).start(); return 1.0
async def awaits(answer): return 0.25
def sees(answer):
    open(answer.question, "w").write(json.dumps([sorted(os.environ), os.listdir("/proc/self/fd")])); return 1.0
def sometimes(answer):
    if answer.response != "#### 18": raise ValueError("a hard one")
    return 1.0
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "grading_functions.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "grading_functions"


def number(response="#### 18", question="How many?"):
    return Answer("GSM8K", question, "", response, "stop", "18")


@pytest.mark.parametrize(
    ("function", "bonus"), [("np_f32", 0.5), ("np_bool", 1.0), ("prints", 1.0), ("threads", 1.0), ("awaits", 0.25)]
)
def test_functions_that_work(mine, function, bonus):
    with GradingService(1, 20.0, ["GSM8K"], Rubric(extra=(f"{mine}:{function}=1",))) as service:
        assert [service.submit(number()).result(60).reward for _ in range(5)] == [1 + bonus] * 5
        service.end_step()


BROKEN = {  # function: reason of its answers, and what the run ends with
    "a_list": ("error_a_list", r"returned list \[1.0\], expected a number"),
    "nan": ("error_nan", "must be finite"),
    "raises": ("error_raises", "no_such_field"),
    "leaves": ("error_leaves", "SystemExit: 3"),
    "dies": ("crash", "outcome of its process: crash"),
    "nothing": ("no_part_verdict", "it returned None"),
    "yields": ("error_yields", "the function yields"),
    "spins": ("timeout", "took too long"),
    "deep": ("error_deep", "RecursionError"),
}


@pytest.mark.parametrize("function", BROKEN)
def test_a_function_that_always_fails_labels_nothing_and_ends_the_run(mine, function):
    reason, said = BROKEN[function]
    with GradingService(1, 1.5 if function == "spins" else 60.0, ["GSM8K"], Rubric(extra=(f"{mine}:{function}=1",))) as service:
        grades = [service.submit(number()).result(120) for _ in range(service_lib.COMMON_CAUSE)]
        assert {(grade.reward, grade.reason) for grade in grades} == {(None, reason)}
        with pytest.raises(ConfigError, match=rf"(?s){function} gave no verdict on any of {len(grades)} answers.*{said}.*->"):
            service.end_step()


def test_a_function_that_fails_now_and_then_goes_on(mine):
    with GradingService(1, 60.0, ["GSM8K"], Rubric(extra=(f"{mine}:sometimes=1",))) as service:
        grades = [service.submit(number(f"#### {18 + i}")).result(60) for i in range(8)]
        service.end_step()
        assert [grade.reward is None for grade in grades] == [False] + [True] * 7
        assert service.metrics()["grading/reason/error_sometimes"] == 7


def test_workers_inherit_no_secrets_and_no_descriptors(mine, tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "GRADER_KEY"):
        monkeypatch.setenv(name, "s3cret")
    with open(os.devnull) as opened:
        os.set_inheritable(opened.fileno(), True)
        with GradingService(1, 60.0, ["GSM8K"], Rubric(extra=(f"{mine}:sees=1",))) as service:
            service.submit(number(question=str(tmp_path / "seen"))).result(60)
    environment, descriptors = json.loads((tmp_path / "seen").read_text())
    assert [name for name in environment if name in os.environ and os.environ[name] == "s3cret"] == ["GRADER_KEY"]
    assert len(descriptors) <= 6  # standard streams, the connection, the file, the folder that is listed


def test_workers_of_the_packages_graders_have_walls(monkeypatch, tmp_path):
    monkeypatch.setattr(service_lib, "WORKER", "scripted_worker")
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    with GradingService(1, 60.0, ["GSM8K"]) as service, socket.create_server(("127.0.0.1", 0)) as server:
        spare = service._lanes[False].ready.get(timeout=60)
        service._lanes[False].ready.put(spare)
        if not spare.walls:
            pytest.skip("namespaces are not allowed on this machine")
        here = pathlib.Path(__file__).parent / "written_by_a_worker"
        grade = service.submit(number(f"reach {server.getsockname()[1]} {here}")).result(60)
        assert grade.reason == "walled" and not here.exists()


def test_the_verdict_comes_before_the_next_worker_is_ready(monkeypatch):
    """No new worker can start any more: the spare one serves the second attempt, and the verdict is there all the same."""
    monkeypatch.setattr(service_lib, "WORKER", "scripted_worker")
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    started, go_on = service_lib._Worker.when_ready, threading.Event()
    with GradingService(1, 2.0, ["GSM8K"]) as service:
        spare = service._lanes[False].ready.get(timeout=60)
        service._lanes[False].ready.put(spare)
        monkeypatch.setattr(service_lib._Worker, "when_ready", lambda worker: go_on.wait(60) and started(worker))
        first, second = service.submit(number("sleep")), service.submit(number("fine"))
        try:
            assert first.result(60).reason == "timeout" and not second.done()
        finally:
            go_on.set()
        assert second.result(60).reward == 1.0


def test_answers_that_are_not_graded_in_time_have_no_verdict_and_the_step_goes_on():
    futures = [concurrent.futures.Future() for _ in range(4)]
    futures[0].set_result(Grade(1.0, True, "right"))
    futures[1].set_running_or_notify_cancel()
    setting = SimpleNamespace(grading_deadline=0.0)
    reasoning.wait_for_verdicts(setting, futures, 7)
    assert [reasoning.verdict_of(future).reason for future in futures] == ["right"] + ["unfinished"] * 3
    assert all(reasoning.verdict_of(future).reward is None for future in futures[1:])
    with pytest.raises(TimeoutError, match="step 7: 3 of 3"):
        reasoning.wait_for_verdicts(setting, [concurrent.futures.Future() for _ in range(3)], 7)


FOUND = {  # function: what the input check says of it; None: nothing
    "np_f32": None,
    "prints": None,
    "awaits": None,
    "a_list": r"a_list: returned list \[1.0\], expected a number",
    "raises": "AttributeError: 'Answer' object has no attribute 'no_such_field'",
    "yields": "the function yields",
    "nothing": "returned None",
    "leaves": "SystemExit: 3",
    "dies": "ended its process",
    "spins": "took more than",
    "absent": "has no function absent",
}


@pytest.mark.parametrize("function", FOUND)
def test_the_input_check_calls_each_function_once(mine, function, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many?", "answer": "so\n#### 18"}) + "\n")
    config = common.get_config()
    config.data.train, config.data.validation = (f"gsm8k:{tmp_path}/train.jsonl",), ()
    config.rewards.deadline = 1.5 if function == "spins" else 60.0
    for key, entry in (("extra", f"{mine}:{function}=1"), ("graders", f"GSM8K={mine}:{function}")):
        config.rewards.extra, config.rewards.graders = (), ()
        config.rewards[key] = (entry,)
        found = preflight.reward_problems(config)
        if FOUND[function] is None:
            assert found == []
        else:
            assert len(found) == 1 and found[0].what.startswith("rewards: ") and re.search(FOUND[function], found[0].what), found
            assert found[0].fatal == (function != "nothing")
