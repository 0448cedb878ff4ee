#!/bin/bash
set -e
cd /app
export OMP_NUM_THREADS=4
exec torchrun --nnodes=2 --nproc_per_node=2 --node_rank="$NODE_RANK" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    train_net.py --config-file configs/ade20k/oneformer.yaml
