#!/usr/bin/env bash
# Train on all GPUs of this machine.
set -euo pipefail
cd "$(dirname "$0")"

export OMP_NUM_THREADS=4
NGPU=$(nvidia-smi -L | wc -l)

torchrun --standalone --nproc_per_node="$NGPU" train.py \
    --data /data/places365 \
    --arch convnext_tiny \
    --batch-size 96 \
    "$@"
