"""The watchdog: one line a minute that names the whole chain, and an end that names what never came; by a clock of our own."""

import logging
import threading

import pytest

from deepgrpo.telemetry import waits
from deepgrpo.telemetry.log import Timer


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def dog(caplog):
    caplog.set_level(logging.INFO)
    clock, ended = Clock(), []
    watchdog = waits.Watchdog(clock, lambda: ended.append(clock.now))
    watchdog.clock, watchdog.ended = clock, ended

    def run_until(end):
        while clock.now < end:
            clock.now += 5
            watchdog.look()

    watchdog.run_until = run_until
    return watchdog


def test_one_line_a_minute_names_the_chain(dog, caplog):
    left = [3, 2, 1]
    with dog.on("step 12"), dog.on("rollouts"), dog.on(lambda: f"{left.pop(0)} of 128 requests at http://one:8000"):
        dog.run_until(55)
        assert not caplog.records
        dog.run_until(185)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3 and not dog.ended
    for n, line in enumerate(lines):
        assert line.startswith(f"waiting for step 12 > rollouts > {3 - n} of 128 requests at http://one:8000, since ")
    assert "(60 s)" in lines[0] and "(3 min)" in lines[2]


def test_what_is_over_is_not_said(dog, caplog):
    for _ in range(10):
        with dog.on("something quick"):
            dog.run_until(dog.clock.now + 30)
    assert not caplog.records


def test_a_wait_past_its_deadline_ends_the_program_with_its_name(dog, caplog):
    with dog.on("step 3"), dog.on("process 2 of the learner, to take 'update'", 600):
        dog.run_until(600)
        assert not dog.ended
        dog.run_until(605)
    assert dog.ended == [605] and caplog.records[-1].levelno == logging.CRITICAL
    assert "waited for step 3 > process 2 of the learner, to take 'update' for 10 min, expected at most 10 min" in caplog.text


def test_an_outer_deadline_counts_while_inner_waits_come_and_go(dog):
    with dog.on("the whole", 100):
        while not dog.ended and dog.clock.now < 1000:
            with dog.on("a part"):
                dog.run_until(dog.clock.now + 20)
    assert dog.ended[0] == 105


def test_threads_have_chains_of_their_own(dog, caplog):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with dog.on("the other's wait"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with dog.on("my wait"):
        thread.start()
        entered.wait(60)
        dog.run_until(60)
    leave.set()
    thread.join()
    (record,) = caplog.records
    assert "my wait, since" in record.message and "; and for the other's wait, since" in record.message


def test_a_description_that_fails_does_not_end_the_watch(dog, caplog):
    with dog.on(lambda: 1 / 0):
        dog.run_until(60)
    assert "something that cannot be described (ZeroDivisionError" in caplog.text


def test_a_timer_names_its_part(dog, caplog, monkeypatch):
    monkeypatch.setattr(waits, "on", dog.on)
    timer = Timer()
    with timer("step", "step 7"), timer("gen"):
        dog.run_until(60)
    assert "waiting for step 7 > rollouts and their verdicts, since" in caplog.text
    assert set(timer.metrics()) == {"timing_s/step", "timing_s/gen"}
