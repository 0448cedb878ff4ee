#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
source venv/bin/activate
export OMP_NUM_THREADS=4
torchrun --standalone --nproc_per_node=4 train.py --data /data/birds
