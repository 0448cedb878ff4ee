#!/usr/bin/env bash
set -euo pipefail

export OMP_NUM_THREADS=4
LOGS=logs/market_$(date +%m%d)
mkdir -p "$LOGS"

torchrun --standalone --nnodes=1 --nproc_per_node=8 train.py \
    --data-dir /datasets/market1501 \
    --logs-dir "$LOGS" \
    --batch-size 64 2>&1 | tee "$LOGS/train.log"
