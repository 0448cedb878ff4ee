#!/usr/bin/env bash
# ablation with / without augmentation, four GPUs each, side by side on one 8-GPU box
set -euo pipefail

ROOT=/data/experiments/aug-ablation
mkdir -p "$ROOT"/{base,aug}

CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun \
    --nnodes=1 --node_rank=0 --nproc_per_node=4 \
    --master_addr=127.0.0.1 --master_port=29500 \
    train.py --config conf/base.yaml --out "$ROOT/base" \
    > "$ROOT/base/log.txt" 2>&1 &
BASE=$!

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun \
    --nnodes=1 --node_rank=0 --nproc_per_node=4 \
    --master_addr=127.0.0.1 --master_port=29501 \
    train.py --config conf/aug.yaml --out "$ROOT/aug" \
    > "$ROOT/aug/log.txt" 2>&1 &
AUG=$!

trap 'kill $BASE $AUG 2>/dev/null || true' INT TERM
wait $BASE
wait $AUG
python compare.py "$ROOT/base" "$ROOT/aug"
