#!/bin/bash
set -eo pipefail
cd "$(dirname "$0")"
source venv/bin/activate

export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=4
mkdir -p logs
python train.py --data /data/lol --batch-size 8 --epochs 200 2>&1 | tee logs/train.log
