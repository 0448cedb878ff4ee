#!/usr/bin/env bash
# Two seeds of the same experiment at once on one 8-GPU machine, four GPUs each.
set -eu

ROOT=$(cd "$(dirname "$0")/.." && pwd)
DATA=${DATA:-/data/coco}
mkdir -p "$ROOT/runs"

launch() {
    local seed=$1 gpus=$2
    CUDA_VISIBLE_DEVICES=$gpus OMP_NUM_THREADS=6 \
        torchrun --nnodes=1 --nproc_per_node=4 \
        --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id="seed$seed" \
        "$ROOT/train_detector.py" \
        --data "$DATA" --seed "$seed" --out "$ROOT/runs/seed$seed" \
        > "$ROOT/runs/seed$seed.log" 2>&1
}

launch 1 0,1,2,3 &
first=$!
launch 2 4,5,6,7 &
second=$!

wait "$first"
wait "$second"
python "$ROOT/compare.py" "$ROOT/runs/seed1" "$ROOT/runs/seed2"
