#!/usr/bin/env bash
set -euo pipefail

IMAGE=nvcr.io/nvidia/pytorch:24.06-py3
SRC=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
DATA=/raid/openimages
RUNS=/raid/runs/$USER

mkdir -p "$RUNS"

docker run --rm \
  --gpus all \
  --ipc=host \
  --ulimit memlock=-1 \
  --user "$(id -u):$(id -g)" \
  -v "$SRC":/code:ro \
  -v "$DATA":/data:ro \
  -v "$RUNS":/runs \
  -e HOME=/tmp \
  -e OMP_NUM_THREADS=8 \
  -w /code \
  "$IMAGE" \
  torchrun --standalone --nproc_per_node=gpu train.py \
    --data /data --out /runs/oi --workers 10
