"""An ordered set for the forest's least-recently-used queues: nothing is ever scanned or re-sorted."""

import bisect
from collections.abc import Iterable, Iterator
from typing import Any

_CHUNK = 512  # keys a chunk aims at; moving so many pointers costs less than the comparisons that find the place


class SortedKeys:
    """Distinct keys in ascending order, held as short sorted chunks.

    `add` and `remove` look up two sorted lists and move the pointers of one chunk: microseconds at a million keys, without
    the stale entries of a heap with lazy deletion, whose clean-up would hold the forest's lock for long.
    """

    def __init__(self, keys: Iterable[Any] = ()):
        ordered = sorted(keys)
        self._chunks = [ordered[i : i + _CHUNK] for i in range(0, len(ordered), _CHUNK)]
        self._last = [chunk[-1] for chunk in self._chunks]  # greatest key of each chunk
        self._len = len(ordered)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Any]:
        return self.range()

    def range(self, start: Any = None, stop: Any = None) -> Iterator[Any]:
        """Yields keys k with start <= k < stop, ascending; the set must not change meanwhile."""
        first = 0 if start is None else bisect.bisect_left(self._last, start)
        for i in range(first, len(self._chunks)):
            chunk = self._chunks[i]
            low = 0 if start is None or i > first else bisect.bisect_left(chunk, start)
            if stop is not None and self._last[i] >= stop:
                yield from chunk[low : bisect.bisect_left(chunk, stop)]
                return
            yield from chunk[low:] if low else chunk

    def add(self, key: Any) -> None:
        """Inserts a key that is not in the set."""
        self._len += 1
        if not self._chunks:
            self._chunks, self._last = [[key]], [key]
            return
        i = min(bisect.bisect_left(self._last, key), len(self._chunks) - 1)
        chunk = self._chunks[i]
        bisect.insort(chunk, key)
        self._last[i] = chunk[-1]
        if len(chunk) > 2 * _CHUNK:
            self._split(i)

    def remove(self, key: Any) -> None:
        """Removes a key of the set.

        Raises:
          KeyError: the key is not in the set.
        """
        i = bisect.bisect_left(self._last, key)
        chunk = self._chunks[i] if i < len(self._chunks) else []
        j = bisect.bisect_left(chunk, key)
        if j == len(chunk) or chunk[j] != key:
            raise KeyError(key)
        del chunk[j]
        self._len -= 1
        if not chunk:
            del self._chunks[i], self._last[i]
            return
        self._last[i] = chunk[-1]
        if len(chunk) < _CHUNK // 2 and len(self._chunks) > 1:
            self._merge(max(i - 1, 0))

    def _split(self, i: int) -> None:
        chunk = self._chunks[i]
        half = len(chunk) // 2
        self._chunks[i : i + 1] = [chunk[:half], chunk[half:]]
        self._last[i : i + 1] = [chunk[half - 1], chunk[-1]]

    def _merge(self, i: int) -> None:
        """Joins chunks i and i + 1, so that a queue that drains at one end does not leave a trail of tiny chunks."""
        self._chunks[i] += self._chunks.pop(i + 1)
        self._last.pop(i)
        if len(self._chunks[i]) > 2 * _CHUNK:
            self._split(i)
