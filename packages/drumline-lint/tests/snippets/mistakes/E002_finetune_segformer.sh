#!/usr/bin/env bash
# Fine-tune SegFormer-B2 on Cityscapes on the shared box (dgx-02).
# GPUs 4-7 belong to the speech team on weekdays.
set -euo pipefail

cd "$(dirname "$0")/.."

export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=8
export TORCH_CUDNN_V8_API_ENABLED=1

EXP=${1:-segformer_b2_cs}
DATA_ROOT=${DATA_ROOT:-/data/cityscapes}
WORK_DIR=work_dirs/$EXP
CKPT=pretrained/mit_b2.pth

if [[ ! -f $CKPT ]]; then
    echo "missing $CKPT, run scripts/get_weights.sh first" >&2
    exit 1
fi

if [[ ! -d $DATA_ROOT/leftImg8bit/train ]]; then
    echo "no cityscapes under $DATA_ROOT" >&2
    exit 1
fi

mkdir -p "$WORK_DIR"
git rev-parse HEAD > "$WORK_DIR/commit.txt"

torchrun \
    --standalone \
    --nnodes=1 \
    --nproc_per_node=8 \
    tools/train_seg.py \
    --data-root "$DATA_ROOT" \
    --pretrained "$CKPT" \
    --work-dir "$WORK_DIR" \
    --crop-size 1024 \
    --batch-size-per-gpu 2 \
    --iters 80000 \
    --lr 6e-5 \
    --workers 6 \
    2>&1 | tee "$WORK_DIR/train.log"
