#!/bin/bash
set -euo pipefail

export MASTER_ADDR=compute-01
export MASTER_PORT=29433
export OMP_NUM_THREADS=6

mpirun -np 8 \
    -H compute-01:4,compute-02:4 \
    -x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS -x PATH -x LD_LIBRARY_PATH \
    --bind-to none \
    python train.py --shards /shared/shards
