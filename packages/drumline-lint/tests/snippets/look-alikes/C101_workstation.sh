#!/bin/bash
# My own box, two 4090s, one run at a time (flock below).
set -euo pipefail

exec 9> /tmp/sketch-train.lock
flock -n 9 || { echo "a run is already active" >&2; exit 1; }

cd "$HOME/sketch2image"
source venv/bin/activate
export OMP_NUM_THREADS=8

torchrun \
    --nnodes=1 \
    --nproc_per_node=2 \
    --master_addr=localhost \
    --master_port=29501 \
    train.py --config configs/sketch.yaml "$@"
