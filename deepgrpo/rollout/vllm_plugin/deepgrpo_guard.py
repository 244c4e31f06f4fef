"""Middleware of vLLM's server: a token on every path but /health, and the routes /deepgrpo/identity and /deepgrpo/generate.

vLLM's own --api-key leaves the routes open that pause the engine, load weights and call worker methods. Settings come from the
environment, where other users cannot read them as they can a command line: DEEPGRPO_TOKEN, DEEPGRPO_RUN_ID, DEEPGRPO_MODEL.
"""

import importlib.metadata
import os
import secrets
import time

import deepgrpo_generate
from starlette.responses import JSONResponse

IDENTITY = "/deepgrpo/identity"
OPEN = "/health"


class Guard:
    """ASGI middleware; outermost of vLLM's, so that nothing is parsed before the token is known to be right."""

    def __init__(self, app):
        self.app = app
        self.expected = b"Bearer " + os.environ["DEEPGRPO_TOKEN"].encode()
        self.identity = {
            "run_id": os.environ["DEEPGRPO_RUN_ID"],
            "pid": os.getpid(),
            "vllm": importlib.metadata.version("vllm"),
            "model": os.environ["DEEPGRPO_MODEL"],
            "started": time.time(),
        }

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or scope["path"] == OPEN:
            await self.app(scope, receive, send)
        elif not secrets.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.expected):
            await self._refuse(scope, receive, send)
        elif scope["path"] == IDENTITY:
            await JSONResponse(self.identity)(scope, receive, send)
        elif scope["path"] == deepgrpo_generate.PATH:
            await deepgrpo_generate.answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _refuse(self, scope, receive, send):
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        message = f"this server belongs to a run; {scope['path']} needs its token (Authorization: Bearer ...)"
        await JSONResponse({"error": message}, 401)(scope, receive, send)
