"""Starts vLLM's server, CPU or GPU build: `python deepgrpo_launcher.py MODEL OPTIONS...` is `vllm serve MODEL OPTIONS...`.

vLLM's children are spawned, and a spawned Python imports its parent's main file first. So what stands outside `main` runs in the
engine core and in every worker, too: they die with their parent, and know which package vLLM comes from.
"""

import ctypes
import importlib.metadata
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT = "DEEPGRPO_PARENT"
# A learner shares the machine: one OpenMP thread, unbound, since spinning threads starve everything else there. With a budget for
# the KV cache (GiB) vLLM does not measure the free memory in a warm-up pass. Variables that are set already win.
CPU_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # --enforce-eager leaves the log-probs' rank counter to be compiled, at the first request
}


def die_with_parent() -> None:
    """Has the kernel kill a spawned child when its parent ends; the server itself is tied to its supervisor by that one."""
    if __name__ != "__main__":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ[_PARENT]):  # it ended before the call
            sys.exit(1)
    os.environ[_PARENT] = str(os.getpid())  # for the children


def is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def name_package_vllm() -> None:
    """vLLM's command line asks for the version of a package called vllm; the CPU build's package is called vllm-cpu."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        return original("vllm-cpu") + "+cpu" if name == "vllm" else original(name)

    importlib.metadata.version = version


def main() -> None:
    options = sys.argv[1:]
    if is_cpu_build():
        for name, value in CPU_SETTINGS.items():
            os.environ.setdefault(name, value)
        options.append("--enforce-eager")  # compilation takes a minute here and gains little
        # After each part but the last of a prompt, vLLM takes a sampled token back by setting its generator's offset; a CPU's has
        # none, and the engine dies ("CPU Generator does not use offset"). So no prompt with a seed may be prefilled in parts.
        options.append("--no-enable-chunked-prefill")
        if "--tensor-parallel-size=1" in options:
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker lives in the engine core: a process less
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *options]
    vllm()


die_with_parent()
if is_cpu_build():
    name_package_vllm()
if __name__ == "__main__":
    main()
