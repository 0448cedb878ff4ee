#!/bin/bash
set -e
cd "$(dirname "$0")"
export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=4

torchrun --standalone --nproc_per_node=4 train.py \
    --data /data/food101 \
    --epochs 30 \
    --batch-size 96
