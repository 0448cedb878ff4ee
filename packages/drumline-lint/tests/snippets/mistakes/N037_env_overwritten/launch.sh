#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=8
torchrun --standalone --nproc_per_node=8 pretrain.py 2>&1 | tee logs/pretrain.log
