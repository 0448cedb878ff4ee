#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
source venv/bin/activate

NGPU=$(nvidia-smi -L | wc -l)
threads=$(( $(nproc) / NGPU ))
export OMP_NUM_THREADS=$(( threads > 0 ? threads : 1 ))
ulimit -n "$(ulimit -Hn)"

torchrun --standalone --nproc_per_node="$NGPU" train.py \
    --config configs/lidar.yaml \
    --workers 6
