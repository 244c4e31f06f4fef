"""A rule-based teacher behind the same HTTP interface as a served model: `with Oracle("carry_chain") as oracle: oracle.base_url`.

It reads question and student's text out of the prompt (`deepgrpo.teacher.prompts`) and asks a rule (`deepgrpo.teacher.rules`).
Faults of real endpoints can be scripted, and a share of the corrections can be made wrong.

    python -m deepgrpo.teacher.oracle --rule carry_chain --port 8001
"""

import argparse
import http.server
import json
import pathlib
import sys
import threading
import time
import zlib
from collections.abc import Callable

import numpy as np

from deepgrpo.teacher import prompts
from deepgrpo.teacher.rules import RULES, Correct

MODEL = "oracle"
Faults = Callable[[int], str]  # request ordinal, from 0 -> name in FAULTS; "": none
_FAULT_SECONDS = 0.2  # of "slow"


class Oracle:
    """Serves a rule on the loopback interface, in a thread of its own. `base_url` is known once it is made; use it in a `with`.

    requests: chat completions received so far. faults: see FAULTS; retry_after: what a scripted 429 asks for, in seconds.
    error_rate: share of corrections with a wrong digit; which ones follows from `seed` and the prompt.
    """

    def __init__(
        self,
        rule: str | Correct,
        *,
        port: int = 0,
        solutions: str = "",
        faults: Faults = lambda n: "",
        retry_after: str = "0",
        error_rate: float = 0.0,
        seed: int = 0,
    ):
        if isinstance(rule, str) and rule not in RULES:
            raise ValueError(f"no rule {rule!r}; there are {', '.join(RULES)}")
        self.correct = RULES[rule](solutions) if isinstance(rule, str) else rule
        self.faults, self.retry_after = faults, retry_after
        self.error_rate, self.seed = error_rate, seed
        self.requests = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._server.oracle = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="oracle", daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "Oracle":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving; half-open requests end. Idempotent."""
        self.closing.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(10.0)
        self._server.server_close()

    def next_request(self) -> int:
        with self._lock:
            self.requests += 1
            return self.requests - 1


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # the default of 5 makes the sixth of simultaneous connections wait a second, or resets it


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 600.0  # seconds an idle connection is kept

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            self.send_json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "deepgrpo"}]})
        else:
            self.send_json(404, {"error": {"message": f"no route {self.path}", "type": "not_found"}})

    def do_POST(self) -> None:
        if self.server.oracle.closing.is_set():  # a connection kept alive outlives the listening socket
            self.close_connection = True
            return None
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.rstrip("/") != "/v1/chat/completions":
            return self.send_json(404, {"error": {"message": f"no route {self.path}", "type": "not_found"}})
        try:
            request = json.loads(body)
            prompt = request["messages"][-1]["content"]
            reply = self.reply(prompt)
        except (ValueError, LookupError, TypeError) as error:
            return self.send_json(400, {"error": {"message": f"bad request: {error}", "type": "invalid_request_error"}})
        fault = self.server.oracle.faults(self.server.oracle.next_request())
        if fault:
            return FAULTS[fault](self, prompt, reply)
        self.send_reply(prompt, reply)

    def reply(self, prompt: str) -> str:
        try:
            slots = prompts.read_slots(prompt)
        except prompts.ParseError as error:
            return f"{prompts.ERROR_HEADER}\n{error}"  # like a model, it answers whatever it is asked
        solution = self.server.oracle.correct(slots.problem, slots.student, slots.verified)
        if solution is None:
            return f"{prompts.ERROR_HEADER}\nThis is not a question that the rule knows."
        random = np.random.default_rng((self.server.oracle.seed, zlib.crc32(prompt.encode())))
        if random.random() < self.server.oracle.error_rate:
            solution = misled(solution, random)
        return f"{prompts.ERROR_HEADER}\nA step is wrong.\n\n{prompts.SOLUTION_HEADER}\n{solution}"

    def send_reply(self, prompt: str, text: str) -> None:
        self.send_json(200, _completion(prompt, text))

    def send_json(self, status: int, payload: dict, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        body = json.dumps(payload).encode()[:cut]
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client has gone

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a demo's terminal belongs to the demo."""


def misled(solution: str, random: np.random.Generator) -> str:
    """The solution with one digit, anywhere in it, changed to another; the same text if it has none."""
    places = [i for i, character in enumerate(solution) if character in "0123456789"]
    if not places:
        return solution
    i = places[random.integers(len(places))]
    return solution[:i] + str((int(solution[i]) + random.integers(1, 10)) % 10) + solution[i + 1 :]


def _completion(prompt: str, text: str) -> dict:
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}  # words: the rule has no tokenizer
    return {
        "id": "chatcmpl-oracle",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


def _error(status: int) -> Callable[[_Handler, str, str], None]:
    return lambda handler, prompt, reply: handler.send_json(
        status,
        {"error": {"message": f"scripted {status}", "type": "scripted"}},
        {"Retry-After": handler.server.oracle.retry_after} if status == 429 else None,
    )


def _slow(handler: _Handler, prompt: str, reply: str) -> None:
    handler.server.oracle.closing.wait(_FAULT_SECONDS)
    handler.send_reply(prompt, reply)


def _half_open(handler: _Handler, prompt: str, reply: str) -> None:
    handler.server.oracle.closing.wait(3600.0)
    handler.close_connection = True


def _reset(handler: _Handler, prompt: str, reply: str) -> None:
    handler.close_connection = True


def _edited(edit: Callable[[str, str], str]) -> Callable[[_Handler, str, str], None]:
    return lambda handler, prompt, reply: handler.send_reply(prompt, edit(prompt, reply))


FAULTS: dict[str, Callable[[_Handler, str, str], None]] = {
    "429": _error(429),
    "400": _error(400),
    "401": _error(401),
    "500": _error(500),
    "slow": _slow,
    "half_open": _half_open,  # the request is read and never answered
    "reset": _reset,  # the connection ends without an answer
    "truncated": lambda handler, prompt, reply: handler.send_json(200, _completion(prompt, reply), cut=60),
    "think": _edited(lambda prompt, reply: f"<think>\n{prompts.SOLUTION_HEADER}\nperhaps\n</think>\n\n{reply}"),
    "echo": _edited(lambda prompt, reply: prompt + reply),
    "fenced": _edited(
        lambda prompt, reply: reply.replace(f"{prompts.SOLUTION_HEADER}\n", f"{prompts.SOLUTION_HEADER}\n```\n") + "\n```"
    ),
    "no_header": _edited(lambda prompt, reply: reply.replace(prompts.SOLUTION_HEADER, "")),
    "empty": _edited(lambda prompt, reply: ""),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deepgrpo.teacher.oracle",
        description="Serves a rule-based teacher on the loopback interface, OpenAI-compatible.",
    )
    parser.add_argument("--rule", choices=sorted(RULES), required=True)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--solutions", default="", help="JSONL of question and answer, for --rule solutions")
    parser.add_argument("--error-rate", type=float, default=0.0, help="share of corrections with a wrong digit")
    options = parser.parse_args(arguments)
    if options.rule == "solutions" and not pathlib.Path(options.solutions).is_file():
        parser.error(f"--solutions={options.solutions}: no such file; --rule solutions needs a JSONL of question and answer")
    served = Oracle(options.rule, port=options.port, solutions=options.solutions, error_rate=options.error_rate)
    with served as oracle:
        print(f"serving {options.rule} at {oracle.base_url} (model {MODEL}); Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(3600.0)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
