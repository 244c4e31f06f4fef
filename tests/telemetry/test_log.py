"""What repeats within a step is said once, with a count; what differs is said."""

import logging

import pytest

from deepgrpo.telemetry import log as log_lib

log = logging.getLogger("deepgrpo.rewards.service")


@pytest.fixture
def said(tmp_path):
    handler = log_lib.open_log(tmp_path)
    yield lambda: (tmp_path / "log.txt").read_text().splitlines()
    log_lib.close_log(handler)
    logging.getLogger("deepgrpo").handlers.clear()


def fails(number):
    try:
        raise ValueError(number)
    except ValueError:
        log.exception("no verdict on answer %d", number)


def test_one_fault_of_many_items_is_said_once_with_a_count_and_one_traceback_a_run(said):
    for step in (1, 2):
        for number in range(500):
            fails(number)
            log.info("step %d", step)
        log_lib.end_step()
    lines = said()
    assert sum("Traceback" in line for line in lines) == 1
    told = [line for line in lines if "no verdict" in line]
    assert len(told) == 4 and told[0].endswith("no verdict on answer 0") and "500 times in this step: no verdict" in told[1]
    assert sum(line.endswith(("step 1", "step 2")) for line in lines) == 1000  # what is no warning is left alone


def test_what_differs_is_said(said):
    texts = ["teacher: no key", "teacher: no model", "data: FILE: row is empty"]
    for text in texts:
        log.warning("%s", text)
    assert [line.partition("service: ")[2] for line in said()] == texts
    log_lib.end_step()
    assert len(said()) == len(texts)


def test_a_line_that_quotes_its_items_ends(said):
    for number in range(300):
        log.warning("cannot read %s", "x" * number)
    log_lib.end_step()
    assert len(said()) <= log_lib.VARIANTS + 2 and "280 times" in said()[-1]


def test_the_last_counts_are_said_at_the_end(tmp_path):
    handler = log_lib.open_log(tmp_path)
    for _ in range(3):
        log.error("endpoint down")
    log_lib.close_log(handler)
    logging.getLogger("deepgrpo").handlers.clear()
    assert "3 times in this step: endpoint down" in (tmp_path / "log.txt").read_text()
