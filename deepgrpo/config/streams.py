"""What a program writes to: streams that cannot end a training, and a tool's output, which is its result."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from deepgrpo.config.errors import Setup

log = logging.getLogger("deepgrpo.terminal")


class Steady:
    """A stream whose failures are its own: once it cannot be written (its reader is gone, the disk is full), what is said goes
    nowhere, and the log says so once."""

    def __init__(self, stream: Any, name: str):
        self._stream, self._name = stream, name
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: closed
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def _lose(self, error: Exception) -> None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for the rest of the process
        with contextlib.suppress(OSError, ValueError):  # what is buffered, and what libraries write, goes there too
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._stream = nowhere
        log.warning("%s cannot be written (%s): the run goes on and says no more there", self._name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady() -> None:
    """Makes standard output and error streams that cannot end this program; at the entry, before anything else is opened.

    Where one is closed, its number must not be given to the next file that is opened: libraries would write into that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, called in (("stdout", "standard output"), ("stderr", "standard error")):
        setattr(sys, name, Steady(getattr(sys, name) or open(os.devnull, "w", encoding="utf-8"), called))


@contextlib.contextmanager
def tool() -> Iterator[None]:
    """The life of a program whose output is its result: what goes wrong is told in one message, and a reader that has seen enough
    ends it quietly."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with Setup("error"):
        try:
            yield
            if sys.stdout:
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the rest of the buffer goes
            raise SystemExit(0) from None
