#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
source venv/bin/activate
export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=4

python train.py --triplets /data/vimeo_triplet --batch-size 16
