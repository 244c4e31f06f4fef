"""An endpoint client on a scripted transport and a clock of its own: no socket, no waiting."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from configs import common
from deepgrpo.endpoint.client import Client


def completion(text: str | None, prompt_tokens: int = 10, completion_tokens: int = 5) -> str:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": usage})


def client(base_url: str, name: str = "teacher", **settings: Any) -> Client:
    """settings: keys of the section, arguments of the client, and what constants decide elsewhere."""
    section = common.get_config().teacher
    section.update(base_url=base_url, model="m", api_key_env="NO_KEY", attempts=0, enable_thinking="unset")
    section.update({key: settings.pop(key) for key in list(settings) if key in section})
    decided = {
        key: settings.pop(key) for key in list(settings) if key in ("extra_body", "retries", "deadline", "failures", "seconds")
    }
    made = Client(name, section, **settings)
    for key, value in decided.items():
        setattr(made if hasattr(made, key) else made.health, key, value)
    return made


class Scripted:
    """Plays `replies` (bodies, or exceptions to raise; the last one repeats), each of `seconds` on its own clock."""

    def __init__(self, replies: Sequence[Any], seconds: float = 0.0):
        self.replies, self.seconds = list(replies), seconds
        self.requests: list[dict[str, Any]] = []
        self.pauses: list[float] = []
        self.now = 0.0

    async def __call__(self, request, timeout: float) -> str:
        self.requests.append({**request, "timeout": timeout})
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        await asyncio.sleep(0)
        self.now += min(self.seconds, timeout)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def client(self, **settings: Any) -> Client:
        return client("http://scripted/v1", transport=self, sleep=self.sleep, clock=lambda: self.now, **settings)


def ok(text: str) -> str:
    """Parses what starts with "ok"."""
    if not text.startswith("ok"):
        raise ValueError(text)
    return text.upper()


def run(*asks: Callable[[], Any]) -> list[Any]:
    """Results (or exceptions) of coroutines run together in one loop."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(ask() for ask in asks), return_exceptions=True)

    return asyncio.run(main())
