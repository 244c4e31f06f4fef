"""A vLLM server in the standard library and NumPy: serves a small Hugging Face folder's own logits, and misbehaves on request.

It speaks what deepgrpo speaks with vLLM: generate, score, pause, resume, load, cache reset, versions, identity. `calls` logs
every request with its time and body.
"""

import dataclasses
import http.server
import json
import socket
import threading
import time
import urllib.parse

import numpy as np

from tests.rollout.numpy_decoder import Model, distribution, softmax

OPEN_PATH = "/health"
DEFAULTS = {"n": 1, "top_p": 1.0, "top_k": 0, "seed": 0, "stop_token_ids": []}  # vLLM's own


@dataclasses.dataclass
class Knobs:
    """What goes wrong. Counts run down with each generate request that they hit; -1 never ends."""

    delay: float = 0.0  # seconds before each answer
    hang: int = 0  # generate requests that never get an answer
    slow: int = 0  # that are answered only after so many looks at /metrics, each of which finds one token more
    no_metrics: bool = False  # /metrics is not there
    drop: int = 0  # whose connection is closed without one
    error: int = 0  # that get a 500
    refuse: int = 0  # that get a 400
    abort: int = 0  # that come back with finish_reason abort
    shorten: int = 0  # that lack a token
    phantom: int = 0  # that hold an id without a token
    die_after: int = -1  # generate requests answered before the server is gone
    ignore_load: bool = False  # says 200 and ok, and does nothing
    ignore_version: bool = False  # likewise with the version
    fail_load: int = 0  # loads that answer 500
    stale_cache: bool = False  # answers by prompt ids survive a load and a reset
    reset_fails: bool = False  # the prefix-cache reset answers success: false
    hang_load: int = 0


