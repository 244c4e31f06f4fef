"""Stands in for vLLM's process, command line and all: `python(folder, BEHAVIOUR)` is a Python whose launcher is this file.

Behaviours: ok; late (listens after 1 s); dies; port_taken (the first time only); mute (answers 200 without a token); hangs (in
the first generation); stubborn (ignores SIGTERM, with a child in a session of its own); foreign (another run's).
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def config(python: str, name: str, max_model_len: int = 64, **vllm):
    """The configuration of a run whose servers this Python starts."""
    from configs import common

    made = common.get_config()
    made.name, made.model.dtype, made.rollout.max_model_len = name, "float32", max_model_len
    made.vllm.update({"python": str(python), "max_num_seqs": 4} | vllm)
    return made


TOKEN_ANSWER = {"choices": [{"token_ids": [3], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.5}]}}]}


def python(folder: pathlib.Path, behaviour: str) -> str:
    """Writes the executable into `folder` and returns its path; anything but the launcher runs as usual."""
    path = folder / f"python-{behaviour}"
    here = pathlib.Path(__file__).resolve()
    path.write_text(
        f'#!/bin/sh\ncase "$1" in *deepgrpo_launcher.py) exec {sys.executable} {here} {behaviour} {folder} "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


class Handler(BaseHTTPRequestHandler):
    behaviour = "ok"

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, None)
        if self.headers["Authorization"] != f"Bearer {os.environ['DEEPGRPO_TOKEN']}":
            return self.answer(401, {"error": "token"})
        if self.path == "/deepgrpo/identity":
            run = "somebody-else" if self.behaviour == "foreign" else os.environ["DEEPGRPO_RUN_ID"]
            return self.answer(200, {"run_id": run, "pid": os.getpid(), "vllm": "fake", "model": "", "started": 0.0})
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.behaviour == "hangs":
            time.sleep(60)
        self.answer(200, {} if self.behaviour == "mute" else TOKEN_ANSWER)

    do_POST = do_GET

    def answer(self, status: int, body) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def main(behaviour: str, folder: str, arguments: list[str]) -> None:
    port = next(int(argument.partition("=")[2]) for argument in arguments if argument.startswith("--port="))
    print("nanobind: leaked 4 instances!\n - leaked type x\nfake vLLM starts", flush=True)
    if behaviour == "dies":
        sys.exit("ValueError: no room for the KV cache\n(this was printed later)")
    if behaviour == "port_taken" and not (pathlib.Path(folder) / "tried").exists():
        (pathlib.Path(folder) / "tried").write_text(str(port))
        sys.exit("OSError: [Errno 98] Address already in use")
    if behaviour == "late":
        time.sleep(1)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        (pathlib.Path(folder) / "child").write_text(str(child.pid))
    Handler.behaviour = behaviour
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
