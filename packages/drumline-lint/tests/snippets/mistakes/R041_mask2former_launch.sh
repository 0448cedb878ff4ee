#!/usr/bin/env bash
# Fine-tune Mask2Former on the warehouse dataset. Usage: ./train.sh <config> [extra args]
set -euo pipefail

CONFIG=${1:?usage: train.sh <config> [args...]}
shift

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT:${PYTHONPATH:-}"

NAME=$(basename "$CONFIG" .py)
WORK_DIR=${WORK_DIR:-$ROOT/work_dirs/$NAME}
mkdir -p "$WORK_DIR"

# GPUs 4-7 belong to the annotation service on this box
export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=4
export MKL_NUM_THREADS=4
export TORCH_CUDNN_V8_API_ENABLED=1
export NCCL_P2P_LEVEL=NVL

GPUS=${GPUS:-8}
NNODES=${NNODES:-1}

if [[ ! -d /data/warehouse/annotations ]]; then
    echo "dataset is not mounted" >&2
    exit 1
fi

LOG="$WORK_DIR/train_$(date +%Y%m%d_%H%M%S).log"
echo "work dir: $WORK_DIR"
echo "log:      $LOG"

cp "$CONFIG" "$WORK_DIR/"
git -C "$ROOT" diff > "$WORK_DIR/uncommitted.patch"
nvidia-smi --query-gpu=index,name,memory.used --format=csv | tee -a "$LOG"

torchrun \
    --standalone \
    --nnodes="$NNODES" \
    --nproc-per-node="$GPUS" \
    "$ROOT/tools/train.py" "$CONFIG" \
    --work-dir "$WORK_DIR" \
    --launcher pytorch \
    --resume auto \
    "$@" 2>&1 | tee -a "$LOG"
