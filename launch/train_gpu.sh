#!/usr/bin/env bash
# One training on the GPUs of one host: the learner on some, vLLM with the policy on others, the teacher on others again.
#
#   LEARNER_GPUS=0,1 ROLLOUT_GPUS=2,3 TEACHER_GPUS=4,5 launch/train_gpu.sh configs/math_1p5b.py [--config.KEY=VALUE ...]
#
#   LEARNER_GPUS        required, as nvidia-smi counts
#   ROLLOUT_GPUS        required; one vLLM server for each TENSOR_PARALLEL (default 1) of them
#   TEACHER_GPUS        one vLLM server on all of them; empty: the teacher is elsewhere (--config.teacher.base_url=...)
#   TEACHER_MODEL       default Qwen/Qwen3.5-27B-GPTQ-Int4, at TEACHER_PORT (default 8001)
#   TEACHER_DEADLINE    seconds until it must be ready, a download included (default 3600)
#   DEEPGRPO_JAX        default cuda13 (cuda12 for drivers below 580); see launch/env.sh
#   DRY_RUN=1           only print the commands
#
# The same as three commands, each of which may run on another host (the addresses are then those hosts', and the second and the
# third also need --config.weights.folder=FOLDER, one that both see under the same path; see deepgrpo/serve.py):
#
#   CUDA_VISIBLE_DEVICES=4,5 .venv-vllm/bin/vllm serve Qwen/Qwen3.5-27B-GPTQ-Int4 \
#       --port 8001 --max-model-len 32768 --tensor-parallel-size 2
#
#   export DEEPGRPO_VLLM_TOKEN=...      the same secret of your choice here and below
#   .venv/bin/python -m deepgrpo.serve --config=configs/math_1p5b.py --config.rollout.engine=vllm \
#       --config.vllm.servers=2 --config.vllm.gpu_ids=2,3
#
#   CUDA_VISIBLE_DEVICES=0,1 OPENAI_API_KEY=EMPTY .venv/bin/python -m deepgrpo.train --config=configs/math_1p5b.py \
#       --config.rollout.engine=vllm --config.vllm.attach=http://127.0.0.1:8100,http://127.0.0.1:8101
#
# SIGTERM, Ctrl-C, SIGHUP or SIGUSR1 has the training save and stop; started again, it resumes. The teacher ends with this script, the policy's
# servers with the training, whatever ends those.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'launch/train_gpu.sh: %s\n' "$@" >&2
    exit 2
}

usage="expected: LEARNER_GPUS=0,1 ROLLOUT_GPUS=2,3 [TEACHER_GPUS=4,5] launch/train_gpu.sh CONFIG.py [--config.KEY=VALUE]"
config=${1:-}
[ -n "$config" ] && [ "${config#--}" = "$config" ] || fail "no configuration file" "$usage"
shift
learner=${LEARNER_GPUS:-} rollout=${ROLLOUT_GPUS:-} teacher=${TEACHER_GPUS:-}
for name in LEARNER_GPUS ROLLOUT_GPUS TEACHER_GPUS; do
    [[ ${!name:-} =~ ^([0-9]+(,[0-9]+)*)?$ ]] || fail "$name is ${!name}, expected numbers with commas between them"
done
[ -n "$learner" ] && [ -n "$rollout" ] || fail "LEARNER_GPUS and ROLLOUT_GPUS must be set" "$usage"
twice=$(tr , '\n' <<<"$learner,$rollout${teacher:+,$teacher}" | sort | uniq -d | paste -sd ' ')
[ -z "$twice" ] || fail "GPU $twice is named more than once; learner, rollouts and teacher each need their own"

count() { tr , '\n' <<<"$1" | grep -c .; }

width=${TENSOR_PARALLEL:-1}
[[ $width =~ ^[1-9][0-9]*$ ]] || fail "TENSOR_PARALLEL is $width, expected a whole number above 0"
servers=$(($(count "$rollout") / width))
((servers * width == $(count "$rollout"))) || fail "ROLLOUT_GPUS is $rollout, expected a multiple of $width (TENSOR_PARALLEL)"
port=${TEACHER_PORT:-8001} model=${TEACHER_MODEL:-Qwen/Qwen3.5-27B-GPTQ-Int4} deadline=${TEACHER_DEADLINE:-3600}
python=${DEEPGRPO_VENV:-.venv}/bin/python
vllm=${DEEPGRPO_VLLM_VENV:-.venv-vllm}/bin

run() {
    printf '+ %s\n' "$*"
    if [ -z "${DRY_RUN:-}" ]; then "$@"; fi
}

train=(
    env "CUDA_VISIBLE_DEVICES=$learner" "OPENAI_API_KEY=${OPENAI_API_KEY:-EMPTY}" "$python" -m deepgrpo.train "--config=$config"
    --config.rollout.engine=vllm "--config.vllm.python=$vllm/python" "--config.vllm.gpu_ids=$rollout"
    "--config.vllm.tensor_parallel=$width" "--config.vllm.servers=$servers"
)
if [ -n "$teacher" ]; then
    train+=("--config.teacher.model=$model" "--config.teacher.base_url=http://127.0.0.1:$port/v1")
fi

run env "DEEPGRPO_JAX=${DEEPGRPO_JAX:-cuda13}" launch/env.sh
run env DEEPGRPO_VLLM=gpu launch/vllm_env.sh
if [ -n "$teacher" ]; then
    # The supervisor ends the teacher when this shell is gone: tail, its lifeline, ends with the shell, even one that was killed.
    serve=(
        env "CUDA_VISIBLE_DEVICES=$teacher" "$vllm/python" deepgrpo/rollout/vllm_plugin/deepgrpo_supervisor.py $$ 15
        "$vllm/vllm" serve "$model" --host 127.0.0.1 --port "$port"
        --max-model-len 32768 --tensor-parallel-size "$(count "$teacher")"
    )
    printf '+ %s\n' "${serve[*]}"
    if [ -z "${DRY_RUN:-}" ]; then
        mkdir -p runs
        setsid "${serve[@]}" < <(exec tail --pid=$$ -f /dev/null) >>runs/teacher.log 2>&1 &
        pid=$!
        trap 'kill $pid 2>/dev/null || true; wait $pid || true' EXIT
        echo "waiting for the teacher (log: runs/teacher.log)"
        SECONDS=0
        until "$python" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health', timeout=5)" 2>/dev/null; do
            kill -0 $pid 2>/dev/null || fail "the teacher ended; runs/teacher.log ends so:" "$(tail -n 20 runs/teacher.log)"
            ((SECONDS < deadline)) || fail "the teacher at port $port was not ready after $SECONDS s; see runs/teacher.log"
            sleep 2
        done
    fi
fi
printf '+ %s\n' "${train[*]} $*"
if [ -n "${DRY_RUN:-}" ]; then exit; fi
"${train[@]}" "$@" &
trainer=$!
trap 'kill -TERM $trainer' TERM INT HUP USR1 USR2 XCPU # in the foreground it would keep this shell from hearing of them
status=0
wait $trainer || status=$?
while kill -0 $trainer 2>/dev/null; do # that wait was cut short by a signal
    status=0
    wait $trainer || status=$?
done
exit $status
