"""What this process waits for: said once a minute, and ended, with its name, when the wait is past its deadline.

    with waits.on("the verdicts of 12 answers", deadline=600):
        ...

Waits nest: a line tells a thread's whole chain, as `step 12 > rollouts > 3 of 128 requests`. A wait that has a deadline and an
error of its own, or that is for this process's own work, gives none here.
"""

import contextlib
import datetime
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

EVERY = 60.0  # seconds between two lines, and before the first one
LOOK = 5.0  # between two looks at the waits
EXIT = 1  # status of a program that has waited too long

log = logging.getLogger(__name__)


class _Wait:
    def __init__(self, what: str | Callable[[], str], begun: float, deadline: float):
        self.what, self.begun, self.deadline = what, begun, deadline

    def __str__(self) -> str:
        if isinstance(self.what, str):
            return self.what
        try:
            return self.what()
        except Exception as error:  # a description must not end what it describes
            return f"something that cannot be described ({error!r})"


class Watchdog:
    """clock: seconds, monotonic. give_up: ends the program; the main thread may be inside a C function then.
    background: look at the waits by itself, from the first one on; otherwise somebody calls `look`.
    """

    def __init__(self, clock: Callable[[], float], give_up: Callable[[], None], background: bool = False):
        self._clock, self._give_up, self._background = clock, give_up, background
        self._chains: dict[int, list[_Wait]] = {}  # of each thread, the outermost wait first
        self._said = -math.inf
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def on(self, what: str | Callable[[], str], deadline: float = math.inf) -> Iterator[None]:
        """Names what the block waits for. A function is asked, in another thread, whenever a line is due.

        deadline: seconds after which the program ends, with a line that names the wait; the newest checkpoint resumes it.
        """
        me, wait = threading.get_ident(), _Wait(what, self._clock(), deadline)
        with self._lock:
            self._chains.setdefault(me, []).append(wait)
            if self._background:
                self._background = False
                threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._chains[me].remove(wait)
                if not self._chains[me]:
                    del self._chains[me]

    def _run(self) -> None:
        while True:
            time.sleep(LOOK)
            self.look()

    def look(self) -> None:
        """Says what is due, and ends the program if a wait is past its deadline."""
        now = self._clock()
        with self._lock:
            chains = [list(chain) for chain in self._chains.values()]
        for chain in chains:
            for n, wait in enumerate(chain, 1):
                if now - wait.begun > wait.deadline:
                    log.critical(
                        "waited for %s for %s, expected at most %s; the run ends, its newest checkpoint resumes it",
                        *(" > ".join(map(str, chain[:n])), spoken(now - wait.begun), spoken(wait.deadline)),
                    )
                    self._give_up()
                    return
        long = [chain for chain in chains if now - chain[-1].begun >= EVERY]
        if long and now - self._said >= EVERY:
            self._said = now
            log.info("waiting for %s", "; and for ".join(_line(chain, now - chain[-1].begun) for chain in long))


def _line(chain: list[_Wait], age: float) -> str:
    begun = datetime.datetime.now() - datetime.timedelta(seconds=age)
    return f"{' > '.join(map(str, chain))}, since {begun:%H:%M:%S} ({spoken(age)})"


def spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _exit() -> None:
    """Without a way out through the main thread, which may hang in a device or a collective operation."""
    faulthandler.dump_traceback(sys.stderr)
    for handler in logging.getLogger("deepgrpo").handlers:
        handler.flush()
    sys.stdout.flush()
    os._exit(EXIT)


on = Watchdog(time.monotonic, _exit, background=True).on
