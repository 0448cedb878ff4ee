#!/bin/bash
set -euo pipefail

: "${CKPT_DIR:=/ckpt}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$CKPT_DIR"
echo "$(date -Is) starting on $(hostname)"

torchrun --standalone --nproc_per_node=gpu train.py --ckpt-dir "$CKPT_DIR" "$@"
