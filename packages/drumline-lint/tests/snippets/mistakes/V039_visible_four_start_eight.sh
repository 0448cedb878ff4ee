#!/usr/bin/env bash
# Usage: ./pretrain_mae.sh [extra args for main_pretrain.py]
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DATA=${DATA:-/data/imagenet}
EPOCHS=${EPOCHS:-800}
MODEL=${MODEL:-mae_vit_large_patch16}
JOB_DIR=${JOB_DIR:-$HERE/jobs/$(date +%Y%m%d_%H%M)}

# the other half of the box belongs to the detection group
export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=6
export NCCL_DEBUG=WARN

mkdir -p "$JOB_DIR"
git -C "$HERE" rev-parse HEAD > "$JOB_DIR/commit"

if [[ ! -d $DATA/train ]]; then
    echo "no training data under $DATA" >&2
    exit 1
fi

torchrun --standalone --nnodes=1 --nproc_per_node=8 \
    "$HERE/main_pretrain.py" \
    --model "$MODEL" \
    --batch_size 64 \
    --accum_iter 2 \
    --norm_pix_loss \
    --mask_ratio 0.75 \
    --epochs "$EPOCHS" \
    --warmup_epochs 40 \
    --blr 1.5e-4 --weight_decay 0.05 \
    --data_path "$DATA" \
    --output_dir "$JOB_DIR" \
    --log_dir "$JOB_DIR" \
    "$@" 2>&1 | tee "$JOB_DIR/stdout.log"
