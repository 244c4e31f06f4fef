"""One vLLM server: started and supervised, or one that runs already and is attached to by its URL.

A started server listens on a free port of the loopback and asks for a random token on every path but /health. Between it and this
process stands a supervisor (vllm_plugin/deepgrpo_supervisor.py), so that no process of the server outlives it or this process,
whatever kills which. Nothing here imports vLLM; its Python is another one.

Ready means: its health path answers, its identity names this run, and it generated one token with a log-prob.
"""

import collections
import dataclasses
import logging
import math
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import httpx

TOKEN = "DEEPGRPO_VLLM_TOKEN"  # environment variable that holds the token of attached servers
MODEL_NAME = "policy"  # served model name, for the paths that want one
PLUGIN = pathlib.Path(__file__).with_name("vllm_plugin")
START_SECONDS = 600.0  # until a server is ready, from its start or before it is attached to; large models load slowly
BLOCK_SIZE = 32  # tokens of a prefix-cache block
GRACE = 15.0  # seconds between SIGTERM and SIGKILL that a server gets
BIND_ATTEMPTS = 3  # ports tried when another process takes the chosen one first
BACK_OFF_SECONDS = (0.0, 2.0, 8.0, 30.0)  # before the first, second, ... restart within BACK_OFF_WINDOW
BACK_OFF_WINDOW = 600.0
SHOWN_LINES = 25  # of the log, in errors
_POLL_SECONDS = 0.2
# The last line of a traceback, after the prefix that vLLM's logger may put before it.
_ERROR = re.compile(r"^(?:\([^)]*\) [A-Z]+ \S+ \S+ \[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$")
_NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind")
_BIND_FAILED = "address already in use"
# What the trainer's environment must not hand on: its Python path and its accelerator's settings.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a mistyped path must not become a download
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /pause, /reset_prefix_cache; behind the token like everything else
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked child would not run the launcher's first lines
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # 5 by default: pooled connections would die between two steps
}

log = logging.getLogger(__name__)


class VllmServerError(RuntimeError):
    """The server did not start, is not the one that was expected, or did not do what it answered to have done."""


