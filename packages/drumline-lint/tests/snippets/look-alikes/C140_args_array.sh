#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
source venv/bin/activate
export OMP_NUM_THREADS=4

launch=(
    --standalone
    --nproc_per_node=4   # all cards of this box
)

options=(
    --config configs/base.yaml
    --batch-size 64
    # --compile          # slower start, not for short runs
    --precision bf16     # A100 and newer
    --out runs/base
)

torchrun "${launch[@]}" train.py "${options[@]}" "$@"
