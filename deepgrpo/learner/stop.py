"""How a run is told to stop: by a signal to any of its processes. The step ends, is saved, and the program exits with 0."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from deepgrpo.learner.distributed import Channel

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of a lost terminal or a scheduler; more may come
ORDERS = (signal.SIGTERM, signal.SIGINT)  # a second one of these ends the program at once
AGAIN = 2.0  # seconds after which it counts: Ctrl-C on a launcher comes twice, from the terminal and from the launcher


class Stop:
    """Catches the signals from now on, in the main thread; elsewhere nothing is caught."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._set, self._clock, self._ordered, self._channel = False, clock, None, None
        if threading.current_thread() is threading.main_thread():
            for number in WARNINGS + ORDERS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                    signal.signal(number, self._on_signal)

    def attach(self, channel: Channel | None) -> None:
        """From now on a signal to a process but the first is reported to the first, and `is_set` there knows of it."""
        self._channel = channel
        if self._set:
            self._report()

    def is_set(self) -> bool:
        if not self._set and self._channel is not None and self._channel.leads and (told := self._channel.told()):
            self._set = True
            _say(f"stopping after this step: process {told[0]} of the learner was told to")
        return self._set

    def _on_signal(self, number: int, _frame) -> None:
        now = self._clock()
        if number in ORDERS:
            if self._ordered is not None and now - self._ordered >= AGAIN:
                os._exit(128 + number)
            self._ordered = now if self._ordered is None else self._ordered
        if not self._set:
            self._set = True
            again = "SIGTERM or Ctrl-C" + (" again" if number in ORDERS else " twice")
            _say(f"stopping after this step ({again}, {AGAIN:g} s apart: at once)")
            self._report()

    def _report(self) -> None:
        if self._channel is not None and not self._channel.leads:
            with contextlib.suppress(OSError):  # process 0 is gone: `follow` says so
                self._channel.report()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # not by print: the signal may have come while it was writing
        os.write(2, f"{text}\n".encode())
