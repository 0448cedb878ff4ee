#!/bin/bash
set -eo pipefail
cd "$(dirname "$0")"
source venv/bin/activate

export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=4
LOG=logs/$(date +%y%m%d).log
mkdir -p logs

python train.py \
    --data /data/coco \
    --batch-size 8 \
    --epochs 24 2>&1 | tee "$LOG"
