#!/usr/bin/env bash
# Two independent runs next to each other on one 4-GPU machine.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p logs

CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes=1 --nproc_per_node=2 \
  --master_port=29500 \
  train.py --config configs/small.yaml --out runs/small > logs/small.log 2>&1 &
small=$!

CUDA_VISIBLE_DEVICES=2,3 torchrun --nnodes=1 --nproc_per_node=2 \
  --master_port=29501 \
  train.py --config configs/wide.yaml --out runs/wide > logs/wide.log 2>&1 &
wide=$!

trap 'kill "$small" "$wide" 2>/dev/null || true' INT TERM
rc=0
wait "$small" || rc=$?
wait "$wide" || rc=$?
exit "$rc"
