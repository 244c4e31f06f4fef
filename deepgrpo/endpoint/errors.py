"""Why an endpoint gave no reply, and what helps. Neither says anything about the answer that was to be judged or corrected."""

import json
import re
from typing import Any

from deepgrpo.config.errors import redact

PROXIED = "through the proxy that the environment names"  # part of the text of failures of the connection


class EndpointError(Exception):
    """`kind` is a short code for metrics; the message names the endpoint and what happened, in its own words, without secrets."""

    def __init__(self, kind: str, detail: str):
        super().__init__(redact(detail))
        self.kind = kind


class Unavailable(EndpointError):
    """The endpoint cannot answer now; asking again later may help.

    kind: rate_limit, server, timeout, transport, junk, access (HTTP); refused, filtered, cut, empty (of a question, as long as
    nothing shows that others fare better); breaker_open, budget_exhausted, deadline (our own word).
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


def failure(status: int, detail: str, retry_after: float | None = None, where: str = "") -> Unavailable | Refused:
    """The failure that an HTTP status stands for. where: of a redirect."""
    if status in (408, 409, 425) or status >= 500:
        return Unavailable("server", detail, retry_after=retry_after)
    if status == 429 and not re.search(r"insufficient_quota|billing|exceeded your current quota", detail):
        return Unavailable("rate_limit", detail, retry_after=retry_after)
    if status < 400:
        return Unavailable("access", f"{detail} (redirected to {where or 'nowhere'})", retryable=False)
    if status in (401, 402, 403, 404, 405, 407, 410, 429):  # no request of this run will ever pass
        return Unavailable("access", detail, retryable=False)
    return Refused("refused", detail)


def words(said: Any) -> str:
    """An error in the endpoint's own words, on one line: of the body of an error, or of the JSON object in it."""
    if isinstance(said, str):
        try:
            value = json.loads(said)
        except (ValueError, RecursionError):
            value = said
        said = value.get("error", value) if isinstance(value, dict) else said
    if isinstance(said, dict):
        message, code = said.get("message"), said.get("code")
        said = f"{message} ({code})" if isinstance(message, str) and isinstance(code, str) else message or json.dumps(said)
    return re.sub(r"\s+", " ", str(said))[:400]


_PARAMETERS = (  # what a refusal names, and the key that sends it
    (r"chat_template|enable_thinking|extra_body|thinking", "--config.{name}.enable_thinking=unset"),
    (r"temperature", "--config.{name}.temperatures='(1.0,)'"),
    (
        r"max_\w*tokens|context.length|max_model_len|too (long|many tokens)|maximum (input|context|tokens)",
        "a smaller --config.{name}.max_tokens (0: none is sent), or an endpoint with a longer context",
    ),
    (r"api.?key|unauthorized", "check the key in {key}"),
    (r"model", "--config.{name}.model=a model that the endpoint serves"),
)
_KINDS = {
    "access": "check --config.{name}.base_url (it mostly ends in /v1), --config.{name}.model and the key in {key}",
    "transport": "check --config.{name}.base_url, or start one: vllm serve {model} --port 8001 --max-model-len 32768",
    "timeout": "check --config.{name}.base_url and the load of the endpoint; --config.{name}.timeout bounds a request",
    "server": "look at the endpoint's own log",
    "junk": "check that --config.{name}.base_url is that of an OpenAI-compatible endpoint (it mostly ends in /v1)",
    "rate_limit": "a smaller --config.{name}.max_concurrent, or a higher limit from the endpoint's provider",
    "deadline": "look at the load of the endpoint, or lower --config.{name}.max_concurrent",
    "budget_exhausted": "raise the budget: --config.{name}.token_budget",
    "cut": "raise --config.{name}.max_tokens (0: the endpoint's own limit), or --config.{name}.enable_thinking=false",
    "empty": "--config.{name}.enable_thinking=false, or raise --config.{name}.max_tokens; tools have to be off at the endpoint",
    "filtered": "look at the endpoint's content filter, or name another --config.{name}.model",
}


def remedy(error: EndpointError, name: str, model: str, key: str) -> str:
    """What the user can do. name: section of the configuration. key: environment variable that holds the key."""
    text, kind = str(error), error.kind
    if kind == "transport" and "certificate" in text.lower():
        return "export SSL_CERT_FILE=the certificate authority's file (PEM), if you trust the endpoint"
    if kind == "transport" and PROXIED in text:
        return f"look at http_proxy, https_proxy and no_proxy of this machine, and at --config.{name}.base_url"
    if kind == "transport" and re.search(r"header|codec", text):
        return f"check the key in {key}: it holds characters that a header may not hold"
    if kind == "refused":
        several = "try --config.{name}.enable_thinking=unset, .temperatures='(1.0,)' and .max_tokens=0 of the same section"
        helps = next((helps for pattern, helps in _PARAMETERS if re.search(pattern, text, re.IGNORECASE)), several)
    else:
        helps = _KINDS.get(kind, "check --config.{name}.base_url")
    return helps.format(name=name, model=model, key=key)
