"""How long the devices work on what was enqueued, while the host goes on."""

import concurrent.futures
import time
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
