"""The check of endpoints at the start: one token is asked for through the run's own client; the list of models is only a hint."""

import asyncio
import os
import threading
from collections.abc import Sequence

import ml_collections

from deepgrpo.config.errors import Finding, redact
from deepgrpo.endpoint.client import open_client
from deepgrpo.endpoint.errors import EndpointError, Unavailable, remedy

SECONDS = 3.5  # for all of it, of which the endpoints get less by LAST_WORD
LAST_WORD = 0.5
WITHOUT = {"teacher": ", or train without a teacher: --config.teacher.enabled=false", "judge": ""}

_Answer = tuple[EndpointError | None, list[str] | None]  # why there is no token; the models that are listed


def problems(config: ml_collections.ConfigDict, names: Sequence[str]) -> list[Finding]:
    """Asks the endpoints of the sections `names`, all at once; returns after SECONDS whatever they do."""
    from deepgrpo.endpoint import transport  # noqa: F401  the SDK's import is none of the endpoint's time

    answers: dict[str, _Answer] = {}

    async def ask(name: str) -> None:
        client, seconds = open_client(config, name), SECONDS - LAST_WORD
        served = asyncio.create_task(client.served(seconds))
        try:
            error = await client.check(seconds)
            answers[name] = error, await served if error else None
        finally:
            served.cancel()
            await client.aclose()

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, names))

    # A thread of its own, as no time limit ends a look-up of a name in the operating system.
    thread = threading.Thread(target=lambda: asyncio.run(ask_all()), name="endpoint-check", daemon=True)
    thread.start()
    thread.join(SECONDS)
    silent = Unavailable("timeout", f"no word from the endpoint within {SECONDS:g} s"), None
    return [finding for name in names for finding in _findings(config[name], name, *answers.get(name, silent))]


def _findings(
    section: ml_collections.ConfigDict, name: str, error: EndpointError | None, served: list[str] | None
) -> list[Finding]:
    key, found = section.api_key_env, []
    if not os.environ.get(key):
        helps = f"export {key}=YOUR_KEY   (EMPTY for a server of your own that wants none)"
        found.append(Finding(f"{name}: environment variable {key} is not set", helps))
    if error is None or (found and error.kind == "access"):  # the missing key explains it
        return found
    if served and section.model not in served and error.kind in ("access", "refused"):
        shown = ", ".join(served[:8]) + (", ..." if len(served) > 8 else "")
        helps = f"set --config.{name}.model to a served one, or serve it with --served-model-name {section.model}"
        return [*found, Finding(f"{name}: {redact(section.base_url)} serves {shown}, not {section.model} ({error})", helps)]
    helps = remedy(error, name, section.model, key) + WITHOUT[name]
    alive = error.kind in ("rate_limit", "filtered") or (error.kind == "timeout" and served is not None)
    what = str(error) if section.base_url in str(error) else f"{redact(section.base_url)}: {error}"
    return [*found, Finding(f"{name}: {what}", helps, fatal=not alive)]
