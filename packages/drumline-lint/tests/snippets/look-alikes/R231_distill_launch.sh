#!/usr/bin/env bash
# Train teacher and baseline at the same time, four GPUs each, then distil on all eight.
set -euo pipefail

cd "$(git rev-parse --show-toplevel)"
DATA=${DATA:-/data/sounds}
OUT=${OUT:-runs/$(date +%F)}
BASE_PORT=${BASE_PORT:-29600}
mkdir -p "$OUT"

export OMP_NUM_THREADS=6
export PYTHONUNBUFFERED=1

launch() {
    local name=$1 gpus=$2 port=$3
    shift 3
    local n
    n=$(awk -F, '{print NF}' <<< "$gpus")
    mkdir -p "$OUT/$name"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 --nproc-per-node="$n" \
        --master-addr=127.0.0.1 --master-port="$port" \
        train.py --data "$DATA" --out "$OUT/$name" "$@" \
        > "$OUT/$name/log.txt" 2>&1
}

launch teacher 0,1,2,3 "$BASE_PORT" --model ast_base --epochs 60 --lr 1e-4 &
teacher_pid=$!
launch baseline 4,5,6,7 "$((BASE_PORT + 1))" --model efficientat_mn10 --epochs 120 --lr 8e-4 &
baseline_pid=$!

status=0
wait "$teacher_pid" || status=$?
wait "$baseline_pid" || status=$?
if (( status != 0 )); then
    echo "a run failed, see $OUT/*/log.txt" >&2
    exit "$status"
fi

launch student 0,1,2,3,4,5,6,7 "$BASE_PORT" \
    --model efficientat_mn10 --epochs 120 --lr 8e-4 --teacher "$OUT/teacher/best.pt"
python tools/compare.py "$OUT/baseline" "$OUT/student" | tee "$OUT/compare.txt"
