#!/bin/sh
set -e
cd "$(dirname "$0")"
export OMP_NUM_THREADS=6
exec python -m torch.distributed.launch --nproc_per_node=4 --master_port=29507 \
    train.py --root /data/culane --epochs 12
