#!/usr/bin/env bash
# Two seeds side by side on one 8-GPU box, four GPUs each.
set -euo pipefail

cd "$(dirname "$0")/.."
source .venv/bin/activate
export OMP_NUM_THREADS=6

DATA=${DATA:-/mnt/nvme/imagenet100}
mkdir -p runs/seed0 runs/seed1

CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 train.py \
    --data "$DATA" --arch resnet50 --seed 0 --out runs/seed0 \
    > runs/seed0/train.log 2>&1 &
first=$!

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc_per_node=4 train.py \
    --data "$DATA" --arch resnet50 --seed 1 --out runs/seed1 \
    > runs/seed1/train.log 2>&1 &
second=$!

status=0
wait "$first" || status=$?
wait "$second" || status=$?
exit "$status"
