"""An OpenAI-compatible endpoint on the loopback interface that answers carry-chain questions, or does what a script says."""

import http.server
import json
import pathlib
import ssl
import threading
from collections.abc import Callable
from typing import Any

from deepgrpo.teacher import prompts
from deepgrpo.teacher.oracle import RULES

MODEL = "scripted"
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBZTCCAQugAwIBAgIBATAKBggqhkjOPQQDAjATMREwDwYDVQQDDAhzY3JpcHRl
ZDAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowEzERMA8GA1UEAwwI
c2NyaXB0ZWQwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATe/I0HYRQwSUvpxevH
asz4dBDGs60kBtHbs1iZNd9bhTNcO0rGyvQzSwEpJCT2WH2pUXEF/gkc/nIErTHd
J3GKo04wTDAPBgNVHRMBAf8EBTADAQH/MBoGA1UdEQQTMBGHBH8AAAGCCWxvY2Fs
aG9zdDAdBgNVHQ4EFgQUBsOF3gGZ7vjoaGrnOH18gG6B4gEwCgYIKoZIzj0EAwID
SAAwRQIgDr3KlZ7dOLiQQ+0T2OBNLPL1s2k07eyEkK+oW9Da4ScCIQDWqiIOwaZi
w11X7JEF7ZJsVqZE5H0BraZfo5UXijYU9A==
-----END CERTIFICATE-----
"""
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQge5ZJp8eFQXesVDR5
d5aWbEGEtrrvFkN4WnT5uRo0iGShRANCAATe/I0HYRQwSUvpxevHasz4dBDGs60k
BtHbs1iZNd9bhTNcO0rGyvQzSwEpJCT2WH2pUXEF/gkc/nIErTHdJ3GK
-----END PRIVATE KEY-----
"""


class Exchange(http.server.BaseHTTPRequestHandler):
    """One connection. `request` is the JSON of the request being answered, `ordinal` its number from 0."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        self.request_body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if endpoint.closing.is_set() or not self.request_body:
            self.close_connection = True
            return
        self.asked = json.loads(self.request_body)
        with endpoint.lock:
            self.ordinal = len(endpoint.asked)
            endpoint.asked.append(self.asked)
        endpoint.behave(self)

    def do_GET(self) -> None:
        self.server.endpoint.list_models(self)

    def say(self, body: Any, status: int = 200, **headers: str) -> None:
        """Sends bytes, text, or JSON; a header's underscores stand for hyphens."""
        body = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        headers = {"Content_Type": "application/json", "Content_Length": str(len(body))} | headers
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def right(self) -> str:
        """The reply of a teacher that knows the rule."""
        prompt = self.asked["messages"][-1]["content"]
        if "<student_text>" not in prompt:
            return "yes"
        slots = prompts.read_slots(prompt)
        solution = RULES["carry_chain"]("")(slots.problem.rpartition("\n")[2], slots.student, slots.verified)
        return f"{prompts.ERROR_HEADER}\nA carry is missing.\n\n{prompts.SOLUTION_HEADER}\n{solution}"

    def completion(self, **choice: Any) -> dict[str, Any]:
        """A whole completion, with parts of its one choice replaced."""
        text = self.right()
        whole = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}} | choice
        usage = {"prompt_tokens": len(self.request_body) // 4, "completion_tokens": len(text) // 4}
        return {"id": "c", "object": "chat.completion", "model": MODEL, "choices": [whole], "usage": usage}

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True  # the client has gone

    def log_message(self, *_: object) -> None:
        pass


Behaviour = Callable[[Exchange], None]


def right(exchange: Exchange) -> None:
    exchange.say(exchange.completion())


def listed(exchange: Exchange) -> None:
    exchange.say({"object": "list", "data": [{"id": MODEL}]})


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # of the standard five, a burst's other connections are reset on a loaded machine


class Endpoint:
    """`behave` answers chats and `list_models` the list of models; both may be replaced while it serves."""

    def __init__(self, behave: Behaviour = right, list_models: Behaviour = listed, tls: pathlib.Path | None = None, port=0):
        """tls: a folder; certificate and key are put there as cert.pem and key.pem, and served with."""
        self.behave, self.list_models = behave, list_models
        self.asked: list[dict[str, Any]] = []
        self.lock, self.closing = threading.Lock(), threading.Event()
        self._server = Server(("127.0.0.1", port), Exchange)
        self._server.daemon_threads, self._server.block_on_close, self._server.endpoint = True, False, self
        if tls is not None:
            (tls / "cert.pem").write_text(CERTIFICATE)
            (tls / "key.pem").write_text(KEY)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.base_url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "Endpoint":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
