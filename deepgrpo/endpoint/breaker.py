"""A circuit breaker: after enough failures in a row nothing is sent for a while, then one request may try again."""

import time
from collections.abc import Callable

CLOSED, HALF_OPEN, OPEN = "closed", "half_open", "open"
FAILURES = 8  # in a row, which open a breaker
SECONDS = 30.0  # until an open breaker lets one request try again
LEVELS = {CLOSED: 0.0, HALF_OPEN: 0.5, OPEN: 1.0}  # how a state reads in metrics


class CircuitBreaker:
    """Closed: everything passes. Open: nothing does, for `seconds`. Half open: one probe passes and decides.

    A caller that `acquire` lets through owes exactly one of `success`, `failure` and `abandon`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.failures, self.seconds, self._clock = FAILURES, SECONDS, clock
        self._in_a_row = 0
        self._opened_at: float | None = None
        self._probing = False
        self.times_opened = 0

    @property
    def down(self) -> bool:
        """Whether it has opened and no success has closed it since."""
        return self._opened_at is not None

    @property
    def state(self) -> str:
        if self._opened_at is None:
            return CLOSED
        return OPEN if self._clock() - self._opened_at < self.seconds else HALF_OPEN

    def retry_in(self) -> float:
        """Seconds until a request would be let through (0: now, as far as time decides)."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self.seconds - self._clock())

    def ready(self) -> bool:
        """Whether `acquire` would let a request through."""
        return self.state == CLOSED or (self.state == HALF_OPEN and not self._probing)

    def acquire(self) -> bool:
        if not self.ready():
            return False
        self._probing = self.state == HALF_OPEN
        return True

    def success(self) -> None:
        self._in_a_row, self._opened_at, self._probing = 0, None, False

    def failure(self) -> None:
        """Counts a failure. A failed probe opens the breaker again at once; stragglers of an open one change nothing."""
        self._in_a_row += 1
        opens = self._probing if self._opened_at is not None else self._in_a_row >= self.failures
        self._probing = False
        if opens:
            self._opened_at = self._clock()
            self.times_opened += 1

    def abandon(self) -> None:
        """The request ended without saying anything about the endpoint's health (cancelled, or told to slow down)."""
        self._probing = False
