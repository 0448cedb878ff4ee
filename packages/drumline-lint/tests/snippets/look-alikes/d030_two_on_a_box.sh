#!/usr/bin/env bash
# Two ablations side by side on one eight-GPU machine.
set -euo pipefail

cd "$(dirname "$0")/.."
source .venv/bin/activate

DATA=${DATA:-/data/lidar}
OUT=${OUT:-runs/ablation-$(date +%Y%m%d)}
EPOCHS=${EPOCHS:-24}
mkdir -p "$OUT"

export OMP_NUM_THREADS=4
export PYTHONUNBUFFERED=1

run() {
    local name=$1 gpus=$2
    shift 2
    mkdir -p "$OUT/$name"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --standalone \
        --nproc_per_node=4 \
        train.py \
        --data "$DATA" \
        --out "$OUT/$name" \
        --epochs "$EPOCHS" \
        "$@" > "$OUT/$name/train.log" 2>&1
}

run with-map 0,1,2,3 --map-channel &
first=$!
run without-map 4,5,6,7 &
second=$!

status=0
wait "$first" || { echo "with-map failed"; status=1; }
wait "$second" || { echo "without-map failed"; status=1; }

if [ "$status" -eq 0 ]; then
    # one process is enough for the table
    CUDA_VISIBLE_DEVICES=0 python compare.py "$OUT/with-map" "$OUT/without-map" | tee "$OUT/table.txt"
fi
exit "$status"
