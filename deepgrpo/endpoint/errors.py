"""Why an endpoint gave no reply. Neither kind says anything about the answer that was to be judged or corrected."""


class EndpointError(Exception):
    """`kind` is a short code for metrics; the message names the endpoint and what happened."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


class Unavailable(EndpointError):
    """The endpoint cannot answer now; asking again later may help.

    kind: rate_limit, server, timeout, transport, junk, access (HTTP); breaker_open, budget_exhausted, deadline (our own word).
    retryable: the same request may be sent again at once (after a pause).
    retry_after: seconds that the endpoint asked to wait.
    """

    def __init__(self, kind: str, detail: str, retryable: bool = True, retry_after: float | None = None):
        super().__init__(kind, detail)
        self.retryable = retryable
        self.retry_after = retry_after


class Refused(EndpointError):
    """The endpoint will never answer this request (too long, malformed, filtered); others may pass."""


class TryAgain(Exception):
    """What the reply says can be read but is of no use: another reply may be better."""
