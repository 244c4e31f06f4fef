"""Work that the devices still do while the host goes on: how long it takes, and what it comes to."""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import jax


class DeviceClock:
    """Devices work in the order of the laps, so a lap begins when it was enqueued or when the one before ended."""

    def __init__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "device-clock")
        self._free = 0.0

    def lap(self, begun: float, results: Any) -> "concurrent.futures.Future[float]":
        """A future of the seconds until `results` are there.

        begun: `time.monotonic()` when the first of their work was enqueued.
        """
        return self._pool.submit(self._wait, begun, results)

    def _wait(self, begun: float, results: Any) -> float:
        jax.block_until_ready(results)
        end = time.monotonic()
        seconds = end - max(begun, self._free)
        self._free = end
        return seconds


class PendingUpdate:
    """An update that the devices may still be working on."""

    def __init__(self, finish: Callable[[], dict[str, float]]):
        self._finish = finish
        self._metrics: dict[str, float] | None = None

    def metrics(self) -> dict[str, float]:
        """Waits for the devices, the first time, and returns the update's metrics."""
        if self._metrics is None:
            self._metrics = self._finish()
            self._finish = None  # what it holds may go
        return dict(self._metrics)