class FakeVllm:
    """One fake server on a port of the loopback; also the `VllmServer` that supervises it (url, token, restart, ...)."""

    def __init__(self, folder, run_id="run", token="token", ours=True, knobs=None, port=0):
        self.folder, self.run_id, self.token, self.ours, self.port = folder, run_id, token, ours, port
        self.knobs = knobs or Knobs()
        self.calls: list[tuple[float, str, dict]] = []
        self.restarts = self.tokens = 0
        self.lock = threading.RLock()
        self._http = None
        self.begin(folder)

    #### The server process

    def begin(self, folder):
        self.model, self.version = Model(folder), "default"
        self.paused, self.cache, self.generated = threading.Event(), {}, 0
        self._ended = threading.Event()
        handler = type("Handler", (_Handler,), {"fake": self, "ended": self._ended})  # of this life of the server
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def die(self):
        """As SIGKILL: open connections break, new ones are refused."""
        server = self._http  # before anyone can notice and begin the next life
        self._ended.set()
        threading.Thread(target=server.shutdown, daemon=True).start()
        server.server_close()

    #### VllmServer

    @property
    def pid(self):
        return 1 if self.ours else None

    def alive(self):
        return not self._ended.is_set()

    def wait_ready(self, deadline):
        if not self.alive():
            raise TimeoutError(f"{self.url}: not ready")

    def restart(self, model_folder, deadline):
        self.stop()
        self.restarts += 1
        self.begin(model_folder)

    def stop(self, timeout=1.0):
        if self.alive():
            self.die()

    def last_log(self, n):
        return ""

    def bodies(self, path):
        return [body for _, called, body in self.calls if called == path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeVllm
    ended: threading.Event

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.handle_call({})

    def do_POST(self):
        length = int(self.headers.get("content-length") or 0)
        self.handle_call(json.loads(self.rfile.read(length)) if length else {})

    def handle_call(self, body):
        fake, path = self.fake, urllib.parse.urlparse(self.path).path
        fake.calls.append((time.time(), path, body))
        if path != OPEN_PATH and self.headers.get("authorization") != f"Bearer {fake.token}":
            return self.answer(401, {"error": "Unauthorized"})
        time.sleep(fake.knobs.delay)
        route = getattr(self, ROUTES.get(path, ""), None)
        if route is None:
            return self.answer(404, {"error": f"no route {path}"})
        route(body)

    def answer(self, status, body):
        if self.ended.is_set():
            return self.cut()
        self.answer_text(json.dumps(body), status, "application/json")

    def answer_text(self, text, status=200, kind="text/plain"):
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def cut(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def spend(self, knob):
        """Whether the knob hits this request."""
        with self.fake.lock:
            left = getattr(self.fake.knobs, knob)
            if left > 0:
                setattr(self.fake.knobs, knob, left - 1)
            return left != 0

    def wait_while_paused(self):
        while self.fake.paused.is_set() and not self.ended.wait(0.01):
            pass

    #### Routes

    def health(self, body):
        self.answer(200, {})

    def who(self, body):
        self.answer(200, {"run_id": self.fake.run_id})

    def generate(self, body):
        fake = self.fake
        self.wait_while_paused()
        if self.spend("hang"):
            self.ended.wait(60)
        if fake.knobs.slow and body["sampling_params"]["temperature"]:
            end = fake.tokens + fake.knobs.slow
            while fake.tokens < end and not self.ended.wait(0.001):
                pass
        if self.ended.is_set() or self.spend("drop"):
            return self.cut()
        if self.spend("error"):
            return self.answer(500, {"error": "EngineCore encountered an issue"})
        if self.spend("refuse"):
            return self.answer(400, {"error": "this request is not valid"})
        p, ids, limit = DEFAULTS | body["sampling_params"], body["token_ids"], fake.model.config["max_position_embeddings"]
        if p["max_tokens"] < 1 or len(ids) + p["max_tokens"] > limit or max(ids) >= fake.model.config["vocab_size"]:
            return self.answer(400, {"error": f"{len(ids)} + {p['max_tokens']} tokens of {limit}, largest id {max(ids)}"})
        if len(salt := body.get("cache_salt", "none")) > 128 or set(salt) & set("@/\\\0"):
            return self.answer(400, {"error": "Parameter 'cache_salt' must be at most 128 characters and must not contain '/'"})
        key = json.dumps([ids, p])
        if fake.knobs.stale_cache and key in fake.cache:
            choices = fake.cache[key]
        else:
            choices = [self.sample(ids, p, j) for j in range(p["n"])]
            fake.cache[key] = choices
        choices = [c | {"weight_versions": [[fake.version, 0, len(c["token_ids"])]]} for c in choices]
        if self.spend("abort"):
            choices[0] = choices[0] | {"finish_reason": "abort"}
        if self.spend("shorten"):
            choices[-1] = choices[-1] | {"token_ids": choices[-1]["token_ids"][:-1]}
        if self.spend("phantom"):
            choices[0] = choices[0] | {"token_ids": [fake.model.config["vocab_size"], *choices[0]["token_ids"][1:]]}
        with fake.lock:
            fake.generated += 1
            last = fake.generated == fake.knobs.die_after
        self.answer(200, {"choices": choices, "cached_tokens": 0})
        if last:
            fake.knobs.die_after = -1
            fake.die()

    def metrics(self, body):
        if self.fake.knobs.no_metrics:
            return self.answer(404, {"error": "no route"})
        self.fake.tokens += bool(self.fake.knobs.slow)
        lines = ["# HELP vllm:generation_tokens_total Tokens", 'vllm:iteration_tokens_total_bucket{le="1.0"} 9']
        lines.append(f'vllm:generation_tokens_total{{engine="0",model_name="policy"}} {self.fake.tokens}.0')
        self.answer_text("\n".join(lines) + "\n")

    def first_token(self, body):
        """vLLM's own route, which only the question whether the server is ready uses."""
        sample = self.sample(body["token_ids"], DEFAULTS | body["sampling_params"], 0)
        content = [{"token_id": sample["token_ids"][0], "logprob": sample["logprobs"][0]}]
        self.answer(200, {"choices": [sample | {"logprobs": {"content": content}}]})

    def sample(self, ids, p, j):
        rng, ids, out, logps, reason = np.random.default_rng(p["seed"] + j), list(ids), [], [], "length"
        while len(out) < p["max_tokens"] and reason != "stop":
            logp = distribution(self.fake.model.logits(ids)[-1], p)
            token = int(np.argmax(logp)) if not p["temperature"] else int(rng.choice(len(logp), p=np.exp(logp)))
            out.append(token)
            ids.append(token)
            logps.append(float(logp[token]))
            reason = "stop" if token in p["stop_token_ids"] else "length"
        return {"index": j, "token_ids": out, "finish_reason": reason, "logprobs": logps}

    def score(self, body):
        ids = body["prompt"]
        logp = np.log(softmax(self.fake.model.logits(ids)))
        entries = [None] + [{str(t): {"logprob": float(logp[i, t])}} for i, t in enumerate(ids[1:])]
        self.answer(200, {"choices": [{"prompt_logprobs": entries, "text": ""}]})

    def pause(self, body):
        self.fake.paused.set()
        self.answer(200, {"status": "paused"})

    def resume(self, body):
        self.fake.paused.clear()
        self.answer(200, {"status": "resumed"})

    def load(self, body):
        fake, (path,) = self.fake, body["args"]
        if self.spend("hang_load"):
            self.ended.wait(60)
        if self.spend("fail_load"):
            return self.answer(500, {"error": "EngineCore encountered an issue"})
        result = {"ok": True, "error": "", "missing": [], "unexpected": [], "mismatched": [], "seconds": {}}
        if not fake.knobs.ignore_load:
            try:
                model = Model(path)
                old, new = ({name: t.shape for name, t in m.w.items()} for m in (fake.model, model))
                result |= {"missing": sorted(old.keys() - new.keys()), "unexpected": sorted(new.keys() - old.keys())}
                result["mismatched"] = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
                if result["missing"] or result["unexpected"] or result["mismatched"]:
                    result |= {"ok": False, "error": "not this model's tensors"}
                else:
                    fake.model = model
            except Exception as error:  # the worker reports what it met
                result |= {"ok": False, "error": f"{path}: {error}"}
        self.answer(200, {"results": [result]})

    def reset(self, body):
        if not self.fake.knobs.stale_cache:
            self.fake.cache.clear()
        self.answer(200, {"success": not self.fake.knobs.reset_fails})

    def set_version(self, body):
        if not self.fake.knobs.ignore_version:
            self.fake.version = body["new_version"]
        self.answer(200, {"success": True})

    def get_version(self, body):
        self.answer(200, {"weight_version": self.fake.version})


ROUTES = {
    OPEN_PATH: "health",
    "/deepgrpo/identity": "who",
    "/deepgrpo/generate": "generate",
    "/inference/v1/generate": "first_token",
    "/v1/completions": "score",
    "/pause": "pause",
    "/resume": "resume",
    "/collective_rpc": "load",
    "/reset_prefix_cache": "reset",
    "/update_weight_version": "set_version",
    "/weight_info": "get_version",
    "/metrics": "metrics",
}
