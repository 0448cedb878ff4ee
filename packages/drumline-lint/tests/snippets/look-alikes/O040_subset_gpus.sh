#!/usr/bin/env bash
# GPUs 0-3 belong to the inference service on this box
set -euo pipefail

cd "$(dirname "$0")/.."
source .venv/bin/activate

export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=4,5
export OMP_NUM_THREADS=8
NPROC=$(awk -F, '{print NF}' <<< "$CUDA_VISIBLE_DEVICES")

RUN_NAME=${1:-ocr_v3}
mkdir -p "runs/$RUN_NAME"
nvidia-smi -i "$CUDA_VISIBLE_DEVICES" -L > "runs/$RUN_NAME/gpus.txt"
git rev-parse HEAD > "runs/$RUN_NAME/commit.txt"

torchrun --standalone --nproc_per_node="$NPROC" \
    train_ocr.py \
    --lmdb /data/ocr/train \
    --val /data/ocr/val \
    --batch 128 \
    --out "runs/$RUN_NAME"

CUDA_VISIBLE_DEVICES=4 python export.py --ckpt "runs/$RUN_NAME/best.pt"
