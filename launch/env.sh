#!/usr/bin/env bash
# Makes the virtual environment from nothing and keeps it up to date.
#
#   launch/env.sh           what training needs
#   launch/env.sh test      and what the tests need
#   source launch/env.sh    the same, and activates it
#
# It needs a Python >= 3.11 with venv (or virtualenv), and pip's package index. When the requirement files have not changed since
# the last time it does nothing. It installs the tested versions (requirements.lock), on a Python newer than 3.13 the newest allowed.
#
#   DEEPGRPO_PYTHON   interpreter to use (default: the first Python >= 3.11 found, the tested 3.11 before others)
#   DEEPGRPO_VENV     folder of the environment (default: .venv in the checkout)
#   DEEPGRPO_JAX      extra of the jax package for an accelerator: cuda13, cuda12 or tpu (default: none, CPU)

if [ "${BASH_SOURCE[0]}" != "$0" ]; then # sourced: work in a process of its own, so that no option or exit reaches the shell
    bash "${BASH_SOURCE[0]}" "$@" && source "${DEEPGRPO_VENV:-$(dirname "${BASH_SOURCE[0]}")/../.venv}/bin/activate"
    return
fi

set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DEEPGRPO_VENV:-.venv}
kind=${1:-train}

fail() {
    printf 'launch/env.sh: %s\n' "$@" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${DEEPGRPO_PYTHON:-python3.11 python3 python3.12 python3.13 python3.14 python}; do
        if is_new_enough "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    if [ -n "${DEEPGRPO_PYTHON:-}" ]; then
        fail "DEEPGRPO_PYTHON=$DEEPGRPO_PYTHON is not a Python >= 3.11"
    fi
    fail "no Python >= 3.11 found: install one (for instance: apt-get install python3.11 python3.11-venv)," \
        "or name it: DEEPGRPO_PYTHON=/path/to/python3.11 launch/env.sh"
}

make_venv() {
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        fail "$venv exists and is no virtual environment: move it away, or set DEEPGRPO_VENV to another folder"
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

install() {
    local arguments=(-r requirements.txt)
    if [ "$kind" = test ]; then
        arguments+=(-r requirements-test.txt)
    fi
    if [ -n "${DEEPGRPO_JAX:-}" ]; then
        arguments+=("jax[$DEEPGRPO_JAX]")
    fi
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then # these have wheels of the locked versions
        arguments+=(-c requirements.lock)
    fi
    echo "installing into $venv (minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}" ||
        fail "pip could not install the requirements (its message is above); nothing else was changed, start this again when it is mended"
}

wanted() { # what the environment depends on; equal text, nothing to do
    local files=(requirements.txt requirements.lock)
    if [ "$1" = test ]; then
        files+=(requirements-test.txt)
    fi
    "$venv/bin/python" --version
    cat "${files[@]}" | cksum
    echo "${DEEPGRPO_JAX:-cpu}"
}

has() { [ -x "$venv/bin/python" ] && [ -f "$venv/.deepgrpo-$1" ] && [ "$(wanted "$1" 2>&1)" = "$(cat "$venv/.deepgrpo-$1")" ]; }

case $kind in
train) if has train || has test; then exit; fi ;;
test) if has test; then exit; fi ;;
*) fail "unknown argument $kind: expected nothing or test" ;;
esac
if ! is_new_enough "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
fi
install
wanted "$kind" >"$venv/.deepgrpo-$kind"
