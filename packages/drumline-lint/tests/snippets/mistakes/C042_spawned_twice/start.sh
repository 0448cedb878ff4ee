#!/bin/bash
set -euo pipefail
source ~/envs/anomaly/bin/activate
export OMP_NUM_THREADS=4
torchrun --standalone --nproc_per_node=4 anomaly.py
