"""Responses of a training step are timed by what was rolled out; those of a validation are not."""

import dataclasses
from typing import Any

import numpy as np

from deepgrpo.rollout.engine import Request
from deepgrpo.telemetry.generation import Clock
from deepgrpo.types import Completion, as_ids
from tests.telemetry.made import group
from tests.telemetry.test_documented import documented


class Ticking:
    """A clock, and an engine under which it advances by 1 s a response."""

    version = 7

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def generate(self, requests, sampling, on_done=None):
        made = [[Completion(as_ids([1] * (4 - j)), np.zeros(4 - j), "stop", 7) for j in range(len(r.seeds))] for r in requests]
        for i, row in enumerate(made):
            for j, completion in enumerate(row):
                self.now += 1.0
                on_done(i, j, completion)
        return made


@dataclasses.dataclass(frozen=True)
class Setting:
    engine: Any


def loop(setting, prompts, step, purpose):
    done = []
    requests = [Request(p.ids, tuple(range(p.n))) for p in prompts]
    setting.engine.generate(requests, None, on_done=lambda i, j, completion: done.append((i, j)))
    assert setting.engine.version == 7 and len(done) == sum(p.n for p in prompts)  # the loop still hears of every response
    return []


def prompts(*streams):
    return [group(str(i), 0, 0, locked=[i], node=node, stream=stream).prompt for i, (node, stream) in enumerate(streams)]


def test_seconds_by_kind():
    engine = Ticking()
    clock = Clock(engine)
    timed = clock.timed(loop)
    timed(Setting(engine), prompts((None, "main"), (3, "main"), (4, "branch")), 1, "train")
    timed(Setting(engine), prompts((9, "branch")), 1, "branches:0")
    timed(Setting(engine), prompts((None, "main")), 2, "train/1")
    timed(Setting(engine), prompts((None, "main")), 1, "validation")
    got = clock.metrics(1)
    assert [got[f"timing_s/agent_loop/generate_main_chain/{x}"] for x in ("min", "max", "mean")] == [1, 4, 2.5]
    assert [got[f"timing_s/agent_loop/generate_branch_chain/{x}"] for x in ("min", "max", "mean")] == [1, 6, 3.5]
    slowest = {"seconds": 6, "prompt_length": 4, "response_length": 3}
    assert {name.rpartition("/")[2]: value for name, value in got.items() if "/slowest/" in name} == slowest
    assert (got["timing_s/one_stage/main_chain_wall"], got["timing_s/one_stage/synthetic_wall"]) == (2, 4)
    assert (got["timing_s/one_stage/synthetic_count"], got["timing_s/one_stage/buffer_branch_count"]) == (1, 2)
    known = documented()
    assert not [name for name in got if not known.fullmatch(name)]


def test_a_step_is_forgotten_once_it_was_asked_for():
    engine = Ticking()
    clock = Clock(engine)
    clock.timed(loop)(Setting(engine), prompts((None, "main")), 2, "train")
    assert clock.metrics(1).get("timing_s/agent_loop/slowest/seconds") is None
    assert clock.metrics(2)["timing_s/agent_loop/slowest/seconds"] == 2
    assert "timing_s/agent_loop/slowest/seconds" not in clock.metrics(2)
