"""What is known about an endpoint's health. The log hears of each kind of failure once, with the key that helps."""

import hashlib
import logging
import re
from collections.abc import Callable

from deepgrpo.endpoint.breaker import CircuitBreaker
from deepgrpo.endpoint.errors import EndpointError, remedy

BLAMED_KEPT = 4096  # newest questions without an answer
TEXTS_SAID = 5  # different texts of refusals that are logged, at most

log = logging.getLogger(__name__)


class Health:
    """Of the endpoint of one section of the configuration.

    breaker: its circuit breaker. answering: whether the newest request brought a whole reply.
    """

    def __init__(self, breaker: CircuitBreaker, name: str, base_url: str, model: str, key: str):
        """name: the section. key: environment variable of the key."""
        self.breaker = breaker
        self.answering = True
        self._name, self._base_url, self._model, self._key = name, base_url, model, key
        self._sent, self._answered = 0, -1  # requests so far; the newest of them that brought a whole reply
        self._blamed: dict[bytes, int] = {}  # question without an answer -> requests that had been sent when it failed first
        self._said: set[str] = set()

    def send(self) -> int:
        """Returns the ordinal of a request that is sent now."""
        self._sent += 1
        return self._sent

    def answered(self, request: int, whole: bool) -> None:
        self.answering = whole
        if whole:
            self._answered = max(self._answered, request)

    def blames(self, question: str) -> bool:
        """Whether a missing answer is the question's own fault: another one, sent after this had failed first, was answered."""
        digest = hashlib.sha256(question.encode("utf-8", "replace")).digest()
        first = self._blamed.setdefault(digest, self._sent)
        if len(self._blamed) > BLAMED_KEPT:
            del self._blamed[next(iter(self._blamed))]
        return self._answered > first

    def say(self, error: EndpointError) -> EndpointError:
        """Logs the first failure of a kind (of refusals: of a text), and returns it."""
        if error.kind != "breaker_open":  # its opening was said
            kind = error.kind
            if kind == "refused" and sum(said.startswith(kind) for said in self._said) < TEXTS_SAID:
                kind += re.sub(r"\b[0-9a-fA-F-]{6,}\b|\d+", "#", str(error))
            self.say_once(kind, f"{error} (others of this kind are only counted) -> {self.remedy(error)}")
        return error

    def say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s: %s", self._name, text)

    def remedy(self, error: EndpointError) -> str:
        """What the user can do about a failure."""
        return remedy(error, self._name, self._model, self._key)

    def settle(self, verdict: Callable[[], None], failed: EndpointError | None) -> None:
        """Gives the breaker its verdict on a request; the log is told when that opens it, and when it closes again."""
        breaker, was_down = self.breaker, self.breaker.down
        verdict()
        if breaker.down and not was_down:
            what = "%s: %d requests in a row failed; after a pause of %g s one at a time is sent. The last: %s -> %s"
            log.warning(what, self._name, breaker.failures, breaker.seconds, failed, self.remedy(failed))
        if was_down and not breaker.down:
            log.warning("%s: %s answers again", self._name, self._base_url)
