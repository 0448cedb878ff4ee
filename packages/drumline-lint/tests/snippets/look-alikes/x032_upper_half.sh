#!/usr/bin/env bash
# Train on the upper half of a shared 8-GPU machine; the lower half belongs to another group.
set -euo pipefail

export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=4,5,6,7
export OMP_NUM_THREADS=8
# no InfiniBand card in this machine, all traffic stays inside it
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=lo

OUT=${1:-$HOME/runs/$(date +%F-%H%M)}
mkdir -p "$OUT"

torchrun \
    --standalone \
    --nproc_per_node=4 \
    train_tts.py \
    --config conf/vits.yaml \
    --out "$OUT" 2>&1 | tee "$OUT/train.log"
