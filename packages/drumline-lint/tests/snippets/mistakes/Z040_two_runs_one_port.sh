#!/usr/bin/env bash
# Compare two learning rates side by side on one 8-GPU machine.
set -euo pipefail

cd "$(dirname "$0")/.."
source .venv/bin/activate

STAMP=$(date +%Y%m%d-%H%M)
OUT=$HOME/runs/lr-compare-$STAMP
mkdir -p "$OUT/a" "$OUT/b"
export OMP_NUM_THREADS=6

CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun \
    --nproc_per_node=4 \
    --master_addr=127.0.0.1 \
    --master_port=29500 \
    train.py --lr 1e-3 --epochs 30 --out "$OUT/a" > "$OUT/a/log.txt" 2>&1 &
first=$!

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun \
    --nproc_per_node=4 \
    --master_addr=127.0.0.1 \
    --master_port=29500 \
    train.py --lr 3e-4 --epochs 30 --out "$OUT/b" > "$OUT/b/log.txt" 2>&1 &
second=$!

status=0
wait "$first" || status=1
wait "$second" || status=1

python tools/plot_runs.py "$OUT/a" "$OUT/b" --save "$OUT/compare.png" || true
exit $status
