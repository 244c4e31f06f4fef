"""The progress line, with and without a terminal, and the timer."""

import io
import types

import pytest
import rich.console

from deepgrpo.telemetry.log import Console, Progress, Timer

METRICS = {
    "critic/main_chain/rewards/mean": 0.25,
    "val-core/task/reward/mean@1": 0.5,
    "forest/num_trees": 16,
    "forest/active_nonroot_nodes": 63,
    "teacher_worker/total_attempted": 52,
    "teacher_worker/total_succeeded": 41,
    "training/student_tokens": 2000,
    "timing_s/step": 2.0,
    "timing_s/gen": 1.2,
    "timing_s/update_actor": 0.6,
}


def progress(terminal: bool, times, first=(0, 0, 0), steps=10, student_tokens=0):
    text = io.StringIO()
    console = rich.console.Console(file=text, force_terminal=terminal, width=200)
    train = types.SimpleNamespace(steps=steps, epochs=2, student_tokens=student_tokens)
    begun = dict(zip(("training/global_step", "training/passes", "training/student_tokens"), first, strict=True))
    return Progress(train, begun, console=console, clock=iter(times).__next__), text


def test_plain_lines():
    shown, text = progress(False, [0.0, 4.0, 6.0], first=(2, 0, 0))
    shown.update(4, METRICS)
    shown.update(5, {"training/student_tokens": 3000})
    shown.close()
    first, second = text.getvalue().splitlines()
    assert first == (
        "step 4/10 | reward 0.250 | validation 0.500 | forest 63 states in 16 trees | teacher 41 of 52"
        " | 2.0 s (rollouts 60%, update 30%) | 12 s left"
    )
    assert second == "step 5/10 | validation 0.500 | 10 s left"


def test_the_token_budget_may_end_it_first():
    shown, text = progress(False, [0.0, 100.0], first=(2, 0, 1000), student_tokens=3000)
    shown.update(3, METRICS)
    assert text.getvalue().endswith("1 min 40 s left\n")


def test_passes_over_the_data_may_end_it():
    shown, text = progress(False, [0.0, 100.0], first=(1, 0.5, 0), steps=0)
    shown.update(3, {"training/passes": 1.0})
    assert text.getvalue() == "step 3 | pass 1.00/2 | 3 min 20 s left\n"


def test_live_line():
    shown, text = progress(True, [0.0, 1.0])
    shown.update(1, METRICS)
    shown.close()
    assert "\x1b[" in text.getvalue() and "step 1/10" in text.getvalue()


def test_timer():
    timer = Timer(iter([0.0, 1.0, 3.0, 10.0, 20.0, 24.0]).__next__)
    with timer("step"), timer("gen"):
        pass
    with timer("gen"):
        pass
    assert timer.metrics() == {"timing_s/gen": 6.0, "timing_s/step": 10.0}
    assert timer.metrics() == {}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device"), ValueError("closed")]
)
def test_a_line_that_cannot_be_shown_ends_nothing(live, error, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise error

        flush = write

    console = Console(file=Broken(), force_terminal=live, width=200)
    shown = Progress(types.SimpleNamespace(steps=9, epochs=1, student_tokens=0), {"training/global_step": 0}, console=console)
    for step in (1, 2, 3):
        shown.update(step, METRICS)
    shown.close()
    assert "the progress line could not be written" in caplog.text
