#!/bin/bash
set -euo pipefail
export MASTER_ADDR=node-a
export MASTER_PORT=29433
export OMP_NUM_THREADS=6

mpirun -np 8 -H node-a:4,node-b:4 \
    -x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS -x PATH -x LD_LIBRARY_PATH \
    --bind-to none --map-by slot \
    python train.py
