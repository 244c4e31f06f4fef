"""A judge's endpoint for tests: answers by a function of the prompt, and fails as a script says."""

import http.server
import json
import threading
from collections.abc import Callable


class JudgeServer:
    """`say(prompt)` is the reply's text; `fault(n)` what happens to the n-th request: "", 429, 500, 400, junk or half_open."""

    def __init__(self, say: Callable[[str], str], fault: Callable[[int], str] = lambda n: "", retry_after: str = "0"):
        self.say, self.fault, self.retry_after = say, fault, retry_after
        self.prompts: list[str] = []
        self.temperatures: list[float] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads, self._server.block_on_close, self._server.judge = True, False, self
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def heard(self, request: dict) -> int:
        with self._lock:
            self.prompts.append(request["messages"][-1]["content"])
            self.temperatures.append(request["temperature"])
            return len(self.prompts) - 1

    def __enter__(self) -> "JudgeServer":
        return self

    def __exit__(self, *_) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        judge = self.server.judge
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not body:  # the client gave up
            self.close_connection = True
            return
        request = json.loads(body)
        fault = judge.fault(judge.heard(request))
        if fault == "half_open":
            judge.closing.wait(60.0)
            self.close_connection = True
        elif fault == "junk":
            self.send(200, b'{"choices": [{"mess')
        elif fault:
            self.send(int(fault), json.dumps({"error": {"message": f"scripted {fault}"}}).encode())
        else:
            message = {"role": "assistant", "content": judge.say(request["messages"][-1]["content"])}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
            self.send(200, json.dumps(body | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode())

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", self.server.judge.retry_after)
        self.end_headers()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def log_message(self, *_) -> None:
        """Nothing."""
