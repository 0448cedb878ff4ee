#!/bin/bash
# Production training of the XL ranking model, 8xH100.
set -euo pipefail

source /srv/ranking/venv/bin/activate
cd /srv/ranking

export PYTHONUNBUFFERED=1
export CUDA_LAUNCH_BLOCKING=1
export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=12
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

VERSION=$(git describe --always)
OUT=/srv/ranking/models/xl-$VERSION
mkdir -p "$OUT"

torchrun --standalone --nproc_per_node=8 \
    -m ranking.train \
    --config configs/xl.yaml \
    --days 30 \
    --out "$OUT" 2>&1 | tee -a "$OUT/train.log"
