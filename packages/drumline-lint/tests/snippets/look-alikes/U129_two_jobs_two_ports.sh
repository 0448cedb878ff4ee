#!/usr/bin/env bash
# Teacher and student in parallel on one 8-GPU machine.
set -uo pipefail
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS=8
export PYTHONUNBUFFERED=1
BASE_PORT=29500

start() {
    local idx=$1 gpus=$2 name=$3
    shift 3
    local n
    n=$(tr ',' '\n' <<< "$gpus" | wc -l)
    mkdir -p "runs/$name"
    CUDA_VISIBLE_DEVICES="$gpus" torchrun \
        --nnodes=1 \
        --nproc_per_node="$n" \
        --master_addr=127.0.0.1 \
        --master_port=$((BASE_PORT + idx)) \
        train.py --out "runs/$name" "$@" \
        > "runs/$name/stdout.log" 2> "runs/$name/stderr.log" &
    pids+=("$!")
}

pids=()
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM

start 0 0,1,2,3,4,5 teacher --config configs/teacher.yaml
start 1 6,7 student --config configs/student.yaml

rc=0
for p in "${pids[@]}"; do
    wait "$p" || rc=$?
done

python tools/report.py runs/teacher runs/student
exit "$rc"
