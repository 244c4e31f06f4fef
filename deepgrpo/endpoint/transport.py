"""One HTTP request to a chat-completions endpoint through the `openai` package, and its failures sorted into classes."""

import asyncio
import email.utils
import time
from collections.abc import Mapping
from typing import Any

import openai

from deepgrpo.endpoint.errors import Refused, Unavailable

ACCESS = (401, 403, 404, 405)  # no request of this run will ever pass: key, permission, model name or address are wrong


class OpenAITransport:
    """Sends a request's keyword arguments, returns the response body as text. Lives in the event loop that first used it."""

    def __init__(self, base_url: str, api_key: str):
        self._base_url, self._api_key = base_url, api_key
        self._sdk: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, request: Mapping[str, Any], timeout: float) -> str:
        """Sends `request` and waits at most `timeout` seconds for the whole body.

        Raises:
          Unavailable, Refused: see `deepgrpo.endpoint.errors`.
        """
        completions = self._connection().chat.completions.with_raw_response
        try:
            # The SDK's timeout restarts with every byte that arrives; this one does not.
            async with asyncio.timeout(timeout):
                response = await completions.create(**request, timeout=timeout)
            return response.http_response.text
        except (openai.APITimeoutError, TimeoutError) as error:
            raise Unavailable("timeout", f"{self._base_url}: no complete reply within {timeout:g} s") from error
        except openai.APIConnectionError as error:
            raise Unavailable("transport", f"{self._base_url}: {error.__cause__ or error}") from error
        except openai.APIStatusError as error:
            raise self._sorted(error) from error

    async def aclose(self) -> None:
        if self._sdk is not None and self._loop is asyncio.get_running_loop():
            await self._sdk.close()
        self._sdk = self._loop = None

    def _connection(self) -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if self._sdk is None or self._loop is not loop:  # pooled sockets belong to one loop; a dead loop's cannot be used
            self._sdk = openai.AsyncOpenAI(base_url=self._base_url, api_key=self._api_key, max_retries=0)
            self._loop = loop
        return self._sdk

    def _sorted(self, error: openai.APIStatusError) -> Unavailable | Refused:
        status, detail = error.status_code, f"{self._base_url}: HTTP {error.status_code}: {error.message[:300]}"
        if status == 429:
            return Unavailable("rate_limit", detail, retry_after=retry_after(error.response.headers))
        if status >= 500:
            return Unavailable("server", detail, retry_after=retry_after(error.response.headers))
        if status in ACCESS:
            return Unavailable("access", f"{detail} (check teacher.base_url, teacher.model and the API key)", retryable=False)
        return Refused("refused", detail)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a response asks to wait: `Retry-After-Ms`, or `Retry-After` as seconds or HTTP date; None if it does not.

    `now`: Unix time that dates are compared with; None: the clock's.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit)
        except (KeyError, ValueError):
            continue
    try:
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return max(0.0, date.timestamp() - (time.time() if now is None else now))
