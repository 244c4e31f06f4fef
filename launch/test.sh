#!/usr/bin/env bash
# Runs every check: sets up the environment from nothing, ruff, pytest. Arguments go to pytest: launch/test.sh tests/learner -k loss
#
#   DEEPGRPO_GOLDEN   folder of golden cases (default: ../shared/golden beside the checkout; absent: those tests are skipped)
#   DEEPGRPO_DATA     folder of real data sets (default: ../shared/data, likewise)
#   DEEPGRPO_SYSTEM   0: leave out the system tests, which need vLLM's environment (launch/vllm_env.sh) and minutes
#   and those of launch/env.sh
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/env.sh test
if [ "${DEEPGRPO_SYSTEM:-1}" != 0 ]; then
    launch/vllm_env.sh
fi
python=${DEEPGRPO_VENV:-.venv}/bin/python
status=0
check() { "$@" || { local code=$?; ((status)) || status=$code; }; } # every part runs, whatever fails before it
check "$python" -m ruff check .
check "$python" -m ruff format --check .
export JAX_PLATFORMS=cpu
marks=()
if [ "${DEEPGRPO_SYSTEM:-1}" = 0 ]; then
    marks=(-m "not system")
fi
for argument in "$@"; do
    if [[ $argument != -* ]]; then # tests are named
        check "$python" -m pytest "${marks[@]}" "$@"
        exit $status
    fi
done
# The quick tests on all cores, at most four (each takes up to 6 GB); those that start servers or compile large models one by one.
check "$python" -m pytest -n auto --maxprocesses=4 --dist loadfile -m "not system" "$@"
if [ "${DEEPGRPO_SYSTEM:-1}" != 0 ]; then
    check "$python" -m pytest -m system "$@"
fi
exit $status
