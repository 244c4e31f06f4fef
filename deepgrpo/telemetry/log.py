"""The run's log: everything that is said goes to the terminal and, with the time, to `<run>/log.txt`.

A warning or an error that repeats within a step, because every answer or every request meets the same fault, is said once; how
often it came is said at the end of the step (`end_step`). Its traceback is said once a run, and so is the whole record if it has
the attribute `once`.
"""

import collections
import contextlib
import logging
import pathlib
import re
import sys
import threading
from collections.abc import Iterator

from deepgrpo.config.errors import describe, redact, shown

VARIANTS = 20  # different texts of one line of code, a step

log = logging.getLogger(__name__)


class OncePerStep(logging.Filter):
    """Lets the first warning of a kind through and counts the others.

    The kind is the line of code that it comes from and its first line of text, numbers aside. A line of code that says more than
    `VARIANTS` different things in a step quotes its items: what comes after is one kind.
    """

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple] = collections.Counter()
        self._texts: dict[tuple, str] = {}  # the newest of each kind
        self._explained: set[tuple] = set()  # kinds whose traceback was said

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or getattr(record, "summary", False):
            return True
        if not hasattr(record, "first"):  # each handler asks
            text = record.getMessage().partition("\n")[0]
            place = record.name, record.lineno
            kind = *place, re.sub(r"\d+", "#", text)[:200]
            with self._lock:
                if kind not in self._counts and sum(known[:2] == place for known in self._counts) >= VARIANTS:
                    kind = *place, ""
                self._counts[kind] += 1
                once = getattr(record, "once", False) and kind in self._explained
                record.first = self._counts[kind] == 1 and not once
                self._texts[kind] = text[:200]
                if record.first and kind in self._explained:
                    record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
                self._explained.add(kind)
        return record.first

    def counts(self) -> list[tuple[str, str, int]]:
        """(logger, text, how often it came) of the kinds that repeated since the last call."""
        with self._lock:
            repeated = [(kind[0], self._texts[kind], count) for kind, count in self._counts.items() if count > 1]
            self._counts.clear()
            self._texts.clear()
        return repeated


class Redacted(logging.Formatter):
    """Formats a record, traceback included, without the keys of this machine and without what would steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(redact(super().format(record)))


class LogFile(logging.FileHandler):
    """The log's file. When it can no longer be written, the terminal says so once."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed and sys.stderr:
            print(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]}): the run goes on without it", file=sys.stderr)
        self.failed = True


@contextlib.contextmanager
def no_end(what: str) -> Iterator[None]:
    """A block that only shows something: its failure is said once a run, and ends nothing."""
    try:
        yield
    except Exception as error:
        unforeseen = None if isinstance(error, OSError) else error
        log.warning("%s could not be written: %s", what, describe(error), exc_info=unforeseen, extra={"once": True})


_repeats = OncePerStep()


def open_log(run_folder: str | pathlib.Path) -> logging.Handler:
    """Sends the records of the `deepgrpo` loggers there; close it with `close_log`. A resumed run appends."""
    global _repeats
    _repeats = OncePerStep()
    folder = pathlib.Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    handler = LogFile(folder / "log.txt", encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(Redacted("%(message)s"))
    for one in (handler, terminal):
        one.addFilter(_repeats)
    logger = logging.getLogger("deepgrpo")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [terminal, handler]  # replaced, not added to: a program may run more than one run
    return handler


def end_step() -> None:
    """Says how often the step's repeated warnings came."""
    for name, text, count in _repeats.counts():
        logging.getLogger(name).warning("%d times in this step: %s", count, text, extra={"summary": True})


def close_log(handler: logging.Handler) -> None:
    end_step()
    logging.getLogger("deepgrpo").removeHandler(handler)
    handler.close()