@dataclasses.dataclass(frozen=True)
class _Settings:
    """All that a start needs but the model: kept for restarts. See `VllmServer.start`."""

    config: Any
    index: int
    weights_root: pathlib.Path
    log_path: pathlib.Path
    address: tuple[str, int]

    def __post_init__(self):
        python = self.config.vllm.python
        if not os.access(python, os.X_OK):
            raise FileNotFoundError(
                f"{python}: no such program, expected the Python of vLLM's environment (launch/vllm_env.sh makes it)"
            )
        if not self.weights_root.is_dir():
            raise FileNotFoundError(f"weights_root {self.weights_root}: no such folder, expected the parent of all snapshots")

    def command(self, model: pathlib.Path, port: int) -> list[str]:
        vllm = self.config.vllm
        options = {
            "host": self.address[0],
            "port": port,
            "served-model-name": MODEL_NAME,
            "dtype": self.config.model.dtype,
            "max-model-len": self.config.rollout.max_model_len,
            "max-num-seqs": vllm.max_num_seqs,
            "block-size": BLOCK_SIZE,
            "tensor-parallel-size": vllm.tensor_parallel,
            "gpu-memory-utilization": vllm.gpu_memory_utilization,
            "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
            "generation-config": "vllm",  # no sampling parameter comes from the model's folder
            "worker-extension-cls": "deepgrpo_worker.WeightLoader",
            "middleware": "deepgrpo_guard.Guard",
            "uvicorn-log-level": "warning",
        }
        flags = ("enable-scale-out", "enable-prefix-caching", "disable-uvicorn-access-log")  # the first opens /inference
        arguments = [f"--{name}={value}" for name, value in options.items()] + [f"--{name}" for name in flags]
        launch = [vllm.python, str(PLUGIN / "deepgrpo_supervisor.py"), str(os.getpid()), str(GRACE)]
        return [*launch, vllm.python, str(PLUGIN / "deepgrpo_launcher.py"), str(model), *arguments, *vllm.extra_args]

    def environment(self, model: pathlib.Path, token: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        ours = {
            "PYTHONPATH": str(PLUGIN),
            "PYTHONUNBUFFERED": "1",
            "DEEPGRPO_TOKEN": token,
            "DEEPGRPO_RUN_ID": self.config.name,
            "DEEPGRPO_MODEL": str(model),
            "DEEPGRPO_WEIGHTS_ROOT": str(self.weights_root),
        }
        count = self.config.vllm.tensor_parallel
        if gpus := self.config.vllm.gpu_ids[self.index * count : (self.index + 1) * count]:
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        return kept | _ENVIRONMENT | ours


class VllmServer:
    """A server that is ready. `url` may be another one after each restart; `token` stays. Threads may share it.

    url: http://HOST:PORT. token: for the header `Authorization: Bearer TOKEN`. restarts: how many there were.
    pid: of the supervisor (None when attached); SIGKILL there takes the whole server along.
    """

    def __init__(self, url: str, token: str, run_id: str, settings: _Settings | None):
        self.url, self.token, self.run_id, self.restarts = url, token, run_id, 0
        self._settings = settings
        self._process: subprocess.Popen | None = None
        self._log_start = 0  # offset in the log file where the present process began
        self._recent: collections.deque[float] = collections.deque(maxlen=len(BACK_OFF_SECONDS))
        self._lock = threading.RLock()

    @classmethod
    def start(
        cls,
        config: Any,
        model_folder: str | os.PathLike,
        weights_root: str | os.PathLike,
        log_path: str | os.PathLike,
        index: int = 0,
        address: tuple[str, int] = ("127.0.0.1", 0),
        token: str = "",
        deadline: float | None = None,
    ) -> "VllmServer":
        """Starts a run's `index`-th server and returns it ready.

        Args:
          config: the run's; its name, model.dtype, rollout.max_model_len and the section vllm are read.
          model_folder: Hugging Face folder. weights_root: the only folder below which the server may load snapshots.
          address: host and port to listen on; port 0 is a free one. token: "" is a random one.
          deadline: seconds until it must be ready; None: START_SECONDS.

        Raises:
          FileNotFoundError: no model, no Python or no `weights_root`.
          VllmServerError: it ended, or was not ready in time; holds the stage, the URL and the last lines of the log.
        """
        folders = (pathlib.Path(path).absolute() for path in (weights_root, log_path))
        settings = _Settings(config, index, *folders, address)
        server = cls("", token or secrets.token_urlsafe(24), config.name, settings)
        server._launch(_model(model_folder), _Deadline(deadline or START_SECONDS))
        return server

    @classmethod
    def attach(cls, url: str, token: str, run_id: str, deadline: float | None = None) -> "VllmServer":
        """Returns a server that runs already, once it is ready. It is neither restarted nor stopped by this process.

        Raises:
          VllmServerError: it is another run's, or not ready in time, or there is no token for it.
        """
        if not token.strip():
            raise VllmServerError(f"no token for the server at {url}: set the environment variable {TOKEN}")
        server = cls(url.rstrip("/"), token, run_id, None)
        server.wait_ready(deadline or START_SECONDS)
        return server

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """False when the process has ended or its health path denies service. A slow answer is no denial: it may be busy."""
        if self._process is not None and self._process.poll() is not None:
            return False
        try:
            return self._get("/health", 5.0).status_code == 200
        except httpx.TimeoutException:
            return True
        except httpx.TransportError:
            return False

    def wait_ready(self, deadline: float) -> None:
        """Returns when the server answers, is this run's, and has generated a token with a log-prob.

        Raises:
          VllmServerError: at once when the process ends or the server is another one; else after `deadline` seconds.
        """
        self._wait_ready(_Deadline(deadline))

    def restart(self, model_folder: str | os.PathLike, deadline: float) -> None:
        """Stops what is left and starts it on `model_folder`, under a new URL; waits first if it was restarted lately.

        Raises:
          VllmServerError: as `start`; also for an attached server.
        """
        if self._settings is None:
            raise VllmServerError(f"the vLLM server at {self.url} was not started by this run: restart it by hand, then resume")
        limit = _Deadline(deadline)
        with self._lock:
            model = _model(model_folder)
            self._stop(GRACE + 5)
            now = time.monotonic()
            recent = sum(now - at < BACK_OFF_WINDOW for at in self._recent)
            pause = BACK_OFF_SECONDS[min(recent, len(BACK_OFF_SECONDS) - 1)]
            self._recent.append(now)
            self.restarts += 1
            log.warning("restarting the vLLM server on %s (restart %d, after %g s)", model, self.restarts, pause)
            time.sleep(min(pause, limit.left()))
            self._launch(model, limit)

    def stop(self, timeout: float = GRACE + 5) -> None:
        """Ends the server: SIGTERM, and SIGKILL after `timeout` seconds. Returns when no process is left; idempotent."""
        with self._lock:
            self._stop(timeout)

    def last_log(self, lines: int) -> str:
        """The last lines that the present process wrote, without known noise; "" when attached."""
        return "" if self._settings is None else "\n".join(self._log_lines()[-lines:])

    def _launch(self, model: pathlib.Path, deadline: "_Deadline") -> None:
        """Starts the process and waits until it is ready; takes another port when the first was snatched away."""
        for attempt in range(1, BIND_ATTEMPTS + 1):
            with _reserved_port(*self._settings.address) as reserved:
                self.url = f"http://{self._settings.address[0]}:{reserved.getsockname()[1]}"
                self._spawn(model, reserved.getsockname()[1])
                try:
                    self._wait_ready(deadline)
                    return
                except BaseException:
                    self._stop(GRACE + 5)
                    snatched = _BIND_FAILED in self.last_log(200).lower()
                    if self._settings.address[1] or not snatched or attempt == BIND_ATTEMPTS or deadline.left() <= 0:
                        raise
            log.warning("another process took the port of %s; trying another one", self.url)

    def _spawn(self, model: pathlib.Path, port: int) -> None:
        path = self._settings.log_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as output:
            output.write(f"== {time.strftime('%F %T')} run {self.run_id}: {model} at {self.url}\n".encode())
            output.flush()
            self._log_start = output.tell()
            # A session of its own: Ctrl-C is this process's business. Standard input is the supervisor's lifeline.
            self._process = subprocess.Popen(
                self._settings.command(model, port),
                env=self._settings.environment(model, self.token),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        log.info("vLLM server of run %s: %s, process %d, log in %s", self.run_id, self.url, self._process.pid, path)

    def _stop(self, timeout: float) -> None:
        if (process := self._process) is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the supervisor, not yet reaped, still holds this group's number
            process.wait()
        process.stdin.close()

    def _wait_ready(self, deadline: "_Deadline") -> None:
        stage, trouble = "health", "no answer yet"
        while True:
            self._raise_if_ended(stage, deadline)
            if deadline.left() <= 0:
                raise self._not_ready(stage, deadline, trouble)
            try:
                if stage == "health":
                    response = self._get("/health", min(5.0, deadline.left()))
                    trouble = f"/health answered {response.status_code}"
                    if response.status_code == 200:
                        stage, trouble = "identity", ""
                elif stage == "identity":
                    self._check_identity(self._get("/deepgrpo/identity", min(10.0, deadline.left())))
                    stage, trouble = "first token", ""
                else:  # the first request with log-probs compiles a part of the sampler
                    self._check_first_token(self._post("/inference/v1/generate", _ONE_TOKEN, deadline.left()))
                    return
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if trouble:
                time.sleep(min(_POLL_SECONDS, max(deadline.left(), 0)))

    def _check_identity(self, response: httpx.Response) -> None:
        if response.status_code == 401:
            raise VllmServerError(
                f"the server at {self.url} refuses the token of run {self.run_id}: it belongs to another run. "
                "Attach with that server's token and run id, or start one of this run's own"
            )
        body = _json(response)
        if response.status_code != 200 or not isinstance(body, dict) or "run_id" not in body:
            raise VllmServerError(
                f"what listens at {self.url} is no server of deepgrpo: {response.url.path} answered {response.status_code}, "
                f"{response.text[:200]!r}. Start it with deepgrpo (python -m deepgrpo.serve), or choose another URL"
            )
        if body["run_id"] != self.run_id:
            raise VllmServerError(
                f"the server at {self.url} belongs to run {body['run_id']}, expected run {self.run_id}: its weights are others'. "
                "Choose another URL, or start it with this run's id"
            )
        log.info("vLLM %s answers at %s for run %s", body.get("vllm"), self.url, self.run_id)

    def _check_first_token(self, response: httpx.Response) -> None:
        body = _json(response)
        try:
            (choice,) = body["choices"]
            (content,) = choice["logprobs"]["content"]
            good = len(choice["token_ids"]) == 1 and math.isfinite(content["logprob"]) and content["logprob"] <= 0
        except (KeyError, TypeError, ValueError):
            good = False
        if response.status_code != 200 or not good:
            raise VllmServerError(
                f"the server at {self.url} was asked for one token with its log-prob and answered {response.status_code}, "
                f"{response.text[:500]!r}: it does not generate. Was it started with options of its own?{self._log_text()}"
            )

    def _raise_if_ended(self, stage: str, deadline: "_Deadline") -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            raise VllmServerError(
                f"the vLLM server at {self.url} ended with status {status} after {deadline.elapsed():.0f} s, "
                f"before the stage {stage!r} was reached.{self._log_text()}"
            )

    def _not_ready(self, stage: str, deadline: "_Deadline", trouble: str) -> VllmServerError:
        action = "Give it more time if the log shows progress, else mend what the log complains about."
        if self._settings is None:
            action = "Is it running, and reachable from this host under this URL?"
        return VllmServerError(
            f"the vLLM server at {self.url} was not ready after {deadline.elapsed():.0f} s (deadline {deadline.seconds:g} s); "
            f"stage: {stage}; last trouble: {trouble or 'none'}. {action}{self._log_text()}"
        )

    def _log_text(self) -> str:
        if self._settings is None:
            return ""
        lines = self._log_lines()
        errors = list(dict.fromkeys(match[1] for line in lines if (match := _ERROR.search(line))))  # the first is the cause
        text = "".join(f"\n--- error in its log: {error}" for error in errors[:3])
        shown = "\n".join(lines[-SHOWN_LINES:]) or "(nothing was written)"
        return f"{text}\n--- last lines of {self._settings.log_path}:\n{shown}"

    def _log_lines(self) -> list[str]:
        """Of the present process's output the last 256 KB, without blank lines and what Triton says whenever it ends."""
        with open(self._settings.log_path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = self._log_start if self._log_start <= size else 0  # the supervisor dropped the older half
            file.seek(max(begin, size - 256 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not _NOISE.match(line)]

    def _get(self, path: str, timeout: float) -> httpx.Response:
        with _client(timeout) as client:
            return client.get(self.url + path, headers={"Authorization": f"Bearer {self.token}"})

    def _post(self, path: str, body: Any, timeout: float) -> httpx.Response:
        with _client(timeout) as client:
            return client.post(self.url + path, json=body, headers={"Authorization": f"Bearer {self.token}"})


class _Deadline:
    def __init__(self, seconds: float):
        if not seconds > 0:
            raise ValueError(f"a deadline must be > 0 s, got {seconds}")
        self.seconds, self._began = seconds, time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self.seconds - self.elapsed()


_ONE_TOKEN = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "detokenize": False}}


def _model(folder: str | os.PathLike) -> pathlib.Path:
    path = pathlib.Path(folder).absolute()  # vLLM takes a relative path for the name of something to download
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path}: no config.json there, expected a Hugging Face model folder")
    return path


def _reserved_port(host: str, port: int) -> socket.socket:
    """A bound socket that never listens: while it is open the system gives the port to nobody who asks for any free one."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does, so that both can be bound
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise VllmServerError(f"{host}:{port} cannot be bound ({error}). Choose another port, 0 for a free one") from error
    return reserved


def _client(timeout: float) -> httpx.Client:
    return httpx.Client(timeout=timeout, trust_env=False)  # a proxy of the environment is not for this


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
