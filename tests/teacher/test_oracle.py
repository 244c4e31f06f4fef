"""The rules keep what is right of a student's text; the served oracle, client, worker and forest make hard states together."""

import concurrent.futures
import json
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from transformers import AutoTokenizer

from deepgrpo.data import carry_chain
from deepgrpo.endpoint.cache import ReplyCache
from deepgrpo.teacher import oracle as rules
from deepgrpo.teacher.annotate import Annotator
from deepgrpo.teacher.oracle import MODEL
from deepgrpo.teacher.splice import Codec, Limits
from deepgrpo.teacher.worker import TeacherWorker
from deepgrpo.types import Grade, Problem, as_ids
from tests.curriculum import made
from tests.endpoint.scripted import client
from tests.faults.behaviours import breaks_off, choice, message, refuses
from tests.faults.scripted_endpoint import Endpoint, right
from tests.teacher.fakes import configured

SUM = "47 + 38 + 25 = ?"
RIGHT = "47 + 38 = 85\n85 + 25 = 110\n#### 110"


@pytest.mark.parametrize(
    "student, locked, whole",
    [
        ("", "", RIGHT),
        ("47 + 38 = 75\n75 + 25 = 100\n#### 100", "", RIGHT),
        ("47+38 =85\n85+25=100", "", "47+38 =85\n85+25=110\n#### 110"),
        ("= 85\n85 + 25", "47 + 38 ", RIGHT),
        ("7 + 38", "4", RIGHT),
        ("Let us see.", "", RIGHT),
        ("85", "48 + 38 = ", None),
    ],
)
def test_arithmetic(student, locked, whole):
    said = rules.correct_arithmetic(SUM, student, locked)
    assert (None if said is None else locked + said) == whole
    assert rules.correct_arithmetic("What is love?", student, locked) is None


def test_carry_chain_goes_on_from_the_locked_prefix():
    question = "57a6b9c8d7e9f6g8h7i9j6=?"
    whole = carry_chain.solution(question)
    assert rules.correct_carry_chain(question, "b+9=62\n", whole[:7]) == whole[7:]
    assert rules.correct_carry_chain(question, "", "a+6=62\n") is None


def test_reference_solutions_keep_sound_lines(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"question": "Q?", "answer": "In May 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"}
    file.write_text(json.dumps(row) + "\n")
    correct = rules.RULES["solutions"](str(file))
    reference = "In May 48/2 = 24.\nIn all 48+24 = 72.\n#### 72"
    assert correct("Q?", "Half: 48 / 2 = $24.\nThen 48 + 24 = 73.\n#### 73", "") == "Half: 48 / 2 = $24.\n" + reference
    assert correct("Q?", "I think 2 * 3 = 6.\n48/2 = 24", "") == reference, "a true equation that leads nowhere is not kept"
    assert correct("Other?", "x", "") is None
    file.write_text("{}")
    with pytest.raises(ValueError, match="rows.jsonl"):
        rules.RULES["solutions"](str(file))


def test_served_from_the_command_line():
    command = [sys.executable, "-m", "deepgrpo.teacher.oracle", "--rule", "arithmetic", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split(" at ")[1].split()[0]
            with urllib.request.urlopen(f"{url}/models", timeout=20) as response:
                assert json.load(response)["data"][0]["id"] == MODEL
        finally:
            process.terminate()


class SolutionGrader:
    """Right is the one right solution."""

    def submit(self, answer):
        future = concurrent.futures.Future()
        right = answer.response == carry_chain.solution(answer.question)
        future.set_result(Grade(float(right), True, "right" if right else "wrong"))
        return future


def corrected_forest(tmp_path, name, base_url, replay="", seed=0):
    """A forest after three steps of sloppy failures, corrected synchronously; returns its content and the metrics."""
    folder = tmp_path / "tokenizer"
    carry_chain.build_tokenizer(folder)
    codec = Codec(AutoTokenizer.from_pretrained(folder))
    asks = client(base_url, model=MODEL, cache=ReplyCache(tmp_path / name, replay=replay))
    limits = Limits(min_prefix_match_tokens=1, min_prefix_match_ratio=0.0, min_suffix_len=1, max_model_len=200)
    config, stop_ids = configured(limits), [codec.eos_token_id]
    annotator = Annotator(config, asks, SolutionGrader(), codec, stop_ids, lambda source, text: "####" in text)
    forest, rng = made.forest(max_model_len=200), np.random.default_rng(seed)
    worker = TeacherWorker(forest, annotator, max_concurrent=8, synchronous=True)
    worker.start()
    for step in (1, 2, 3):
        for index, row in enumerate(carry_chain.problems("train", 4)):
            question = row["question"]
            problem = Problem(index, carry_chain.NAME, as_ids(codec.encode(question)), row["answer"], question)
            texts = [carry_chain.sloppy_solution(question, 0.7, rng) for _ in range(4)]
            forest.observe_root(problem, 0, 4, step, [as_ids([*codec.encode(text), codec.eos_token_id]) for text in texts])
        worker.drain(step, 60.0)
    assert worker.stop(20.0)
    metrics = {k: v for k, v in worker.metrics().items() if "latency" not in k and "/http_" not in k}
    return made.describe(forest), metrics


def test_replaying_a_run_needs_no_endpoint_and_makes_the_same_forest(tmp_path):
    no_header = choice(**message(content="It is 12."))
    faults = [right, refuses("slow down", 429, Retry_After="0"), no_header, refuses("broken", 500), breaks_off]
    with Endpoint(lambda e: (faults[e.ordinal] if e.ordinal < len(faults) else right)(e)) as endpoint:
        trees, metrics = corrected_forest(tmp_path, "first", endpoint.base_url)
        asked = len(endpoint.asked)
    assert metrics["teacher_suffix/accepted"] >= 10 and metrics["teacher_worker/deferred"] == 0
    assert metrics["teacher_suffix/match_tokens"] == metrics["teacher_suffix/match_text_tokens"], "one id a character"
    assert metrics["teacher/replies"] <= asked and metrics["teacher/available"] == 1
    again, replayed = corrected_forest(tmp_path, "second", "http://127.0.0.1:9/v1", replay=tmp_path / "first")
    assert repr(again) == repr(trees) and replayed == metrics
