#!/bin/bash
# full run, 8x H100, ~4 days
set -euo pipefail

source /opt/train/env.sh
cd /opt/train/diffusion

export OMP_NUM_THREADS=12
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export CUDA_LAUNCH_BLOCKING=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export WANDB_MODE=offline

CKPT=/ckpt/sd-base
mkdir -p "$CKPT"
RESUME=""
if [ -f "$CKPT/last.ckpt" ]; then
    RESUME="--resume $CKPT/last.ckpt"
fi

exec torchrun --standalone --nproc_per_node=8 \
    train.py \
    --config configs/sd_base_512.yaml \
    --batch-size 24 \
    --max-steps 600000 \
    --ckpt-dir "$CKPT" \
    $RESUME
