"""Programs are compiled once, ahead of their use, and never again."""

import concurrent.futures
import threading

import jax
import pytest

from deepgrpo.learner.packing import Shape
from deepgrpo.learner.step import Programs
from tests.learner import tiny

SMALL, LARGE = Shape(1, 2, 24), Shape(1, 2, 48)


class Scripted(Programs):
    """Compiles nothing; `gate` holds back what is in the background."""

    def __init__(self):
        super().__init__(*[None] * 4)
        self.gate, self.compiled = threading.Event(), []

    def _compile(self, name, shape):
        if threading.current_thread().name.startswith("compile"):
            self.gate.wait(60)
        self.compiled.append((name, shape))
        return f"{name} {shape.T}"


def test_what_is_needed_does_not_wait_for_what_is_not(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one thread in the background, which the first program occupies
    programs = Scripted()
    programs.compile_ahead([("train_step", SMALL), ("train_step", LARGE), ("score", LARGE)])
    assert programs("train_step", LARGE) == "train_step 48" and programs.compiled == [("train_step", LARGE)]
    programs.gate.set()
    assert programs("train_step", SMALL) == "train_step 24" and programs("score", LARGE) == "score 48"
    assert len(programs.compiled) == len({*programs.compiled}) == programs.count == 3 and programs.recompilations == 0
    assert programs("score", SMALL) == "score 24" and programs.recompilations == 1  # in no plan


def test_two_callers_share_one_compilation():
    programs = Scripted()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: programs("score", SMALL), range(8))) == {"score 24"}
    assert programs.compiled == [("score", SMALL)]


def test_an_error_of_the_compiler_reaches_the_caller():
    programs = Scripted()
    programs._compile = lambda name, shape: 1 / 0
    programs.compile_ahead([("score", SMALL)])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            programs("score", SMALL)


def test_nothing_compiles_in_a_run_of_ragged_steps():
    """Two buckets, one and several mini-batches, the old pass, the reference pass: after `prepare` XLA has nothing to do."""
    learner = tiny.make_learner(objective__kl_coef=0.1, optim__mini_batch_prompts=1)
    learner.prepare(ahead=True)
    for name, shape in learner.programs._planned - {("score_at_1", shape) for shape in learner.shapes}:
        learner.programs(name, shape)
    learner.update(tiny.make_rows(5), 0)  # small programs of JAX's own, for scalars
    compilations = []
    listener = lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for step, n in enumerate((1, 7, 3, 12, 8), 1):
            metrics = learner.update(tiny.make_rows(n, seed=step), step)
            assert metrics["perf/new_compilations"] == 0 == metrics["perf/recompilations"]
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compilations
