#!/bin/bash
set -euo pipefail

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
CKPT_DIR=${CKPT_DIR:-/ckpt}
mkdir -p "$CKPT_DIR"

exec torchrun --standalone --nproc_per_node=gpu train.py --ckpt-dir "$CKPT_DIR" "$@"
