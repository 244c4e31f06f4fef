"""Every reply an endpoint gave, on disk, so that a run can be repeated without the endpoint.

`replies.jsonl`: one JSON object a line, appended only. A reply's key is a hash of what was asked (the request's body and which
attempt it was), never of when: two equal requests of a run share one reply, so that a replay cannot mix them up whatever its
timing. Instructions are stored once: a message with `shared` begins with so many characters of the first record's message.
"""

import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

FILE = "replies.jsonl"
WORTH_SHARING = 64  # characters


class ReplayMiss(LookupError):
    """A replayed run asked something that the recorded run did not."""


class _Place(NamedTuple):
    index: int  # position among the file's records
    offset: int  # in bytes


def request_key(request: Mapping[str, Any], attempt: int) -> str:
    """Returns 32 hex digits that depend on the request's content and its attempt ordinal alone."""
    canonical = json.dumps([request, attempt], sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _message(record: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a record's request; empty if it has not exactly one."""
    messages = record.get("request", {}).get("messages", ())
    return messages[0] if len(messages) == 1 and isinstance(messages[0].get("content"), str) else {}


class _Log:
    """An append-only JSONL file and, in memory, where each key's record starts (replies themselves stay on disk)."""

    def __init__(self, path: pathlib.Path, writable: bool):
        self.path = path
        self._lock = threading.Lock()  # a checkpoint is made by another thread than replies are read by
        self.places: dict[str, _Place] = {}
        # Unbuffered: what a full disk refuses must not be written later, behind the back of `places`.
        self._appended = open(path, "ab", buffering=0) if writable else None  # noqa: SIM115  owned by the cache, closed by it
        self._file = open(path, "rb")  # noqa: SIM115  likewise
        self._end = 0
        self._first = ""  # message of the first record, whose start others share
        self._scan()

    def _scan(self) -> None:
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):  # the process died while it wrote this line: the reply was never used
                if self._appended:
                    self._appended.truncate(self._end)
                break
            self.places[self._key(line, number)] = _Place(len(self.places), self._end)
            self._end += len(line)

    def _key(self, line: bytes, number: int) -> str:
        try:
            record = json.loads(line)
            self._first = self._first or _message(record).get("content", "")
            return record["key"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{self.path}:{number}: not a reply record ({error}); move the file away to start afresh") from error

    def read(self, key: str) -> dict[str, Any]:
        with self._lock:
            self._file.seek(self.places[key].offset)
            record = json.loads(self._file.readline())
        message = _message(record)
        if shared := message.pop("shared", 0):
            message["content"] = self._first[:shared] + message["content"]
        return record

    def append(self, record: Mapping[str, Any]) -> None:
        message = dict(_message(record))
        shared = len(os.path.commonprefix([self._first, message.get("content", "")]))
        if shared >= WORTH_SHARING:
            message |= {"shared": shared, "content": message["content"][shared:]}
            record = {**record, "request": {**record["request"], "messages": [message]}}
        # Lone surrogates, which a reply's JSON may hold, have no UTF-8: backslashreplace writes them as JSON's own escapes.
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            left = memoryview(line)
            try:
                while left:  # to the operating system: survives the process; `sync` survives the machine
                    left = left[self._appended.write(left) :]
            except OSError:
                self._appended.truncate(self._end)  # no half a record
                raise
            self._first = self._first or message.get("content", "")
            self.places[record["key"]] = _Place(len(self.places), self._end)
            self._end += len(line)

    def sync(self) -> int:
        """Makes all records durable and returns their number."""
        with self._lock:
            os.fsync(self._appended.fileno())
            return len(self.places)

    def close(self) -> None:
        for file in (self._file, self._appended):
            if file:
                file.close()


class ReplyCache:
    """The replies of one run, optionally on top of an earlier run's. Used by one thread; `state` by any.

    A reply is *charged* when the run first uses it. A resumed run finds replies on disk that the lost steps had paid for: they
    are charged again when they are used again, so that the totals equal the uninterrupted run's.
    """

    def __init__(self, folder: str | os.PathLike, replay: str | os.PathLike = ""):
        """Opens (or starts) the cache in `folder`.

        Args:
          replay: folder of an earlier run's cache; "" for none. With it, `find` raises for what neither folder holds.

        Raises:
          ValueError: a record other than a torn last line cannot be read; names file and line.
          FileNotFoundError: `replay` holds no cache.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._source = None
        if replay:
            path = pathlib.Path(replay) / FILE
            if not path.is_file():
                raise FileNotFoundError(
                    f"no recorded replies to replay: {path} is absent (teacher.replay names a run's teacher folder)"
                )
            self._source = _Log(path, writable=False)
        self._log = _Log(folder / FILE, writable=True)
        self._charged: set[str] = set()

    @property
    def entries(self) -> int:
        """Replies recorded in this run's folder."""
        return len(self._log.places)

    def charged(self, key: str) -> bool:
        """Whether this run has used (and accounted for) the reply before."""
        return key in self._charged

    def find(self, request: Mapping[str, Any], attempt: int) -> dict[str, Any] | None:
        """Returns the recorded payload and marks it as charged, or None when it has to be asked.

        Raises:
          ReplayMiss: replaying, and the earlier run never asked this.
        """
        key = request_key(request, attempt)
        if key not in self._log.places:
            if self._source is None:
                return None
            if key not in self._source.places:
                raise ReplayMiss(self._miss(key, request, attempt))
            self._log.append(self._source.read(key))  # a replayed run's folder is complete in itself
        self._charged.add(key)
        return self._log.read(key)["payload"]

    def add(self, request: Mapping[str, Any], attempt: int, payload: Mapping[str, Any]) -> None:
        """Records a reply just received (JSON-serialisable `payload`), charged."""
        key = request_key(request, attempt)
        self._log.append({"key": key, "attempt": attempt, "request": request, "payload": payload})
        self._charged.add(key)

    def state(self) -> dict[str, int]:
        """Makes what was recorded durable and returns what `restore` needs."""
        return {"entries": self._log.sync()}

    def restore(self, state: Mapping[str, int]) -> None:
        """Replies recorded after `state` was taken count as not yet charged.

        Raises:
          ValueError: the folder holds fewer replies than the checkpoint knew.
        """
        if self.entries < state["entries"]:
            raise ValueError(
                f"{self._log.path} holds {self.entries} replies, the checkpoint knew {state['entries']}: put the file back, "
                "or start a new run"
            )
        self._charged = {key for key, place in self._log.places.items() if place.index < state["entries"]}

    def close(self) -> None:
        for log in (self._log, self._source):
            if log is not None:
                log.close()

    def _miss(self, key: str, request: Mapping[str, Any], attempt: int) -> str:
        text = request["messages"][-1]["content"] if request.get("messages") else ""
        return (
            f"replay from {self._source.path}: request {key} (attempt {attempt}, temperature {request.get('temperature')}) was "
            f"never recorded; its prompt ends in {text[-160:]!r}. A replay needs the recorded run's config and seed, and "
            "teacher.synchronous"
        )
