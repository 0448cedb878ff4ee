#!/bin/bash
# 4 x A100
set -e
export OMP_NUM_THREADS=4
torchrun --standalone --nproc_per_node=4 train_reid.py \
    --data /data/market1501 \
    --epochs 120 \
    --batch 64
