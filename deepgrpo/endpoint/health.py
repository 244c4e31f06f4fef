"""Whether an endpoint may be asked: its health with a circuit breaker, and what may still be spent in tokens.

The log hears of each kind of failure once, with the key that helps.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import ml_collections

from deepgrpo.endpoint.errors import EndpointError, remedy

CLOSED, HALF_OPEN, OPEN = 0.0, 0.5, 1.0  # states of the breaker, as they read in metrics
FAILURES = 8  # in a row, which open the breaker
SECONDS = 30.0  # until an open breaker lets one request try again
SUCCESS, FAILURE, UNKNOWN = "success", "failure", "unknown"  # what a request says of its endpoint's health
BLAMED_KEPT = 4096  # newest questions without an answer
TEXTS_SAID = 5  # different texts of refusals that are logged, at most

log = logging.getLogger(__name__)


class Health:
    """Of the endpoint of one section of the configuration.

    The breaker: closed, everything passes; after `failures` in a row it is open and nothing passes, for `seconds`; then it is
    half open, and one probe passes and decides. What `acquire` lets through owes one `settle`.
    """

    def __init__(self, name: str, section: ml_collections.ConfigDict, clock: Callable[[], float]):
        """name: of the section. clock: seconds."""
        self.failures, self.seconds = FAILURES, SECONDS
        self.answering = True  # whether the newest request brought a whole reply
        self.times_opened = 0
        self._name, self._section, self._clock = name, section, clock
        self._in_a_row, self._opened_at, self._probing = 0, None, False
        self._sent, self._answered = 0, -1  # requests so far; the newest of them that brought a whole reply
        self._blamed: dict[bytes, int] = {}  # question without an answer -> requests that had been sent when it failed first
        self._said: set[str] = set()

    #### The breaker

    @property
    def state(self) -> float:
        """CLOSED, HALF_OPEN or OPEN."""
        if self._opened_at is None:
            return CLOSED
        return OPEN if self.retry_in() > 0 else HALF_OPEN

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

    def settle(self, verdict: str, failed: EndpointError | None) -> None:
        """Takes a request's verdict, and logs when that opens or closes the breaker.

        A failed probe opens it again at once; stragglers of an open one change nothing. UNKNOWN: cancelled, or told to slow down.
        """
        was_down = self._opened_at is not None
        opens = False
        if verdict == SUCCESS:
            self._in_a_row, self._opened_at = 0, None
        elif verdict == FAILURE:
            self._in_a_row += 1
            opens = self._probing if was_down else self._in_a_row >= self.failures
        self._probing = False
        if opens:
            self._opened_at = self._clock()
            self.times_opened += 1
            if not was_down:
                what = "%s: %d requests in a row failed; after a pause of %g s one at a time is sent. The last: %s -> %s"
                log.warning(what, self._name, self.failures, self.seconds, failed, self.remedy(failed))
        if was_down and self._opened_at is None:
            log.warning("%s: %s answers again", self._name, self._section.base_url)

    #### Whose fault a failure is, and what the log is told

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
        return remedy(error, self._name, self._section.model, self._section.api_key_env)


class Cost(NamedTuple):
    """Tokens of prompts and of completions."""

    prompt: int
    completion: int


class Budget:
    """A limit over the client's counters. A request reserves the most that it may cost until its reply is paid.

    What is spent and reserved stays within the limit, but for one request that is alone in flight.
    """

    def __init__(self, counts: Counter, section: ml_collections.ConfigDict):
        """counts: shared with the client. section: of the endpoint; a budget of 0 is none, prices are of a million tokens."""
        self._counts, self._tokens = counts, section.token_budget
        self._prices = Cost(*(price / 1e6 for price in section.prices))
        self._reserved: list[Cost] = []
        self._dearest = 0  # completion tokens of the longest reply so far

    def charge(self, cost: Cost, of_use: bool = True) -> None:
        """Counts what was paid. of_use: for a reply that the run uses; what failed counts against the limits only."""
        lost = "" if of_use else "http_lost_"
        self._counts[f"{lost}prompt_tokens"] += cost.prompt
        self._counts[f"{lost}completion_tokens"] += cost.completion
        self._dearest = max(self._dearest, cost.completion)

    def reserve(self, most: Cost) -> Cost | None:
        """Sets aside what a request may cost; None while it does not fit beside what is in flight."""
        most = Cost(most.prompt, max(most.completion, self._dearest))
        if self._reserved and self._exceeded(_sum([self._paid(), *self._reserved, most]), by=1):
            return None
        self._reserved.append(most)
        return most

    def release(self, reserved: Cost) -> None:
        self._reserved.remove(reserved)

    def spent(self) -> bool:
        return self._exceeded(self._paid())

    def money(self) -> float:
        """Of the replies that the run uses."""
        return self._price(self._paid([""]))

    def __str__(self) -> str:
        paid = self._paid()
        return f"spent {sum(paid)} of {self._tokens or 'any'} tokens, money {self._price(paid):.4f}"

    def _paid(self, kinds: Iterable[str] = ("", "http_lost_")) -> Cost:
        return _sum(Cost(self._counts[f"{kind}prompt_tokens"], self._counts[f"{kind}completion_tokens"]) for kind in kinds)

    def _price(self, cost: Cost) -> float:
        return sum(tokens * price for tokens, price in zip(cost, self._prices, strict=True))

    def _exceeded(self, cost: Cost, by: int = 0) -> bool:
        return bool(self._tokens) and sum(cost) >= self._tokens + by


def _sum(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))
