#!/usr/bin/env bash
# Runs every check: sets up the environment from nothing, ruff, pytest. Arguments go to pytest: launch/test.sh tests/learner -k loss
#
#   DEEPGRPO_GOLDEN   folder of golden cases (default: ../shared/golden beside the checkout; absent: those tests are skipped)
#   DEEPGRPO_DATA     folder of real data sets (default: ../shared/data, likewise)
#   and those of launch/env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/env.sh test
python=${DEEPGRPO_VENV:-.venv}/bin/python
"$python" -m ruff check .
"$python" -m ruff format --check .
JAX_PLATFORMS=cpu exec "$python" -m pytest "$@"
