#!/usr/bin/env bash
# Train the reranker in the team image on one DGX.
set -euo pipefail

IMAGE=${IMAGE:-nvcr.io/nvidia/pytorch:24.05-py3}
CODE=$(cd "$(dirname "$0")" && pwd)
DATA=${DATA:-/raid/msmarco}
OUT=${OUT:-/raid/runs/reranker}
GPUS=8

mkdir -p "$OUT"

docker run --rm --gpus all \
  --ulimit memlock=-1 --ulimit stack=67108864 \
  --network host \
  -v "$CODE":/workspace/code:ro \
  -v "$DATA":/data:ro \
  -v "$OUT":/out \
  -e OMP_NUM_THREADS=8 \
  -w /workspace/code \
  "$IMAGE" \
  torchrun --standalone --nproc_per_node="$GPUS" train_reranker.py \
    --data /data/train.tsv \
    --out /out \
    --batch_size 64 \
    --num_workers 8

echo "weights in $OUT"
