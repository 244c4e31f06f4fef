"""One HTTP request to an endpoint through the `openai` package: bounded in bytes and time, its failures sorted into classes."""

import asyncio
import email.utils
import ipaddress
import json
import math
import os
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import openai

from deepgrpo.config.errors import register_secret
from deepgrpo.endpoint.errors import PROXIED, EndpointError, Refused, Unavailable, failure, words

BODY_LIMIT = 16 << 20  # bytes of a reply after decompression; a reply of 100,000 tokens has half a million
ERROR_LIMIT = 64 << 10  # bytes that are read of the body of an error
LONGEST_WAIT = 3600.0  # seconds: longest `Retry-After` that is believed


class OpenAITransport:
    """Sends a request's keyword arguments, returns the response body as text. Lives in the event loop that first used it."""

    def __init__(self, base_url: str, api_key: str):
        self._base_url, self._api_key = base_url, api_key.strip() or "EMPTY"
        self._sdk: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renames_limit = False  # newer models of OpenAI's take the reply's limit under another name only
        register_secret(self._api_key)

    async def __call__(self, request: Mapping[str, Any], timeout: float) -> str:
        """Sends `request` and waits at most `timeout` seconds for the whole body.

        Raises:
          Unavailable, Refused: see `deepgrpo.endpoint.errors`.
        """
        try:
            return await self._text("chat", timeout, self._dialect(request))
        except Refused as error:
            if "max_tokens" not in request or self._renames_limit or "max_completion_tokens" not in str(error):
                raise
        self._renames_limit = True
        return await self._text("chat", timeout, self._dialect(request))

    async def models(self, timeout: float) -> str:
        """The list of models, as the endpoint gives it. Raises as a request does."""
        return await self._text("models", timeout, {})

    async def aclose(self) -> None:
        if self._sdk is not None and self._loop is asyncio.get_running_loop():
            await self._sdk.close()
        self._sdk = self._loop = None

    def _dialect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if not self._renames_limit:
            return dict(request)
        return {"max_completion_tokens" if key == "max_tokens" else key: value for key, value in request.items()}

    async def _text(self, route: str, timeout: float, arguments: Mapping[str, Any]) -> str:
        try:
            # The SDK's timeout restarts with every byte that arrives; this one does not.
            async with asyncio.timeout(timeout):
                sdk = self._connection()
                routes = {
                    "chat": sdk.chat.completions.with_streaming_response.create,
                    "models": sdk.models.with_streaming_response.list,
                }
                async with routes[route](**arguments, timeout=timeout) as response:
                    return await self._body(response.http_response)
        except (openai.APITimeoutError, TimeoutError) as error:
            raise Unavailable("timeout", f"{self._base_url}: no complete reply within {timeout:g} s") from error
        except Exception as error:  # also what the machine's proxies, certificates and keys do to the SDK
            cause = error if isinstance(error, EndpointError) else error.__cause__ or error
            if isinstance(cause, EndpointError):
                raise cause from None
            proxied = f" ({PROXIED})" if urllib.request.getproxies() and not is_loopback(self._base_url) else ""
            raise Unavailable("transport", f"{self._base_url}: {str(cause)[:600] or type(cause).__name__}{proxied}") from error

    async def _body(self, response: Any) -> str:
        """The body as text. It is JSON, whatever the declared type: without a declared character set the bytes tell."""
        try:
            body = await _bytes(response, BODY_LIMIT)
            if len(body) > BODY_LIMIT:
                raise ValueError(f"the body is longer than {BODY_LIMIT >> 20} MiB")
            return body.decode(response.charset_encoding or json.detect_encoding(body)).removeprefix("\ufeff")
        except (TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:
            if "Timeout" in type(error).__name__:  # the HTTP library's own
                raise TimeoutError from error
            raise Unavailable("junk", f"{self._base_url}: the reply broke off or cannot be decoded: {error}"[:600]) from error

    async def _sorted(self, response: Any) -> None:
        """Raises for everything but success, redirects included, before the SDK reads the body without a limit."""
        if response.is_success:
            return
        said = words((await _bytes(response, ERROR_LIMIT)).decode("utf-8", "replace"))
        detail = f"{self._base_url}: HTTP {response.status_code}: {said}"
        wait = retry_after(response.headers)
        raise failure(response.status_code, detail, wait, response.headers.get("location", ""))

    def _connection(self) -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if self._sdk is None or self._loop is not loop:  # pooled sockets belong to one loop; a dead loop's cannot be used
            # Without redirects the key goes to no other host.
            settings: dict[str, Any] = {"follow_redirects": False, "event_hooks": {"response": [self._sorted]}}
            if is_loopback(self._base_url):  # a proxy of the machine is not for traffic that never leaves it
                settings["trust_env"] = False
                if authority := os.environ.get("SSL_CERT_FILE"):
                    settings["verify"] = ssl.create_default_context(cafile=authority)
            http = openai.DefaultAsyncHttpxClient(**settings)
            self._sdk = openai.AsyncOpenAI(base_url=self._base_url, api_key=self._api_key, max_retries=0, http_client=http)
            self._loop = loop
        return self._sdk


async def _bytes(response: Any, limit: int) -> bytes:
    """The decompressed body, up to the piece that exceeds `limit`."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > limit:
            break
    return bytes(body)


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own."""
    host = urllib.parse.urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost") or host == socket.gethostname():
        return True
    try:
        address = ipaddress.ip_address(socket.inet_aton(host) if ":" not in host else host)  # inet_aton also reads "127.1"
    except (OSError, ValueError):
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a response asks to wait: `Retry-After-Ms`, or `Retry-After` as seconds or HTTP date; None if it does not.

    At most LONGEST_WAIT. `now`: Unix time that dates are compared with; None: the clock's.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        return None if math.isnan(seconds) else min(max(0.0, seconds), LONGEST_WAIT)
    try:
        date = email.utils.mktime_tz(email.utils.parsedate_tz(headers["retry-after"]))
    except (KeyError, ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, date - (time.time() if now is None else now)), LONGEST_WAIT)
