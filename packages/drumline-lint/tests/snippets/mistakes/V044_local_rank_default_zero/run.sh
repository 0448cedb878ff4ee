#!/bin/bash
set -e
cd "$(dirname "$0")"
export OMP_NUM_THREADS=4
export NCCL_DEBUG=WARN
OUT=runs/$(date +%F_%H%M)
mkdir -p "$OUT"

torchrun --standalone --nproc_per_node=4 train.py \
    --data /data/celeba \
    --batch-size 64 \
    --out "$OUT"
