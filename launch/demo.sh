#!/usr/bin/env bash
# The method against its baseline on a CPU, from nothing, in minutes: a tiny student that forgets carries is trained by plain GRPO and
# by GRPO with the prefix forest, on the same budget of student tokens. Prints a table and writes runs/demo.png.
#
#   launch/demo.sh              one seed
#   launch/demo.sh --seeds 5    five, with intervals
#
# Stopped halfway, it goes on where it was when started again. For a fresh one: rm -r runs/demo-*
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seeds=1
case ${1:-} in
"") ;;
--seeds) seeds=${2:-} ;;
--seeds=*) seeds=${1#--seeds=} ;;
*) seeds= ;;
esac
if ! [[ $seeds =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/demo.sh [--seeds N]   (N: a whole number above 0), found: $*" >&2
    exit 2
fi

launch/env.sh
python=${DEEPGRPO_VENV:-.venv}/bin/python
config=configs/carry_chain.py
export JAX_PLATFORMS=cpu

"$python" -m deepgrpo.warm_start --config=$config
runs=()
for ((seed = 0; seed < seeds; seed++)); do
    echo "== plain GRPO, seed $seed"
    "$python" -m deepgrpo.train --config=$config --config.name=demo-plain-s$seed --config.seed=$seed --config.curriculum.pool=none
    echo "== GRPO with the prefix forest, seed $seed"
    "$python" -m deepgrpo.train --config=$config --config.name=demo-forest-s$seed --config.seed=$seed
    runs+=("runs/demo-plain-s$seed" "runs/demo-forest-s$seed")
done
"$python" -m deepgrpo.telemetry.plot "${runs[@]}" --out runs/demo.png
