"""Serves a run's policy by vLLM, for a training that runs elsewhere: on other GPUs of the host, or on another host.

    export DEEPGRPO_VLLM_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe())")     on both sides
    python -m deepgrpo.serve --config=configs/math_1p5b.py --config.rollout.engine=vllm --config.vllm.gpu_ids=4
    python -m deepgrpo.train --config=configs/math_1p5b.py --config.rollout.engine=vllm --config.vllm.attach=http://HOST:8100

Both take the same configuration, so that names, types and lengths agree; `serve` reads its sections model, rollout, vllm and
weights. vllm.servers=2 with vllm.gpu_ids=4,5 starts two servers, at ports 8100 and 8101; `serve` prints what to attach to.
On another host set vllm.host=0.0.0.0, in a network that you trust (the token travels in plain HTTP), and weights.folder
to a folder that both hosts see under the same path. A server that dies is started again in its place, with the weights that
`serve` began with; the training gives it the present ones. Ctrl-C or SIGTERM ends all of them.
"""

import concurrent.futures
import contextlib
import logging
import os
import pathlib
import shutil
import signal
import socket
import threading

import jax

from deepgrpo import config as config_lib
from deepgrpo.config import flags
from deepgrpo.preflight import vllm_python_problems
from deepgrpo.rollout.vllm_server import VllmServerError
from deepgrpo.telemetry.log import close_log, open_log
from deepgrpo.weights import model_folder
from deepgrpo.weights.engines import serving_model, start_server
from deepgrpo.weights.run_folder import weights_root

LOOK_SECONDS = 2.0  # between two looks at the servers

log = logging.getLogger("deepgrpo.serve")  # by its name: __name__ is __main__ here


def main(config, line) -> int:
    """Returns the exit status once it was told to stop (0), or a server could not be started (1)."""
    folder = pathlib.Path(config.run_dir, config.name, "serve")
    with config_lib.Setup(f"serve {config.name} cannot start", folder / "log.txt") as setup, contextlib.ExitStack() as stack:
        keys, token = config.vllm, os.environ.get(config.vllm.token_env, "")
        problems = vllm_python_problems(config) + model_folder.problems(config)
        if not token:
            what = f"environment variable {keys.token_env} is not set: the training proves with it that it may use the servers"
            make = f'export {keys.token_env}=$(python -c "import secrets; print(secrets.token_urlsafe())")   here and there'
            problems.insert(0, config_lib.Finding(what, make))
        if problems := [problem for problem in problems if problem.fatal]:
            raise config_lib.ConfigError("".join(f"\n- {what}\n  -> {remedy}" for what, remedy, _ in problems))
        jax.config.update("jax_platforms", "cpu")  # the accelerators are vLLM's
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: stop.set())
        stack.callback(close_log, open_log(folder))
        return serve(config, token, stop, setup)


def serve(config, token: str, stop: threading.Event, setup: config_lib.Setup) -> int:
    keys, root = config.vllm, weights_root(config)
    model = serving_model(config, root)
    run, dtype = pathlib.Path(config.run_dir, config.name, "serve"), keys.dtype or config.model.dtype
    pool = concurrent.futures.ThreadPoolExecutor(keys.servers, "serve")
    starts = []
    for index in range(keys.servers):
        place = {"host": keys.host, "port": keys.port + index, "token": token}
        starts.append(pool.submit(start_server, config, index, model, root, dtype, run, **place))
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
                        server.restart(model, keys.start_deadline)
                    except VllmServerError as error:
                        log.error("%s", error)
                        return 1
    log.info("stopped")
    return 0


if __name__ == "__main__":
    flags.run(main, config_lib.from_command_line)
