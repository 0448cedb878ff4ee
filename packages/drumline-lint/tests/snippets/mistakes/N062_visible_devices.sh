#!/usr/bin/env bash
# Fine-tune SAM on the microscope images. GPUs 0-1 are taken by Anna this week.
set -euo pipefail

ROOT=$(git rev-parse --show-toplevel)
cd "$ROOT"

export PYTHONPATH="$ROOT:${PYTHONPATH:-}"
export OMP_NUM_THREADS=8
export TORCH_HOME=/data/torch_home

RUN=sam_b_$(date +%Y%m%d)
mkdir -p "runs/$RUN"
cp configs/sam_b.yaml "runs/$RUN/"

CUDA_VISIBLE_DEVICES=2,3 torchrun \
  --standalone \
  --nproc_per_node=4 \
  finetune_sam.py \
  --config configs/sam_b.yaml \
  --checkpoint weights/sam_vit_b.pth \
  --output "runs/$RUN" \
  --seed 17

python scripts/export_onnx.py --ckpt "runs/$RUN/best.pt" --out "runs/$RUN/sam_b.onnx"
