"""Serves a run's policy by vLLM, for a training that runs elsewhere: on other GPUs of the host, or on another host.

    export DEEPGRPO_VLLM_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe())")     on both sides
    python -m deepgrpo.serve --config=configs/math_1p5b.py --config.rollout.engine=vllm --config.vllm.gpu_ids=4
    python -m deepgrpo.train --config=configs/math_1p5b.py --config.rollout.engine=vllm --config.vllm.attach=http://HOST:8100

Both take the same configuration, so that names, types and lengths agree; `serve` reads its sections model, rollout, vllm and
weights. vllm.servers=2 with vllm.gpu_ids=4,5 starts two servers, at --port (8100) and the next one; `serve` prints what to
attach to. On another host add --host=0.0.0.0, in a network that you trust (the token travels in plain HTTP), and set
weights.folder to a folder that both hosts see under the same path. A server that dies is started again in its place, with the
weights that `serve` began with; the training gives it the present ones. Ctrl-C or SIGTERM ends all of them.
"""

import argparse
import concurrent.futures
import contextlib
import logging
import os
import pathlib
import shutil
import signal
import socket
import threading
from collections.abc import Sequence

import jax

from deepgrpo import config as config_lib
from deepgrpo.config import flags
from deepgrpo.preflight import rules
from deepgrpo.preflight.inputs import vllm_python_problems
from deepgrpo.rollout.vllm_server import START_SECONDS, TOKEN, VllmServer, VllmServerError
from deepgrpo.telemetry.log import close_log, open_log
from deepgrpo.weights import model_folder
from deepgrpo.weights.engines import serving_model
from deepgrpo.weights.run_folder import weights_root

LOOK_SECONDS = 2.0  # between two looks at the servers

log = logging.getLogger("deepgrpo.serve")  # by its name: __name__ is __main__ here


def main(config, host: str, port: int) -> int:
    """Returns the exit status once it was told to stop (0), or a server could not be started (1)."""
    folder = pathlib.Path(config.run_dir, config.name, "serve")
    with config_lib.Setup(f"serve {config.name} cannot start", folder / "log.txt") as setup, contextlib.ExitStack() as stack:
        token = os.environ.get(TOKEN, "")
        problems = vllm_python_problems(config) + model_folder.problems(config)
        if not token:
            what = f"environment variable {TOKEN} is not set: the training proves with it that it may use the servers"
            make = f'export {TOKEN}=$(python -c "import secrets; print(secrets.token_urlsafe())")   here and there'
            problems.insert(0, config_lib.Finding(what, make))
        if problems := [problem for problem in problems if problem.fatal]:
            raise config_lib.ConfigError("".join(f"\n- {what}\n  -> {remedy}" for what, remedy, _ in problems))
        jax.config.update("jax_platforms", "cpu")  # the accelerators are vLLM's
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: stop.set())
        stack.callback(close_log, open_log(folder))
        return serve(config, host, port, token, stop, setup)


def serve(config, host: str, port: int, token: str, stop: threading.Event, setup: config_lib.Setup) -> int:
    count, root = config.vllm.servers, weights_root(config)
    model = serving_model(config, root)
    run = pathlib.Path(config.run_dir, config.name, "serve")
    pool = concurrent.futures.ThreadPoolExecutor(count, "serve")
    starts = [
        pool.submit(VllmServer.start, config, model, root, run / f"vllm-{index}.log", index, (host, port + index), token)
        for index in range(count)
    ]
    while not all(start.done() for start in starts):
        if stop.wait(0.2):
            log.info("told to stop while the servers were starting")
            os._exit(0)  # the threads wait for servers; those end with this process (vllm_server)
    pool.shutdown()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, model.parent, ignore_errors=True)
        for start in starts:
            if start.exception() is None:
                stack.callback(start.result().stop)
        if errors := [error for start in starts if (error := start.exception())]:
            log.error("%s", errors[0])
            return 1
        setup.done()
        servers = [start.result() for start in starts]
        urls = ",".join(server.url.replace("//0.0.0.0:", f"//{socket.gethostname()}:") for server in servers)
        log.info("ready for run %s, with snapshots from %s: --config.vllm.attach=%s", config.name, root, urls)
        while not stop.wait(LOOK_SECONDS):
            for server in servers:
                if not server.alive():
                    try:
                        server.restart(model, START_SECONDS)
                    except VllmServerError as error:
                        log.error("%s", error)
                        return 1
    log.info("stopped")
    return 0


def parse(argv: Sequence[str]) -> tuple:
    """What `main` takes: the configuration, and the host and first port to listen on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    own, rest = parser.parse_known_args(argv[1:])
    config, _ = rules.from_command_line([argv[0], *rest], ("--host=ADDRESS", "--port=NUMBER"))
    return config, own.host, own.port


if __name__ == "__main__":
    flags.run(main, parse)
