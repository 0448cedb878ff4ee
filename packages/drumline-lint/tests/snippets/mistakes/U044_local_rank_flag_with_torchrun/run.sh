#!/bin/sh
set -e
cd "$(dirname "$0")"
export OMP_NUM_THREADS=6
exec torchrun --standalone --nproc_per_node=4 train.py \
    --root /data/market1501 --epochs 120
