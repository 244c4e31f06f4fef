"""How long rollouts take: seconds from a call of the engine to each finished response, by what was rolled out."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepgrpo.rollout.engine import Engine, OnDone, Request, Sampling
from deepgrpo.types import Completion, Group, Prompt

TIMED = ("train", "branches")
MAIN, BRANCH, STATE = "main_chain", "branch_chain", "synthetic"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One finished response: seconds since the engine was asked, and its tokens."""

    seconds: float
    prompt_length: int
    response_length: int


class Clock:
    """Times the responses of the training steps. Steps may overlap, each in a thread of its own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._samples: dict[int, dict[str, list[Sample]]] = {}
        self._calls: dict[int, collections.Counter[str]] = {}  # prompts rolled out

    def timed(self, loop: Callable[[Any, Sequence[Prompt], int, str], list[Group]]) -> Callable[..., list[Group]]:
        """The same loop; what it samples for a training step (whose purpose begins with "train" or "branches") is timed."""

        def run(setting: Any, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
            if not purpose.startswith(TIMED):
                return loop(setting, prompts, step, purpose)
            kinds = {id(prompt.ids): kind(prompt) for prompt in prompts}
            self._calls.setdefault(step, collections.Counter()).update(map(kind, prompts))
            engine = Timed(setting.engine, self._clock, kinds, self._samples.setdefault(step, {}))
            return loop(dataclasses.replace(setting, engine=engine), prompts, step, purpose)

        return run

    def metrics(self, step: int) -> dict[str, float]:
        """`timing_s/agent_loop/*` and `timing_s/one_stage/*` of a step, which is then forgotten."""
        samples, counts = self._samples.pop(step, {}), self._calls.pop(step, collections.Counter())
        main, branches = samples.get(MAIN, []) + samples.get(STATE, []), samples.get(BRANCH, [])
        values: dict[str, float] = {}
        for name, members in (("generate_main_chain", main), ("generate_branch_chain", branches)):
            if seconds := [sample.seconds for sample in members]:
                summary = {"min": min(seconds), "max": max(seconds), "mean": sum(seconds) / len(seconds)}
                values |= {f"agent_loop/{name}/{key}": value for key, value in summary.items()}
        if main or branches:
            slowest = max(main + branches, key=lambda sample: sample.seconds)
            of_slowest = {"seconds": slowest.seconds, "prompt_length": slowest.prompt_length}
            of_slowest["response_length"] = slowest.response_length
            values |= {f"agent_loop/slowest/{key}": float(value) for key, value in of_slowest.items()}
        for name, kinds in (("main_chain", MAIN), ("synthetic", STATE), ("buffer_branch", BRANCH)):
            values[f"one_stage/{name}_wall"] = max((sample.seconds for sample in samples.get(kinds, [])), default=0.0)
            if kinds != MAIN:
                values[f"one_stage/{name}_count"] = float(counts[kinds])
        return {f"timing_s/{name}": value for name, value in values.items()}


class Timed:
    """An engine that notes when each sample is there. kinds: of the requests, by the identity of their ids; others are MAIN."""

    def __init__(self, engine: Engine, clock: Callable[[], float], kinds: dict[int, str], samples: dict[str, list[Sample]]):
        self._engine, self._clock, self._kinds, self._samples = engine, clock, kinds, samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None) -> list[list[Completion]]:
        begun = self._clock()

        def done(i: int, j: int, completion: Completion) -> None:
            lengths = len(requests[i].prompt_ids), len(completion.ids)
            sample = Sample(self._clock() - begun, *lengths)
            self._samples.setdefault(self._kinds.get(id(requests[i].prompt_ids), MAIN), []).append(sample)
            if on_done is not None:
                on_done(i, j, completion)

        return self._engine.generate(requests, sampling, on_done=done)


def kind(prompt: Prompt) -> str:
    return BRANCH if prompt.stream == "branch" else STATE if prompt.injected else MAIN
