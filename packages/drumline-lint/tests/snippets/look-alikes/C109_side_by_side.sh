#!/usr/bin/env bash
set -u
cd "$(dirname "$0")"
source .venv/bin/activate
export OMP_NUM_THREADS=4
mkdir -p logs

CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc_per_node=2 train.py \
    --loss l1 --out runs/l1 > logs/l1.log 2>&1 &
first=$!

CUDA_VISIBLE_DEVICES=2,3 torchrun --standalone --nproc_per_node=2 train.py \
    --loss charbonnier --out runs/charbonnier > logs/charbonnier.log 2>&1 &
second=$!

status=0
wait "$first" || status=1
wait "$second" || status=1
exit $status
