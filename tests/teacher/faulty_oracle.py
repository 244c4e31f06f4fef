"""The rule-based teacher with scripted faults of real endpoints."""

from collections.abc import Callable

from deepgrpo.teacher import oracle, prompts

SLOW = 0.2  # seconds


class FaultyOracle(oracle.Oracle):
    """faults: (ordinal of a request, from 0) -> name in FAULTS, "" for none."""

    def __init__(self, rule: str, faults: Callable[[int], str], **settings):
        super().__init__(rule, **settings)
        self.faults = faults
        self._server.RequestHandlerClass = _Handler


class _Handler(oracle._Handler):
    def answer(self, ordinal: int, prompt: str, text: str) -> None:
        fault = self.server.oracle.faults(ordinal)
        FAULTS[fault](self, prompt, text) if fault else super().answer(ordinal, prompt, text)

    def plainly(self, prompt: str, text: str) -> None:
        super().answer(0, prompt, text)


def _error(status: int) -> Callable[[_Handler, str, str], None]:
    return lambda handler, prompt, reply: handler.send_json(
        status,
        {"error": {"message": f"scripted {status}", "type": "scripted"}},
        {"Retry-After": "0"} if status == 429 else None,
    )


def _slow(handler: _Handler, prompt: str, reply: str) -> None:
    handler.server.oracle.closing.wait(SLOW)
    handler.plainly(prompt, reply)


def _half_open(handler: _Handler, prompt: str, reply: str) -> None:
    handler.server.oracle.closing.wait(3600.0)
    handler.close_connection = True


def _reset(handler: _Handler, prompt: str, reply: str) -> None:
    handler.close_connection = True


def _edited(edit: Callable[[str, str], str]) -> Callable[[_Handler, str, str], None]:
    return lambda handler, prompt, reply: handler.plainly(prompt, edit(prompt, reply))


FAULTS: dict[str, Callable[[_Handler, str, str], None]] = {
    "429": _error(429),
    "400": _error(400),
    "401": _error(401),
    "500": _error(500),
    "slow": _slow,
    "half_open": _half_open,  # the request is read and never answered
    "reset": _reset,  # the connection ends without an answer
    "truncated": lambda handler, prompt, reply: handler.send_json(200, oracle.completion(prompt, reply), cut=60),
    "think": _edited(lambda prompt, reply: f"<think>\n{prompts.SOLUTION_HEADER}\nperhaps\n</think>\n\n{reply}"),
    "echo": _edited(lambda prompt, reply: prompt + reply),
    "fenced": _edited(
        lambda prompt, reply: reply.replace(f"{prompts.SOLUTION_HEADER}\n", f"{prompts.SOLUTION_HEADER}\n```\n") + "\n```"
    ),
    "no_header": _edited(lambda prompt, reply: reply.replace(prompts.SOLUTION_HEADER, "")),
    "empty": _edited(lambda prompt, reply: ""),
}
